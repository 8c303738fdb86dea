"""The run folder: its name, its lock, and its cleanup."""

import contextlib
import itertools
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from lockstep.errors import ConfigError
from lockstep.system.files import FOLDER_MODE, closed_after, open_own, read_regular
from lockstep.system.locks import try_lock, wait_for_lock
from lockstep.system.paths import RunPaths, is_saved_record

RUNS = Path("runs")
"""The folder, in the current one, in which a command makes run folders."""
_SIGNS_WITHIN = 2.0
_LOOK_EVERY = 0.05
_LETS_GO = 4.0
"""Seconds in which a process that has lost its lifeline ends."""
_TEMPORARY = "lockstep-agent-"


class FolderInUse(ConfigError):
    """Another active run uses a folder."""


def run_name(name: str, wall: float) -> str:
    """Return the name of a run that begins in this second."""
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(wall))}"


def name_on_any_host(name: str) -> str:
    """Return a name for a run that is unique on every host where its folder may be."""
    return f"{run_name(name, time.time())}-{secrets.token_hex(2)}"


def fresh_folder(base: Path, name: str, wall: float) -> Path:
    """Create a new folder `base/<name>-<time>`, with a number at the end if that exists.

    Raises:
        ConfigError: it cannot be created.
    """
    named = run_name(name, wall)
    try:
        with gone_if_refused(base):
            base.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
            for number in itertools.count(1):
                folder = base / (named + (f"-{number}" if number > 1 else ""))
                with contextlib.suppress(FileExistsError):
                    folder.mkdir(FOLDER_MODE)
                    return folder
    except OSError as error:
        raise _unusable("the run's folder", base, "--run-dir", error) from None
    raise AssertionError("numbers have no end")


def remove_where_empty(folder: Path) -> None:
    """Remove an empty folder, then its parent if that is empty, so that a rejected call leaves no trace."""
    with contextlib.suppress(OSError):
        folder.rmdir()
        folder.parent.rmdir()


def claim_folder(
    folder: Path, description: str = "the run's folder", option: str = "--run-dir", *, patience: float = 0.0
) -> int:
    """Lock a folder for this run; create it if it does not exist.

    Args:
        folder: the folder to lock.
        description: its description, for messages.
        option: the option that names it, for messages.
        patience: seconds to wait for another run, which may be ending.

    Returns:
        A descriptor; the folder is locked until every process that has it has closed it.

    Raises:
        ConfigError: the folder cannot be written to, or another active run uses it.
    """
    try:
        folder.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
        descriptor = wait_for_lock(RunPaths(folder).lock, patience)
    except OSError as error:
        raise _unusable(description, folder, option, error) from None
    if descriptor is None:
        raise FolderInUse(f"another run uses {folder}; wait for it to end, or give another {option}")
    return descriptor


def check_writable(folder: Path, description: str, option: str) -> None:
    """Create a folder if it does not exist, and check that files can be created in it.

    Args:
        folder: the folder.
        description: its description, for messages.
        option: the option that names it, for messages.

    Raises:
        ConfigError: the folder cannot be created or written to.
    """
    try:
        folder.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise _unusable(description, folder, option, error) from None


def claim_when_free(folder: Path) -> Path:
    """Lock the folder of a job, or a new one beside it if a process of the job keeps it; return the folder.

    Several coordinators of a job use its folder, one after the other. One that was lost may still be ending,
    or may be stopped.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    for number in itertools.count(1):
        candidate = folder.with_name(folder.name + (f"-{number}" if number > 1 else ""))
        give_up = time.monotonic() + _LETS_GO
        while True:
            try:
                claim_folder(candidate)
            except FolderInUse:
                if time.monotonic() >= give_up:
                    break
                time.sleep(_LOOK_EVERY)
            else:
                return candidate
    raise AssertionError("numbers have no end")


def claim_for_job(folder: Path, job: str, description: str, option: str) -> int | None:
    """Lock a folder that the hosts of a job may share; see `claim_folder`.

    Args:
        folder: the folder to lock.
        job: identifies the job.
        description: its description, for messages.
        option: the option that names it, for messages.

    Returns:
        A descriptor; None if another host of the job holds the lock.

    Raises:
        ConfigError: see `claim_folder`.
    """
    give_up = time.monotonic() + _SIGNS_WITHIN
    while True:
        try:
            descriptor = claim_folder(folder, description, option)
        except ConfigError:
            with contextlib.suppress(OSError):
                if read_regular(RunPaths(folder).claim) == job.encode():
                    return None
            # Another host of the job may have taken the lock just now.
            if time.monotonic() >= give_up:
                raise
            time.sleep(_LOOK_EVERY)
        else:
            sign_claim(folder, job)
            return descriptor


def sign_claim(folder: Path, job: str) -> None:
    """Record in a locked folder the job that holds its lock, for the job's hosts that share the folder."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with contextlib.suppress(OSError), closed_after(open_own(RunPaths(folder).claim, flags)) as descriptor:
        os.write(descriptor, job.encode())


