"""File locks, which the kernel releases when their process ends."""

import contextlib
import fcntl
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

from lockstep.system.files import closed_after, open_own, open_regular

_POLL_SECONDS = 0.02
_FLOCK = "hhqqi"
"""The kernel's struct flock: type, whence, start, length, process."""


def try_lock(path: Path) -> int | None:
    """Try to lock the file at `path`, creating it if it does not exist; return at once.

    Returns:
        A descriptor; the lock is held until every process that has it has closed it. None if another process
        holds the lock.

    Raises:
        OSError: the file cannot be opened; see `open_own`.
    """
    while True:
        descriptor = _open(path)
        locked = _locked(descriptor)
        # The previous holder may have removed the file meanwhile. Others would then lock a new file.
        if locked and os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)
        if not locked:
            return None


def wait_for_lock(path: Path, patience: float, waiting: Callable[[float], None] | None = None) -> int | None:
    """Lock the file as `try_lock` does, but wait for the holder of the lock.

    Args:
        path: the path of the file.
        patience: seconds after which to give up and return None.
        waiting: called many times per second with the seconds waited so far.

    Raises:
        OSError: the file cannot be opened; see `open_own`.
    """
    descriptor = _open(path)
    begun = time.monotonic()
    try:
        while not _locked(descriptor):
            waited = time.monotonic() - begun
            if waited >= patience:
                os.close(descriptor)
                return None
            if waiting is not None:
                waiting(waited)
            time.sleep(_POLL_SECONDS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def share_lock(path: Path) -> int:
    """Take a shared lock on the file at `path`, creating it if it does not exist.

    Returns:
        A descriptor; the lock is held until every process that has it has closed it.

    Raises:
        OSError: the file cannot be opened, see `open_own`, or locked.
    """
    descriptor = _open(path)
    try:
        _share(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_locked(path: Path) -> bool:
    """Whether a process holds a lock of this module on the file at `path`. This does not take a lock.

    The process may be in another container.

    Raises:
        OSError: the file exists and cannot be read.
    """
    try:
        descriptor = open_regular(path)
    except FileNotFoundError:
        return False
    with closed_after(descriptor):
        lock = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _whole_file(fcntl.F_WRLCK))
    return bool(struct.unpack_from(_FLOCK, lock)[0] != fcntl.F_UNLCK)


def _share(descriptor: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _whole_file(fcntl.F_RDLCK))


def _whole_file(kind: int) -> bytes:
    # The structure is padded at the end, as in C.
    return struct.pack(f"{_FLOCK}0q", kind, os.SEEK_SET, 0, 0, 0)


def _open(path: Path) -> int:
    return open_own(path, os.O_RDWR | os.O_CREAT)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    # Only this second lock is visible without an attempt to take it, and from all containers: /proc/locks
    # omits processes that the reader cannot see. If the system does not have it, the first lock counts.
    with contextlib.suppress(OSError):
        _share(descriptor)
    return True
