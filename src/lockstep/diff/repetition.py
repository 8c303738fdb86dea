"""Repeats a run from its folder: the script, and the options and variables on which bits depend."""

import hashlib
import shutil
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lockstep.checkpoint.store import Entry, Store
from lockstep.diff.comparison import Comparison
from lockstep.diff.recording import Recording, read_recording
from lockstep.errors import ConfigError
from lockstep.parameter_server.order import incomplete_orders
from lockstep.system.child_process import command_of
from lockstep.system.environment import repeating, require_variables, variable_marks
from lockstep.system.files import read_regular
from lockstep.system.notes import note
from lockstep.system.paths import RunPaths
from lockstep.system.run_folder import RUNS, fresh_folder

_TAIL = 20
_BACKEND = "KERAS_BACKEND"
"""The variable that chooses the backend in the place of `--backend`."""
_ORDERED = ("fit", "functions")
"""The methods whose calls have orders of arrival in a job with parameter servers."""


def rerun_both(
    comparison: Comparison, recordings: tuple[Recording, Recording], folder: Path
) -> list[Recording]:
    """Repeat both runs up to the step at which they differ, and record everything.

    Each begins from the newest of its checkpoints before that step, or else from the start.

    Args:
        comparison: the comparison of the runs.
        recordings: the runs.
        folder: a temporary folder for the new runs.

    Returns:
        The new recordings.
    """
    until = (
        max(comparison.lengths)
        if comparison.place == "end"
        else max(comparison.step or 1, comparison.key.step if comparison.key else 0)
    )
    again = []
    for number, recording in enumerate(recordings, 1):
        words, begin = list[str](), "from the start"
        if start := _checkpoint(recording, comparison.after):
            copy = folder / f"checkpoints-{number}"
            copy.mkdir()
            shutil.copytree(start.path, copy / start.path.name)
            words = ["--checkpoint", str(copy), "--checkpoint-every", "1000000000"]
            begin = f"from its checkpoint of step {start.step}"
        note(f"repeating {recording.folder} {begin} up to step {until}")
        run_folder = folder / f"run-{number}"
        log = folder / f"output-{number}"
        with log.open("wb") as output:
            status = repeat(recording, run_folder, ["--digests", str(until), *words], output)
        if status:
            tail = log.read_text(errors="replace").splitlines()[-_TAIL:]
            raise ConfigError(
                f"{recording.folder} cannot be repeated: the new run ended with status {status}\n"
                + "\n".join(tail)
            )
        again.append(read_recording(run_folder))
    return again


