"""Whether a job runs that keeps checkpoints in a folder."""

import os
from pathlib import Path

from lockstep.checkpoint.durable import make_folder, reason
from lockstep.errors import CheckpointError
from lockstep.system.locks import is_shared, share_lock

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
