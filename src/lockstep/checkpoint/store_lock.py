"""Locks of a folder of checkpoints: one job saves checkpoints there, and others see whether it trains.

Each process of a job that saves checkpoints holds a shared lock in their folder. So an evaluator detects the
end of training without a connection, however the processes end.
"""

import os
from pathlib import Path

from lockstep.checkpoint.durable import make_folder, reason
from lockstep.errors import CheckpointError
from lockstep.system.locks import is_locked, share_lock, try_lock
from lockstep.system.paths import RunPaths


class FolderLock:
    """The exclusive lock of the process that writes a job's checkpoints to a folder.

    A process holds the lock until it ends or calls `release`. Forked processes do not inherit it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Acquire the lock, unless this process already holds it; create a missing folder.

        Raises:
            CheckpointError: another job holds the lock, or the folder cannot be written to.
        """
        if self._descriptor is not None:
            return
        try:
            make_folder(self._folder)
            descriptor = try_lock(RunPaths(self._folder).lock)
        except OSError as error:
            raise CheckpointError(
                f"the folder of checkpoints {self._folder} cannot be used: {reason(error)}; give another one"
            ) from None
        if descriptor is None:
            raise CheckpointError(
                f"another job saves checkpoints in {self._folder}; wait for it to end, or give another folder"
            )
        self._descriptor = descriptor
        os.register_at_fork(after_in_child=self.release)

    def release(self) -> None:
        """Release the lock if this process holds it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_NAME = ".training"


def announce(folder: Path) -> None:
    """Announce, until this process ends, that it trains for a job that saves checkpoints in `folder`.

    Call this before any other use of the folder; it creates a missing folder. Forked processes do not count.

    Raises:
        CheckpointError: the folder cannot be used.
    """
    try:
        make_folder(folder)
        descriptor = share_lock(folder / _NAME)
        # This comes after the lock: to an observer, a job that has begun and has no training process has
        # ended.
        if not os.fstat(descriptor).st_size:
            os.truncate(descriptor, 1)
        os.utime(descriptor)
    except OSError as error:
        raise CheckpointError(
            f"the folder of checkpoints {folder} cannot be used: {reason(error)}; give another one"
        ) from None
    os.register_at_fork(after_in_child=lambda: os.close(descriptor))


def is_training(folder: Path) -> bool:
    """Whether a process that has called `announce` is running.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    try:
        return is_locked(folder / _NAME)
    except OSError as error:
        raise CheckpointError(f"the checkpoints in {folder} cannot be read: {reason(error)}") from None


def last_activity(folder: Path) -> float:
    """Return when a job last began or saved a checkpoint there, in seconds since 1970; 0 if none has."""
    try:
        announced = (folder / _NAME).stat()
        return max(announced.st_mtime, folder.stat().st_mtime) if announced.st_size else 0.0
    except OSError:
        return 0.0