def repeat(
    recording: Recording,
    folder: Path,
    options: Sequence[str] = (),
    output: Any = None,
    *,
    one_process: bool = False,
    variables: Mapping[str, str | None] = MappingProxyType({}),
) -> int:
    """Run the script of a run again, with its options; return the exit status.

    Args:
        recording: the run.
        folder: the absolute path of the new run folder.
        options: further options.
        output: the file for the output of the command; None to use the output of this process.
        one_process: whether one process repeats all processes of a job with parameter servers.
        variables: further variables of the script, or other values; None for the value here.

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
    if not recording.program:
        raise ConfigError(
            f"{recording.folder} cannot be repeated: it ended before its first call of fit, evaluate or "
            "predict, so it has not recorded its source files and flags; run the script again"
        )
    if one_process and not recording.has_servers:
        raise ConfigError(
            f"{recording.folder} has no parameter servers, so its bits do not depend on the number of "
            f"workers: repeat it in one process with lockstep run -n 1 --replicas {recording.replicas}"
        )
    if recording.has_servers:
        _refuse_incomplete(recording)
    require_variables(variables)
    recorded = {name: value for name, value in job.get("env", {}).items() if name not in variables}
    require_variables(recorded, form=f"{recording.folder} has not recorded the value of {{}}")
    here = [name for name, value in variables.items() if value is None]
    if _BACKEND in variables or recorded.get(_BACKEND) is not None:
        job = {**job, "backend": None}
    variables = {**recorded, **variables}
    _note_changed(recording)
    _note_variables(recording, variables)
    words = command_of("lockstep", "run", "--run-dir", str(folder), *_options(job, variables), *options)
    if recording.has_servers:
        words += ["--order", str(recording.folder.absolute())]
    words += ["--one-process"] if one_process else []
    words += ["--", str(job["target"]), *map(str, job["arguments"])]
    environment = repeating(recording.program["flags"], here)
    return subprocess.run(
        words, cwd=where, env=environment, stdout=output, stderr=output, check=False
    ).returncode


def _options(job: Mapping[str, Any], variables: Mapping[str, str | None]) -> list[str]:
    """Return the options of `lockstep run` on which bits depend, the number of workers, and the variables."""
    servers = job.get("parameter_servers", 0)
    if servers:
        # A worker that was lost and replaced is not lost here: it also repeats the work of its replacement.
        words = ["-n", str(job["replicas"] - servers - 1), "--ps", str(servers), "--max-restarts", "0"]
    else:
        words = ["-n", str(job["workers"]), "--replicas", str(job["replicas"])]
    words += ["--threads-per-worker", str(job["threads"]), "--seed", str(job["seed"])]
    words += ["--backend", str(job["backend"])] if job["backend"] else []
    words += ["--input", "joint"] if job["joint_input"] and not servers else []
    words += ["--tf-distribute"] if job["tf_distribute"] else []
    # Earlier runs have not recorded them.
    words += ["--exact-batch"] if job.get("exact_batch") else []
    words += ["--local-steps", str(job["local_steps"])] if job.get("local_steps") else []
    words += [] if job["adopts"] else ["--no-adopt"]
    words += ["--timeout", str(job["timeout"])]
    for name, value in variables.items():
        words += ["--env", name if value is None else f"{name}={value}"]
    return words + (["-m"] if job["module"] else [])


def _refuse_incomplete(recording: Recording) -> None:
    """Raise ConfigError if an order that the new run would follow is incomplete."""
    orders, calls = RunPaths(recording.folder).orders, list(recording.calls)
    # The run may have ended before a process began its order of the last call.
    is_within = bool(calls) and not recording.calls[calls[-1]] and not recording.succeeded
    ordered = [len(calls)] if is_within and calls[-1].split()[0] in _ORDERED else []
    number, lacking = incomplete_orders(orders, recording.job["parameter_servers"], ordered)
    if lacking:
        name = calls[number - 1] if number <= len(calls) else f"call {number}"
        files = ", ".join(f"{orders.name}/{file_name} ({_process(file_name)})" for file_name in lacking)
        raise ConfigError(
            f"{recording.folder} cannot be repeated: the end of {name} is missing in {files}; the run ended "
            "within that call, or could not write there"
        )


def _process(order: str) -> str:
    """Name the process of an order."""
    return "the chief" if order == "chief" else f"parameter server {order.removeprefix('ps-')}"


def _note_changed(recording: Recording) -> None:
    """Note the source files of the program that have changed since the run, if any."""
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


def _note_variables(recording: Recording, chosen: Collection[str]) -> None:
    """Note the script's environment variables that have other values here, except those of `--env`."""
    marks = recording.program.get("variables") or {}
    now = variable_marks(marks, [name for name, mark in marks.items() if mark == "set"])
    texts = [
        f"{name} {'has another value' if name in now else 'is not set'} here"
        for name, mark in marks.items()
        if name not in chosen and now.get(name) != mark
    ]
    if texts:
        note(
            f"the script reads environment variables, of which {' and '.join(texts)}: set them as they were "
            f"for {recording.folder}; lockstep run --env NAME=VALUE records a value"
        )


def _checkpoint(recording: Recording, after: int) -> Entry | None:
    """Return the newest complete checkpoint of a run that is not after a step, or None if there is none."""
    saved = recording.job.get("checkpoints")
    if not saved or not Path(saved["folder"]).is_dir():
        return None
    entries = Store(Path(saved["folder"])).entries()
    usable = [entry for entry in entries if entry.fault is None and entry.step <= after]
    return max(usable, key=lambda entry: entry.step, default=None)


def fresh_run_folder(recording: Recording) -> Path:
    """Return the path of a new run folder in `runs`, where the run was started; `lockstep run` creates it.

    Raises:
        ConfigError: no folder can be created.
    """
    name = Path(str(recording.job.get("target", "run"))).stem
    base = Path(str(recording.job.get("directory") or "."))
    folder = fresh_folder(base / RUNS, name, time.time())
    folder.rmdir()
    return folder.absolute()
