"""Repeats runs from what their folders say: `lockstep rerun`, and the reruns of `lockstep diff`."""

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from lockstep.diff.comparison import Comparison, compare
from lockstep.diff.recording import Recording, read_recording
from lockstep.diff.wording import lines
from lockstep.errors import ConfigError
from lockstep.system.environment import DIGESTS, repeating
from lockstep.system.files import read_regular
from lockstep.system.notes import note

_TAIL = 20


@click.command()
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    help="Folder of the new run.  [default: runs/<script>-<time>, in the folder where RUN was started]",
)
def rerun(run: Path, run_dir: Path | None) -> None:
    """Repeat RUN, the folder of a run, and say whether the bits are equal.

    The script runs again on this host, from its first step, in the folder where the run was started: with the
    same arguments, replicas, threads, seed, backend and number of workers, and the environment variables that
    change how libraries compute. The exit status is 0 if the bits are equal, 1 if they differ, 2 if the run
    cannot be repeated.
    """
    recording = read_recording(run)
    folder = run_dir.absolute() if run_dir is not None else _fresh(recording)
    status = repeat(recording, folder, {})
    if status:
        raise ConfigError(f"the new run ended with status {status}; its logs are in {folder}")
    again = read_recording(folder)
    found = compared(recording, again)
    for line in lines(found, [str(run), str(folder)]):
        click.echo(line)
    digest = again.finished.get("digest")
    if found.equal and digest and recording.finished.get("digest") == digest:
        click.echo(f"the models at the end are equal to the last bit (digest {digest})")
    sys.exit(0 if found.equal else 1)


def compared(first: Recording, second: Recording) -> Comparison:
    """Compare two runs.

    Raises:
        ConfigError: they have nothing in common that could be equal.
    """
    replicas = first.replicas, second.replicas
    if replicas[0] != replicas[1]:
        raise ConfigError(
            f"{first.folder} has {replicas[0]} replicas and {second.folder} has {replicas[1]}, so nothing in "
            "them can be equal: compare runs with the same --replicas"
        )
    if not first.steps.keys() & second.steps.keys():
        raise ConfigError(
            f"{first.folder} and {second.folder} have recorded no common step, so nothing is compared"
        )
    return compare(first, second)


def rerun_both(found: Comparison, recordings: tuple[Recording, Recording], folder: Path) -> list[Recording]:
    """Repeat both runs up to the step where they differ, and record everything.

    Each begins from the newest of its checkpoints before that step, if it has some, otherwise from the start.

    Args:
        found: the comparison of the runs.
        recordings: the runs.
        folder: a temporary one for the new runs.

    Returns:
        The new recordings.
    """
    until = (
        max(found.lengths)
        if found.place == "end"
        else max(found.step or 1, found.key.step if found.key else 0)
    )
    again = []
    for number, recording in enumerate(recordings, 1):
        note(f"repeating {recording.folder} up to step {until}")
        words = []
        if start := _checkpoint(recording, found.after):
            copy = folder / f"checkpoints-{number}"
            copy.mkdir()
            shutil.copytree(start, copy / start.name)
            words = ["--checkpoint", str(copy), "--checkpoint-every", "1000000000"]
        own = folder / f"run-{number}"
        log = folder / f"output-{number}"
        with log.open("wb") as output:
            status = repeat(recording, own, {DIGESTS: str(until)}, words, output)
        if status:
            tail = log.read_text(errors="replace").splitlines()[-_TAIL:]
            raise ConfigError(
                f"{recording.folder} cannot be repeated: the new run ended with status {status}\n"
                + "\n".join(tail)
            )
        again.append(read_recording(own))
    return again


def repeat(
    recording: Recording,
    folder: Path,
    variables: Mapping[str, str],
    options: list[str] | None = None,
    output: Any = None,
) -> int:
    """Run the script of a run again, with its options; return the exit status.

    Args:
        recording: of the run.
        folder: of the new run, absolute.
        variables: further environment variables.
        options: further options.
        output: the file for the output of the command; None for that of this process.

    Raises:
        ConfigError: the run cannot be repeated.
    """
    job = recording.job
    where = Path(str(job.get("directory") or ""))
    if not job.get("directory") or not where.is_dir():
        raise ConfigError(
            f"{recording.folder} cannot be repeated: the folder where it was started "
            f"{f'is missing: {where}' if job.get('directory') else 'is not recorded'}"
        )
    if job.get("inherited"):
        raise ConfigError(
            f"{recording.folder} cannot be repeated: it has run a function of a program or notebook, which "
            "the folder does not contain; call the function again"
        )
    _refuse_changed(recording)
    words = [
        sys.executable,
        "-m",
        "lockstep",
        "run",
        "--run-dir",
        str(folder),
        *_options(job),
        *(options or ()),
    ]
    words += ["--", str(job["target"]), *map(str, job["arguments"])]
    environment = repeating(recording.program["flags"]) | dict(variables)
    return subprocess.run(
        words, cwd=where, env=environment, stdout=output, stderr=output, check=False
    ).returncode


def _options(job: Mapping[str, Any]) -> list[str]:
    """Return the options of `lockstep run` that bits depend on, and the number of workers."""
    words = ["-n", str(job["workers"]), "--replicas", str(job["replicas"])]
    words += ["--threads-per-worker", str(job["threads"]), "--seed", str(job["seed"])]
    words += ["--backend", str(job["backend"])] if job["backend"] else []
    words += ["--input", "joint"] if job["joint_input"] else []
    words += ["--tf-distribute"] if job["tf_distribute"] else []
    words += [] if job["adopts"] else ["--no-adopt"]
    words += ["--timeout", str(job["timeout"])]
    return words + (["-m"] if job["module"] else [])


def _refuse_changed(recording: Recording) -> None:
    """Say which source files of the program have changed since the run, if any."""
    import hashlib

    script = recording.job.get("script")
    if not script:
        return
    changed = []
    for name, text in recording.program["sources"].items():
        path = Path(script["path"]).parent / name
        try:
            now = hashlib.sha256(read_regular(path)).hexdigest()
        except OSError:
            now = ""
        if now != text:
            changed.append(name)
    if changed:
        note(f"changed since {recording.folder}: {', '.join(changed)}; the new run uses the present version")


def _checkpoint(recording: Recording, after: int) -> Path | None:
    """Return the newest complete checkpoint of a run that is not after a step; None if there is none."""
    saved = recording.job.get("checkpoints")
    if not saved or not Path(saved["folder"]).is_dir():
        return None
    from lockstep.checkpoint.store import Store

    entries = Store(Path(saved["folder"])).entries()
    fit = [entry for entry in entries if entry.fault is None and entry.step <= after]
    return max(fit, key=lambda entry: entry.step).path if fit else None


def _fresh(recording: Recording) -> Path:
    import time

    from lockstep.system.run_folder import fresh_folder

    name = Path(str(recording.job.get("target", "run"))).stem
    base = Path(str(recording.job.get("directory") or "."))
    folder = fresh_folder(base / "runs", name, time.time())
    folder.rmdir()
    return folder.absolute()
