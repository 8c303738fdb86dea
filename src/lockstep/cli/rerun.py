"""The command `lockstep rerun`: repeats a run, and compares."""

import sys
from pathlib import Path

import click

from lockstep.cli.completion import complete_run
from lockstep.cli.parameter_types import Folder
from lockstep.errors import ConfigError


@click.command()
@click.argument("run", shell_complete=complete_run)
@click.option(
    "--run-dir",
    type=Folder(path_type=Path),
    help="Folder of the new run.  [default: runs/<script>-<time>, in the folder where RUN was started]",
)
@click.option(
    "--env",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="Set a variable of the script to a different value than in RUN. With NAME alone, the value here is "
    "used, and not recorded. Can be repeated.",
)
@click.option(
    "--one-process",
    is_flag=True,
    help="With parameter servers: repeat the steps of all processes in one process.",
)
def rerun(run: str, run_dir: Path | None, env: tuple[str, ...], one_process: bool) -> None:
    """Repeat RUN, and say whether the bits are equal.

    RUN is the folder of a run, or its name in runs/. The script runs again on this host, from its first step,
    in the folder where the run was started. It has the same arguments, replicas, threads, seed, backend and
    number of workers, and the recorded environment variables that change how libraries compute. The exit
    status is 0 if the bits are equal, 1 if they differ, and 2 if the run cannot be repeated.
    """
    from lockstep.coordinator.run_lookup import find_run
    from lockstep.diff.comparison import compare
    from lockstep.diff.recording import read_recording
    from lockstep.diff.repetition import fresh_run_folder, repeat
    from lockstep.diff.wording import lines
    from lockstep.system.environment import parse_variables

    variables = parse_variables(env)
    recording = read_recording(find_run(run).folder)
    folder = run_dir.absolute() if run_dir is not None else fresh_run_folder(recording)
    status = repeat(recording, folder, one_process=one_process, variables=variables)
    if status:
        raise ConfigError(f"the new run ended with status {status}; its logs are in {folder}")
    again = read_recording(folder)
    comparison = compare(recording, again)
    for line in lines(comparison, [run, str(folder)]):
        click.echo(line)
    digest = again.finished.get("digest")
    if comparison.equal and digest and recording.finished.get("digest") == digest:
        click.echo(f"the models at the end are equal to the last bit (digest {digest})")
    sys.exit(0 if comparison.equal else 1)
