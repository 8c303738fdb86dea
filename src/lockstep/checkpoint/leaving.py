"""The end of a process that keeps checkpoints, when it is told to end."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable

from lockstep.checkpoint.scheduler import CheckpointScheduler


def end_at_a_step(
    scheduler: CheckpointScheduler, is_chief: Callable[[], bool], patience: float | None = None
) -> None:
    """Let SIGTERM end this process at the end of a step of training, after a checkpoint.

    A process that is not the chief ends at once, and so do processes that this one forks. For the main
    thread.

    Args:
        scheduler: is told that the process leaves.
        is_chief: whether this process keeps checkpoints at the time.
        patience: seconds in which a step has to end, or a second signal to come; then the process ends
            without a checkpoint. None: whoever sends the signal sees to that.
    """

    def leave(number: int, frame: object) -> None:
        again, scheduler.leaving = scheduler.leaving, True
        if not is_chief() or (again and patience is not None):
            sys.exit(128 + number)
        if patience is not None:
            timer = threading.Timer(patience, os.kill, (os.getpid(), number))
            timer.daemon = True
            timer.start()

    def forget() -> None:
        if signal.getsignal(signal.SIGTERM) is leave:
            with contextlib.suppress(ValueError):
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, leave)
    os.register_at_fork(after_in_child=forget)
