"""A worker's checkpoints: the scheduler that saves them, and the one from which training resumes."""

from collections.abc import Callable

from lockstep.checkpoint.checkpoint_files import Contents, load
from lockstep.checkpoint.scheduler import CheckpointScheduler, Every, end_at_a_step, open_scheduler
from lockstep.checkpoint.store import Store
from lockstep.checkpoint.store_lock import announce
from lockstep.observability.bus import Bus
from lockstep.protocol.job_spec import JobSettings


class WorkerCheckpoints:
    """The settings of this worker's checkpoints, from the command or from the script's own callback.

    Args:
        scheduler: saves checkpoints while this worker is the chief; None if none are saved.
        resumed: the checkpoint from which training resumes; None if it begins.
        accepts_changes: whether it resumes even if the script's settings differ from the checkpoint's.
    """

    def __init__(
        self,
        scheduler: CheckpointScheduler | None = None,
        resumed: Contents | None = None,
        *,
        accepts_changes: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._resumed = resumed
        self._accepts_changes = accepts_changes

    @property
    def scheduler(self) -> CheckpointScheduler | None:
        """The scheduler that saves checkpoints while this worker is the chief, or None if none are saved."""
        return self._scheduler

    @property
    def resumed(self) -> Contents | None:
        """The checkpoint from which training resumes, or None for none."""
        return self._resumed

    @property
    def accepts_changes(self) -> bool:
        """Whether training resumes even if the script's settings differ from the checkpoint's."""
        return self._accepts_changes

    def keep(self, scheduler: CheckpointScheduler) -> None:
        """Save checkpoints with `scheduler` from now on."""
        self._scheduler = scheduler

    def drop(self) -> None:
        """Save no checkpoints from now on, as in a child of this process."""
        self._scheduler = None

    def resume(self, contents: Contents) -> None:
        """Note that training resumes from `contents`."""
        self._resumed = contents

    def accept_changes(self) -> None:
        """Resume even if the script's settings differ from the checkpoint's."""
        self._accepts_changes = True

    def finish(self) -> None:
        """Save the last state, and wait until it is written."""
        if self._scheduler is not None:
            self._scheduler.finish()


def open_checkpoints(
    settings: JobSettings, events: Bus, is_chief: Callable[[], bool], *, joins: bool
) -> WorkerCheckpoints:
    """Return the checkpoints that the command requests.

    Args:
        settings: the settings of the job.
        events: the bus on which each checkpoint is published.
        is_chief: returns whether this worker is currently the chief.
        joins: whether this worker joins a running job, from whose members it gets the state.

    Raises:
        CheckpointError: the folder cannot be used, or the checkpoint to resume from can no longer be read.
    """
    checkpoints = settings.checkpoints
    if checkpoints is None:
        return WorkerCheckpoints(accepts_changes=settings.accepts_changes)
    announce(checkpoints.folder)
    every = Every(checkpoints.steps, checkpoints.seconds)
    store = Store(checkpoints.folder, checkpoints.keep)
    opened = open_scheduler(store, every, events.publish, checkpoints.store)
    # The coordinator kills a chief that never reaches the end of a step.
    end_at_a_step(opened, is_chief)
    resumes = checkpoints.resume is not None and not joins
    resumed = load(checkpoints.resume) if checkpoints.resume is not None and resumes else None
    return WorkerCheckpoints(opened, resumed, accepts_changes=settings.accepts_changes)
