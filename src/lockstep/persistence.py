"""A worker's checkpoints: the ones it keeps, and the one it goes on from."""

import signal
import sys
from pathlib import Path

from lockstep import job
from lockstep.checkpoint.keeper import Every, Keeper
from lockstep.checkpoint.store import Contents, Store, load
from lockstep.checkpoint.writer import Writer
from lockstep.clock import SystemClock
from lockstep.config import WorkerConfig
from lockstep.control.client import Client


def open_keeper(config: WorkerConfig, client: Client) -> Keeper | None:
    """Return what keeps this worker's checkpoints while it is the chief; None if none are to be kept."""
    asked = config.checkpoints
    if asked is None:
        return None

    def done(path: Path, seconds: float) -> None:
        client.report("checkpoint", path=str(path), seconds=seconds)

    def failed(reason: str) -> None:
        client.report("checkpoint failed", reason=reason)
        print(f"lockstep: a checkpoint was not written: {reason}; training goes on", file=sys.stderr)

    writer = Writer(Store(asked.folder, asked.keep), done, failed)
    keeper = Keeper(writer, Every(asked.steps, asked.seconds), SystemClock())

    def leave(number: int, frame: object) -> None:
        keeper.leaving = True
        if not job.is_chief():
            sys.exit(128 + number)

    # A chief that never comes to the end of a step is ended by SIGKILL.
    signal.signal(signal.SIGTERM, leave)
    return keeper


def resumed(config: WorkerConfig) -> Contents | None:
    """Read the checkpoint that the job goes on from.

    Raises:
        CheckpointError: it cannot be read any more.
    """
    asked = config.checkpoints
    return None if asked is None or asked.resume is None else load(asked.resume)
