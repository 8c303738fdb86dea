"""The runs in folders that the user names, and a short look at each from the ends of its log."""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.coordinator.job_report import state_of, troubles
from lockstep.coordinator.run_lookup import find_run, known_jobs
from lockstep.errors import ConfigError
from lockstep.observability.run_lines import happening
from lockstep.observability.run_state import RunState
from lockstep.system.files import open_regular
from lockstep.system.locks import is_locked
from lockstep.system.paths import RunPaths
from lockstep.system.run_folder import RUNS

_HEAD = 256 * 1024
_TAIL = 64 * 1024


def resolve(words: Sequence[str]) -> list[Path]:
    """Return the folders that the arguments name: each a folder of run folders, or a run (`find_run`).

    Raises:
        ConfigError, UnfitError: an argument names neither; or there are no arguments, and there is no folder
            of runs here.
    """
    if not words and not RUNS.is_dir():
        raise ConfigError(f"there is no folder {RUNS} here; name the folder of a run, or a running job")
    return [_resolved(word) for word in words or (str(RUNS),)]


def _resolved(word: str) -> Path:
    folder = Path(word)
    if word and folder.is_dir() and not is_run(folder) and word not in known_jobs():
        return folder.absolute()
    run_folder = find_run(word).folder
    if not run_folder.is_dir():
        raise ConfigError(f"the run folder of {word}, {run_folder}, is not on this machine")
    return run_folder.absolute()


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run that has begun."""
    return RunPaths(folder).events.is_file()


def is_active(folder: Path) -> bool:
    """Whether a process holds the lock of a run folder, possibly in another container."""
    try:
        return is_locked(RunPaths(folder).lock)
    except OSError:
        return False


@dataclass(frozen=True)
class Glance:
    """The facts about a run at the beginning and the end of its event log.

    Attributes:
        script: its script; empty if unknown.
        began: the time at which its first run started, in seconds since 1970; 0 if unknown.
        last: the time at which its log was last written.
        end: its state at its end; empty if its last event is not `finished`.
        troubled: whether it has had problems so far.
        steps: training steps at its end; None if unknown.
    """

    script: str
    began: float
    last: float
    end: str
    troubled: bool
    steps: int | None


class Catalog:
    """The runs in some folders; runs may appear and grow.

    Args:
        folders: each a run folder, or a folder that contains run folders.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._seen: dict[Path, tuple[tuple[int, int, int], Glance]] = {}

    def runs(self) -> dict[str, Path]:
        """Return the folders of runs by unique names: the names of the folders, if these are unique."""
        run_folders: list[Path] = []
        for folder in self._folders:
            if is_run(folder):
                run_folders.append(folder)
                continue
            with contextlib.suppress(OSError):
                run_folders += sorted(folder for folder in folder.iterdir() if is_run(folder))
        run_folders = list(dict.fromkeys(run_folders))
        names = [folder.name for folder in run_folders]
        return {
            folder.name if names.count(folder.name) == 1 else os.fspath(folder): folder
            for folder in run_folders
        }

    def glance(self, folder: Path) -> Glance:
        """Return the facts about a run from the two ends of its event log."""
        path = RunPaths(folder).events
        try:
            with os.fdopen(open_regular(path), "rb") as file:
                file_status = os.fstat(file.fileno())
                key = (file_status.st_ino, file_status.st_size, file_status.st_mtime_ns)
                seen = self._seen.get(folder)
                if seen is not None and seen[0] == key:
                    return seen[1]
                begun = _after(RunState(), file.readline(_HEAD))
                file.seek(max(0, file_status.st_size - _TAIL))
                newest = _after(begun, file.read(_TAIL).rstrip(b"\n").rpartition(b"\n")[2])
        except OSError:
            return Glance("", 0.0, 0.0, "", False, None)
        ended = newest.finished or {}
        status = ended.get("status")
        glance = Glance(
            str(begun.job.get("target", ""))[:1000],
            begun.began,
            file_status.st_mtime,
            state_of(newest.finished, active=False) if isinstance(status, int) else "",
            bool(troubles(newest.totals)),
            newest.totals.known_steps if ended else None,
        )
        self._seen[folder] = key, glance
        return glance


def _after(state: RunState, line: bytes) -> RunState:
    event = happening(line)
    return state if event is None else state.after(event)
