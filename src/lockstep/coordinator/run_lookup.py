"""Finds the run that the user means: by the name of a running job, or by the folder of a run."""

import contextlib
from pathlib import Path
from typing import NamedTuple

from lockstep.coordinator.admin_client import accepted, choose, job_names, listed, running_jobs, send
from lockstep.coordinator.admin_socket import plain
from lockstep.errors import ConfigError, UnfitError
from lockstep.protocol.admin import StatusRequest
from lockstep.system.paths import RunPaths
from lockstep.system.run_folder import RUNS


class FoundRun(NamedTuple):
    """A run.

    Attributes:
        folder: its run folder.
        job: the name of its job if the run was found by that; None if it was found by its folder.
    """

    folder: Path
    job: str | None


def find_run(text: str) -> FoundRun:
    """Return the run that the user means.

    Args:
        text: the name of a running job, else a run folder, else a folder in `RUNS`, else the beginning of a
            job's name, else that of a folder in `RUNS`.

    Raises:
        ConfigError: there is no such run, the name is ambiguous, or the job does not reply.
        UnfitError: the system does not list its sockets.
    """
    job_or_folder = name_or_folder(text)
    if isinstance(job_or_folder, Path):
        return FoundRun(job_or_folder, None)
    status = accepted(send(job_or_folder, StatusRequest()))
    return FoundRun(Path(status.run_dir), status.job)


def name_or_folder(text: str) -> str | Path:
    """Return the running job's name, or else the run folder, that the user means; this does not ask jobs.

    Arguments and errors are those of `find_run`.
    """
    names = job_names()
    if text not in names:
        for folder in (Path(text), RUNS / text) if text else ():
            if RunPaths(folder).events.is_file():
                return folder
    name = choose(text, names)
    if name is not None:
        return name
    if "://" in text:
        raise ConfigError(
            f"{text}: this command takes a run of this machine; lockstep report, ui, runs, logs and diff "
            "take the URL of a run"
        )
    folder_name = choose(text, run_folders())
    if folder_name is None:
        raise ConfigError(
            f"'{text}' is neither a running job nor the folder of a run, here or in {RUNS}; {listed(names)}"
        )
    return RUNS / folder_name


def job_in(folder: Path) -> str | None:
    """Return the name of the running job that uses a run folder, or None if there is none.

    A job that does not reply counts if it has the name of the folder.

    Raises:
        UnfitError: the system does not list its sockets.
    """
    running, silent = running_jobs()
    for status in running:
        with contextlib.suppress(OSError):
            if folder.samefile(status.run_dir):
                return status.job
    name = plain(folder.resolve().name)
    return name if name in silent else None


def run_folders() -> list[str]:
    """Return the names of the run folders in `RUNS`, sorted, or an empty list if it cannot be read."""
    try:
        return sorted(folder.name for folder in RUNS.iterdir() if RunPaths(folder).events.is_file())
    except OSError:
        return []


def known_jobs() -> list[str]:
    """Return the names of running jobs like `job_names`, but none if they cannot be listed."""
    try:
        return job_names()
    except UnfitError:
        return []
