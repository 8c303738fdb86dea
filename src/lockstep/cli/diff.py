"""The command `lockstep diff`: the first step at which two runs differ, and why."""

import json
import sys
import tempfile
from pathlib import Path

import click

from lockstep.cli.completion import complete_run
from lockstep.cli.parameter_types import Run
from lockstep.system.notes import note


@click.command()
@click.argument("first", metavar="RUN", type=Run(), shell_complete=complete_run)
@click.argument("second", metavar="RUN", type=Run(), shell_complete=complete_run)
@click.option("--json", "as_json", is_flag=True, help="Write the result as JSON.")
@click.option(
    "--rerun",
    "repeats",
    is_flag=True,
    help="If the record does not name the step or the variable, repeat both runs up to the step where they "
    "differ, and record everything.",
)
def diff(first: str, second: str, as_json: bool, repeats: bool) -> None:
    """Find the first step at which two runs differ, and why.

    \b
    lockstep diff runs/train-20260101-120000 runs/train-20260102-120000

    RUN is the folder of a run, its name in runs/, or its URL in an object store. Runs with different numbers
    of workers and the same number of replicas are equal. The exit status is 0 if everything that both runs
    have recorded is equal, 1 if the runs differ, and 2 if they cannot be compared.
    """
    from lockstep.coordinator.run_lookup import find_run
    from lockstep.diff.comparison import compare
    from lockstep.diff.recording import read_recording
    from lockstep.diff.repetition import rerun_both
    from lockstep.diff.wording import as_data, detail, lines

    recordings = read_recording(find_run(first).folder), read_recording(find_run(second).folder)
    comparison = compare(*recordings)
    if repeats and comparison.missing:
        with tempfile.TemporaryDirectory(prefix="lockstep-diff-") as folder:
            again = rerun_both(comparison, recordings, Path(folder))
            for before, after in zip(recordings, again, strict=True):
                if not (repetition := compare(before, after)).equal and repetition.place != "length":
                    note(f"{before.folder} does not repeat itself: {detail(repetition)}")
            closer = compare(*again)
        if closer.equal:
            note("the new runs are equal as far as they are recorded: the difference does not repeat")
        else:
            comparison = closer
    names = [first, second]
    if as_json:
        click.echo(json.dumps(as_data(comparison, names), indent=2))
    else:
        for line in lines(comparison, names):
            click.echo(line)
    sys.exit(0 if comparison.equal else 1)
