"""A worker's checkpoints: the ones it keeps, and the one it goes on from."""

from lockstep.checkpoint import scheduler
from lockstep.checkpoint.leaving import end_at_a_step
from lockstep.checkpoint.presence import announce
from lockstep.checkpoint.store import Contents, Store, load
from lockstep.observability.bus import Bus
from lockstep.system.environment import WorkerConfig
from lockstep.worker import job


def open_scheduler(config: WorkerConfig, events: Bus) -> scheduler.CheckpointScheduler | None:
    """Return what keeps this worker's checkpoints while it is the chief; None if none are to be kept.

    Raises:
        CheckpointError: their folder cannot be used.
    """
    asked = config.checkpoints
    if asked is None:
        return None
    announce(asked.folder)
    every = scheduler.Every(asked.steps, asked.seconds)
    opened = scheduler.open_scheduler(Store(asked.folder, asked.keep), every, events.publish)
    # A chief that never comes to the end of a step is ended by SIGKILL.
    end_at_a_step(opened, job.is_chief)
    return opened


def resumed(config: WorkerConfig) -> Contents | None:
    """Read the checkpoint that the job goes on from.

    Raises:
        CheckpointError: it cannot be read any more.
    """
    asked = config.checkpoints
    return None if asked is None or asked.resume is None else load(asked.resume)