@contextlib.contextmanager
def gone_if_refused(folder: Path | None) -> Iterator[None]:
    """Remove `folder` if it is created and claimed in the block, and the block raises.

    Args:
        folder: the folder, if any. Its missing parent folders are also removed.
    """
    above = () if folder is None else (folder, *folder.parents)
    missing = [each for each in above if not os.path.lexists(each)]
    try:
        yield
    except BaseException:
        for each in missing:
            with contextlib.suppress(OSError):
                RunPaths(each).lock.unlink(missing_ok=True)
                RunPaths(each).claim.unlink(missing_ok=True)
                each.rmdir()
        raise


def empty_folder(folder: Path) -> None:
    """Create `folder` in the run folder, for this user only; remove files of an earlier run there.

    Raises:
        ConfigError: it cannot be created.
    """
    try:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise _unusable("the run's folder", folder.parent, "--run-dir", error) from None


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder that the processes of a job on this host share, and remove it after the block.

    If they are all killed, the next command of the same user removes it.

    Raises:
        ConfigError, OSError: it cannot be created.
    """
    remove_abandoned()
    # Under its final name, it is always locked.
    hidden = folder = Path(tempfile.mkdtemp(prefix=f".{_TEMPORARY}"))
    try:
        lock = claim_folder(hidden)
        folder = hidden.rename(hidden.with_name(hidden.name[1:]))
        try:
            yield folder
        finally:
            os.close(lock)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned() -> None:
    """Remove the temporary folders whose processes were all killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{_TEMPORARY}*"):
        with contextlib.suppress(OSError):
            status, lock = path.lstat(), RunPaths(path).lock
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or not lock.exists():
                continue
            descriptor = try_lock(lock)
            if descriptor is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(descriptor)


def leave_folder(folder: Path) -> None:
    """Remove files that only an active run needs; for its last process, which still holds the lock."""
    paths = RunPaths(folder)
    with contextlib.suppress(OSError):
        paths.tuner_lock.unlink(missing_ok=True)
        for file in paths.saved.iterdir():
            if is_saved_record(file.name):
                file.unlink()
        paths.saved.rmdir()
    with contextlib.suppress(OSError):
        # A file with contents belongs to the user.
        if paths.lock.lstat().st_size == 0:
            paths.lock.unlink()


def remove_unused(folder: Path) -> None:
    """Remove the folder of a run that was refused before it began, for the command that created it."""
    paths = RunPaths(folder)
    if not paths.events.exists():
        with contextlib.suppress(OSError):
            paths.comparison.unlink(missing_ok=True)
            paths.output.unlink(missing_ok=True)
            paths.sources.rmdir()
            folder.rmdir()
            folder.parent.rmdir()


def remove_unused_claim(folder: Path) -> None:
    """Remove a folder in which a job has left only its claim, for the command that created it."""
    claim = {RunPaths(folder).lock, RunPaths(folder).claim}
    with contextlib.suppress(OSError):
        if set(folder.iterdir()) <= claim:
            for file in claim:
                file.unlink(missing_ok=True)
            folder.rmdir()


def _unusable(description: str, folder: Path, option: str, error: OSError) -> ConfigError:
    return ConfigError(f"{description} {folder} cannot be used: {error.strerror}; give another {option}")
