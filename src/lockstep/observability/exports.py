"""What a job shows of itself beside its run folder, while it runs."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from lockstep.observability.bus import Bus


@dataclass(frozen=True)
class Exports:
    """What the process of the coordinator shows of the job; each one that takes over continues it.

    Attributes:
        tensorboard: the folder of TensorBoard's files, absolute; None for none.
    """

    tensorboard: Path | None = None


NO_EXPORTS = Exports()


@contextmanager
def exported(events: Bus, exports: Exports, complain: Callable[[str], None]) -> Iterator[None]:
    """Show the events of a job during the block; `complain` shows a line about a failure, on any thread."""
    with ExitStack() as ends:
        if exports.tensorboard is not None:
            from lockstep.observability.tensorboard_writer import written_for_tensorboard

            ends.enter_context(written_for_tensorboard(events, exports.tensorboard, complain))
        yield
