"""Files and folders that survive a power failure."""

import contextlib
import errno
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from lockstep.errors import CheckpointError
from lockstep.system.files import FOLDER_MODE, closed_after
from lockstep.system.locks import wait_for_lock

_PATIENCE_SECONDS = 60.0


def sync(path: Path) -> None:
    """Flush the contents of a file, or the names in a folder, to the disk.

    Raises:
        OSError: they cannot be flushed.
    """
    with closed_after(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as descriptor:
        os.fsync(descriptor)


def write_file(path: Path, data: bytes) -> None:
    """Create a new file with `data`, and flush it to the disk.

    Raises:
        OSError: it cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with closed_after(os.open(path, flags, 0o666)) as descriptor:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents, and flush their names to the disk.

    Raises:
        OSError: it cannot be created.
    """
    if not path.is_dir():
        make_folder(path.parent)
        try:
            path.mkdir(FOLDER_MODE)
        except FileExistsError:
            if not path.is_dir():
                raise
        sync(path.parent)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock on the file at `path` within the block; the kernel releases it if the process dies.

    Raises:
        CheckpointError: another process has held it for a minute.
        OSError: the file cannot be opened.
    """
    descriptor = wait_for_lock(path, _PATIENCE_SECONDS)
    if descriptor is None:
        raise CheckpointError(
            f"another process has been writing checkpoints to {path.parent} for {_PATIENCE_SECONDS:.0f} s; "
            "wait for it to end, or give another folder"
        )
    try:
        yield
    finally:
        # A process forked meanwhile has the descriptor too, so closing it here would not release the lock.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def reason(error: OSError | SafetensorError) -> str:
    """Return the system's message, such as "No space left on device"."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    number = _number(error)
    return str(error) if number is None else os.strerror(number)


def is_full(error: OSError | SafetensorError) -> bool:
    """Whether the error means that the disk is full."""
    return _number(error) in (errno.ENOSPC, errno.EDQUOT)


def _number(error: OSError | SafetensorError) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    number = re.search(r"\(os error (\d+)\)", str(error))
    return int(number[1]) if number else None
