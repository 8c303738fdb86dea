"""The folder of one run: finding a name for it, and keeping others out."""

import contextlib
import itertools
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from lockstep.errors import ConfigError
from lockstep.system.files import FOLDER_MODE
from lockstep.system.locks import try_lock
from lockstep.system.paths import RunPaths

_NOTE = re.compile("[0-9a-f]{32}")
"""Names of notes on what workers have saved; see `lockstep.keras.shared_saves`."""


def fresh_folder(base: Path, name: str, wall: float) -> Path:
    """Make a new folder `base/<name>-<time>`, with a number behind it if that is taken.

    Raises:
        ConfigError: it cannot be made.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(wall))
    try:
        with gone_if_refused(base):
            base.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
            for number in itertools.count(1):
                folder = base / (f"{name}-{stamp}" + (f"-{number}" if number > 1 else ""))
                with contextlib.suppress(FileExistsError):
                    folder.mkdir(FOLDER_MODE)
                    return folder
    except OSError as error:
        raise _unusable("the run's folder", base, "--run-dir", error) from None
    raise AssertionError("numbers have no end")


def claim_folder(folder: Path, what: str = "the run's folder", option: str = "--run-dir") -> int:
    """Make `folder` where it does not exist, and lock it.

    Args:
        folder: to claim.
        what: it is, for messages.
        option: that names it.

    Returns:
        A descriptor; the folder is ours until every process that has it has closed it.

    Raises:
        ConfigError: it cannot be written to, or another live run works there.
    """
    try:
        folder.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
        descriptor = try_lock(RunPaths(folder).lock)
    except OSError as error:
        raise _unusable(what, folder, option, error) from None
    if descriptor is None:
        raise ConfigError(f"another run uses {folder}; wait for it to end, or give another {option}")
    return descriptor


@contextlib.contextmanager
def gone_if_refused(folder: Path | None) -> Iterator[None]:
    """Remove `folder` again if it is made and claimed in the block, and the block raises.

    Args:
        folder: None for nothing; folders above it that are missing may be made as well.
    """
    above = () if folder is None else (folder, *folder.parents)
    missing = [each for each in above if not os.path.lexists(each)]
    try:
        yield
    except BaseException:
        for each in missing:
            with contextlib.suppress(OSError):
                RunPaths(each).lock.unlink(missing_ok=True)
                each.rmdir()
        raise


def empty_folder(folder: Path) -> None:
    """Make `folder`, in that of the run, for this user only; remove what an earlier run has left there.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise _unusable("the run's folder", folder.parent, "--run-dir", error) from None


def leave_folder(folder: Path) -> None:
    """Remove what is of use only while a run lives; for its last process, which still has the lock."""
    paths = RunPaths(folder)
    with contextlib.suppress(OSError):
        for file in paths.saved.iterdir():
            if _NOTE.fullmatch(file.name):
                file.unlink()
        paths.saved.rmdir()
    with contextlib.suppress(OSError):
        # One with contents is a person's own file.
        if paths.lock.lstat().st_size == 0:
            paths.lock.unlink()


def _unusable(what: str, folder: Path, option: str, error: OSError) -> ConfigError:
    return ConfigError(f"{what} {folder} cannot be used: {error.strerror}; give another {option}")
