"""Who uses a folder of checkpoints: the one job that keeps them there, and whether it still trains."""

import os
from pathlib import Path

from lockstep.checkpoint.durable import make_folder, reason
from lockstep.errors import CheckpointError
from lockstep.system.locks import is_shared, share_lock, try_lock
from lockstep.system.paths import RunPaths


class FolderLock:
    """The right to keep checkpoints in a folder, which one job has: the process of it that writes them.

    A process that has it has it until it ends or gives it up. The processes that it forks have no part in it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor: int | None = None

    def take(self) -> None:
        """Take it, unless this process has it already; the folder exists then.

        Raises:
            CheckpointError: another job has it, or the folder cannot be written to.
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
        os.register_at_fork(after_in_child=self.leave)

    def leave(self) -> None:
        """Give it up, if this process has it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_NAME = ".training"


def announce(folder: Path) -> None:
    """Let others see, until this process ends, that it trains for a job that keeps checkpoints in `folder`.

    Call this before anything else is done there. The folder exists then. Processes that this one forks do
    not count.

    Raises:
        CheckpointError: the folder cannot be used.
    """
    try:
        make_folder(folder)
        descriptor = share_lock(folder / _NAME)
        # Only now: who sees that a job has begun, and nobody who trains, takes it that the job has ended.
        if not os.fstat(descriptor).st_size:
            os.truncate(descriptor, 1)
        os.utime(descriptor)
    except OSError as error:
        raise CheckpointError(
            f"the folder of checkpoints {folder} cannot be used: {reason(error)}; give another one"
        ) from None
    os.register_at_fork(after_in_child=lambda: os.close(descriptor))


def is_training(folder: Path) -> bool:
    """Whether a process lives that has announced itself.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    try:
        return is_shared(folder / _NAME)
    except OSError as error:
        raise CheckpointError(f"the checkpoints in {folder} cannot be read: {reason(error)}") from None


def last_sign(folder: Path) -> float:
    """Return when a job last began or kept a checkpoint there, in seconds since 1970; 0 if none ever has."""
    try:
        announced = (folder / _NAME).stat()
        return max(announced.st_mtime, folder.stat().st_mtime) if announced.st_size else 0.0
    except OSError:
        return 0.0
