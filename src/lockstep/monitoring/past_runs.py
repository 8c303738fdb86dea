"""The runs in folders, one row each: when they ran, with how many workers, and how they ended.

`summarize` is pure. What a log does not say, or says in a form that this version does not know, is left out:
its last line may be torn, and an earlier version has recorded less.
"""

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.coordinator.comparison import read_verdict
from lockstep.monitoring.run_catalog import is_active
from lockstep.observability.events import FORMAT
from lockstep.observability.run_lines import happenings, measurement
from lockstep.observability.run_state import RunState
from lockstep.system.files import open_regular, read_regular
from lockstep.system.paths import RunPaths
from lockstep.system.prose import columns, printable, short_duration

_COLUMNS = ("RUN", "STARTED", "TOOK", "WORKERS", "REPLICAS", "HOSTS", "STEPS", "DIGEST", "END")
_TAIL = 64 * 1024
_DIGITS = 12
_LONGEST = 120
_END_OF_TIME = 1e11


@dataclass(frozen=True)
class PastRun:
    """What is known of the last run in a folder; None or empty for what is not.

    Attributes:
        name: the name of the folder.
        began: when it started, in seconds since 1970.
        seconds: how long it took, or has taken so far.
        workers: the workers with which it started, without a chief that has parameter servers.
        servers: the number of parameter servers.
        replicas: R.
        hosts: the number of hosts.
        steps: training steps, with those before this run.
        digest: the digest of the model that was trained last.
        end: how it ended, or that it runs, and the verdict of the comparison with one process.
    """

    name: str
    began: float | None = None
    seconds: float | None = None
    workers: int | None = None
    servers: int = 0
    replicas: int | None = None
    hosts: int | None = None
    steps: int | None = None
    digest: str = ""
    end: str = ""


def past_runs(folders: Sequence[Path], now: float) -> list[PastRun]:
    """Return the runs in some folders, the newest first.

    Args:
        folders: each a run folder, or a folder that contains run folders.
        now: seconds since 1970.

    Raises:
        OSError: one of the folders cannot be listed.
    """
    runs_by_folder: dict[Path, PastRun] = {}
    for folder in folders:
        run = _read(folder, now)
        if run is not None:
            runs_by_folder[folder] = run
        else:
            runs = ((subfolder, _read(subfolder, now)) for subfolder in sorted(folder.iterdir()))
            runs_by_folder.update((subfolder, run) for subfolder, run in runs if run is not None)
    return sorted(runs_by_folder.values(), key=lambda run: run.began or 0.0, reverse=True)


def _read(folder: Path, now: float) -> PastRun | None:
    """Return the run in a folder; None if there is none."""
    paths = RunPaths(folder)
    try:
        events = read_regular(paths.events)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return PastRun(printable(folder.name), end=f"cannot be read: {error.strerror}")
    measurements = b""
    with contextlib.suppress(OSError), os.fdopen(open_regular(paths.measurements), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
        measurements = file.read(_TAIL)
    active = now if is_active(folder) else None
    return summarize(folder.name, events, measurements, active, read_verdict(paths))


def summarize(
    name: str, events: bytes, measurements: bytes, now: float | None, compared: str = ""
) -> PastRun:
    """Return what the logs of a folder say about the last run in it.

    Args:
        name: the name of the folder.
        events: the event log.
        measurements: the end of the log of measurements.
        now: seconds since 1970; None if no process uses the folder.
        compared: the verdict of the comparison with one process; empty if none was wanted.
    """
    name = printable(name)
    state, newest = RunState(keeps_history=False), 0.0
    for event in happenings(events):
        state, newest = state.after(event), event.time
    job, done = state.job, state.finished or {}
    began, written = _number(state.began) if job else None, job.get("format")
    if isinstance(written, int) and written > FORMAT:
        return PastRun(name, began, end=f"recorded in format {written} by a later version")
    for line in measurements.split(b"\n") if not done.get("steps") else ():
        if (measured := measurement(line)) is not None and measured.time >= (began or 0.0):
            state = state.after(measured)
    ended = now if now is not None and state.finished is None else _number(newest)
    took = None if began is None or ended is None else ended - began
    servers = _integer(job.get("parameter_servers")) or 0
    # One process with all tasks of a job with servers may repeat a run.
    workers = _integer(job.get("replicas" if servers else "workers"))
    hosts = job.get("hosts")
    return PastRun(
        name=name,
        began=began,
        seconds=_number(done.get("seconds"), took),
        workers=workers - servers - 1 if workers is not None and servers else workers,
        servers=servers,
        replicas=_integer(job.get("replicas")),
        hosts=(len(hosts) or 1) if isinstance(hosts, list) else None,
        steps=_integer(done.get("steps")) or state.totals.reached or None,
        digest=printable(str(done.get("digest", "")))[:_DIGITS],
        end=_end(state.with_verdict(compared), active=now is not None),
    )


def table(runs: Sequence[PastRun]) -> list[str]:
    """Return a line of headings and a line per run; times are local."""
    return columns([_COLUMNS, *map(_row, runs)])


def _row(run: PastRun) -> tuple[str, ...]:
    began = "" if run.began is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.began))
    took = "" if run.seconds is None else short_duration(run.seconds)
    numbers = [
        "" if value is None else str(value) for value in (run.workers, run.replicas, run.hosts, run.steps)
    ]
    if run.servers:
        numbers[0] += f" + {run.servers} ps"
        numbers[1] = ""
    end = run.end if len(run.end) <= _LONGEST else f"{run.end[:_LONGEST]}..."
    return run.name, began, took, *numbers, run.digest, end


def _end(state: RunState, *, active: bool) -> str:
    finished = state.finished or {}
    status, message = finished.get("status"), printable(str(finished.get("message", "")))
    if state.finished is None:
        end = "running" if active else "no end is recorded: it was killed, or its host was lost"
    elif status == 0:
        end = "finished"
    else:
        end = message if message.startswith("stopped by ") else f"failed ({status}): {message}"
    return f"{end}; {printable(state.compared)}" if state.compared else end


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: Any, otherwise: float | None = None) -> float | None:
    """Return a time; what is not a number, or not a time that a calendar has, is left out."""
    is_valid = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _END_OF_TIME
    return float(value) if is_valid else otherwise
