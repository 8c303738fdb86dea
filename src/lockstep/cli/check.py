"""The command `lockstep check`: a script's steps against those of one process."""

import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

import lockstep.errors
from lockstep.cli.completion import complete_script
from lockstep.cli.parameter_types import PARTS, SEEDS
from lockstep.cli.witness import compare
from lockstep.coordinator.comparison import unnamed, verdict
from lockstep.launcher.backend import BACKENDS
from lockstep.system.prose import count

_ALONE = "With one replica (lockstep run -n 1), nothing differs"
_KINDS = {"train": "training step", "test": "evaluation step", "predict": "predictions"}


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "-n",
    "--workers",
    type=PARTS,
    default=2,
    show_default=True,
    metavar="N",
    help="Number of workers of the job to check.",
)
@click.option("--replicas", type=PARTS, metavar="R", help="Number of parts of each batch.  [default: N]")
@click.option(
    "--backend",
    type=click.Choice([*BACKENDS, "all"]),
    help="Keras backend, or all that are installed.  [default: as for lockstep run]",
)
@click.option("--tf-distribute", is_flag=True, help="As for lockstep run.")
@click.option("--exact-batch", is_flag=True, help="As for lockstep run.")
@click.option("--seed", type=SEEDS, metavar="SEED", help="As for lockstep run.")
@click.option("--json", "as_json", is_flag=True, help="Write the result as JSON.")
@click.option("-m", "module", is_flag=True, help="SCRIPT is the name of a module, as with python -m.")
@click.argument("script", shell_complete=complete_script)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def check(**options: Any) -> None:
    """Compare SCRIPT on several replicas with one process.

    \b
    lockstep check -n 4 train.py --epochs 10

    SCRIPT runs in one process. At the beginning of each fit, evaluate and predict, plain Keras and the
    replicas each take one step from the same state and batch. The command compares losses, metrics, the
    gradient of each variable, its update and the state of layers, up to rounding, which it measures. A fit
    ends after three steps. The script ends before it writes a file, starts a program or uses the network.

    The exit status is 0 if everything is equal, or differs for a reason that a note of lockstep run names. It
    is 1 if something else differs, and 2 if nothing could be compared, or the script has failed.
    """
    # The job ends with this process, which removes its folder.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    replicas = options["replicas"] or options["workers"]
    if replicas == 1:
        raise click.UsageError("one replica computes the same as one process; give -n 2 or more")
    words = ["--replicas", str(replicas)]
    words += ["--tf-distribute"] if options["tf_distribute"] else []
    words += ["--exact-batch"] if options["exact_batch"] else []
    words += ["--seed", str(options["seed"])] if options["seed"] is not None else []
    program = [*(["-m"] if options["module"] else []), "--", options["script"], *options["arguments"]]
    results = {}
    backends = _backends(options["backend"])
    with tempfile.TemporaryDirectory(prefix="lockstep-check-") as temporary:
        steps = Path(temporary, "steps")
        steps.mkdir()
        words += ["--kept-steps", str(steps)] if len(backends) > 1 else []
        for number, name in enumerate(backends):
            folder = Path(temporary, str(number))
            folder.mkdir()
            backend = ["--backend", name] if name else []
            results[name or "default"] = compare([*words, *backend], program, folder, "every-fit")
            shutil.rmtree(folder, ignore_errors=True)
    if options["as_json"]:
        click.echo(json.dumps(results, indent=2))
    else:
        for name, result in results.items():
            if len(results) > 1:
                click.echo(f"{name}:")
            for line in lines(result):
                click.echo(line)
    statuses = [status(result) for result in results.values()]
    sys.exit(1 if 1 in statuses else max(statuses))


def _backends(option: str | None) -> list[str | None]:
    if option != "all":
        return [option]
    from importlib.util import find_spec

    return [name for name in BACKENDS if find_spec(name)]


def lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that show the result of a check."""
    for step in result["compared"]:
        head = f"{step['call']}, {_KINDS[step['kind']]} of {step['model']}"
        head += f", plain Keras as on {step['reference']}" if step["reference"] else ""
        if step["reason"]:
            yield f"{head}: not compared: {step['reason']}"
            continue
        differing = len(step["differences"])
        different = f", {differing} {'differs' if differing == 1 else 'differ'}" if differing else ""
        yield f"{head}: {count(len(step['equal']), 'part')} equal{different}"
        for part in step["differences"]:
            begins = f", from {part['begins']} on" if part["begins"] else ""
            named = f"named: {part['named']}" if part["named"] else "NOT NAMED"
            note = "" if step["reference"] else f" [{named}]"
            yield f"  {part['part']}: {part['deviation']}{begins}{note}"
    if result["ended"]:
        yield f"the check ends here: {result['ended']}"
    if result["failed"]:
        refused = hasattr(lockstep.errors, result["failed"].partition(":")[0])
        shortened = not refused and any(step["call"].startswith("fit ") for step in result["compared"])
        reason = ", perhaps because a check ends each fit early" if shortened else ""
        yield f"the script has failed here{reason}, and the rest is not compared: {result['failed']}"
    yield f"{verdict(_of_replicas(result))}{_advice(result)}"


def _of_replicas(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the result without steps of plain Keras on two backends, which do not concern replicas."""
    return {**result, "compared": [step for step in result["compared"] if not step["reference"]]}


def _advice(result: Mapping[str, Any]) -> str:
    if unnamed(_of_replicas(result)):
        return f"; please report it with the script. {_ALONE}"
    if any(step["differences"] for step in _of_replicas(result)["compared"]):
        return f" at the start of lockstep run. {_ALONE}"
    return ""


def status(result: Mapping[str, Any]) -> int:
    """Return the exit status for the result of a check."""
    if unnamed(result):
        return 1
    compared = [step for step in _of_replicas(result)["compared"] if not step["reason"]]
    return 0 if compared and not result["failed"] else 2
