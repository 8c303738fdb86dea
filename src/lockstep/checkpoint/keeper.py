"""When a checkpoint is due."""

from collections.abc import Callable
from dataclasses import dataclass

from lockstep.checkpoint.store import Contents
from lockstep.checkpoint.writer import Writer
from lockstep.clock import Clock


@dataclass(frozen=True)
class Every:
    """How often: after so many steps, or when so many seconds have passed."""

    steps: int | None = None
    seconds: float | None = None


class Keeper:
    """Has checkpoints written in the background, as often as it was told.

    Attributes:
        leaving: the process has been told to end: the next step is its last.
    """

    def __init__(self, writer: Writer, every: Every, clock: Clock) -> None:
        self._writer = writer
        self._every = every
        self._clock = clock
        self._last = clock.now()
        self.leaving = False

    def after_step(self, taken: int, take: Callable[[], Contents]) -> None:
        """Keep what `take` returns if it is time.

        Args:
            taken: how many steps of training have been taken.
            take: copies the state; called on this thread, or not at all.
        """
        if not self.leaving and (not self._due(taken) or self._writer.busy()):
            return
        self._last = self._clock.now()
        self._writer.write(take())

    def close(self, seconds: float) -> bool:
        """Wait until what was asked for is on disk; return whether it is in time."""
        return self._writer.close(seconds)

    def _due(self, taken: int) -> bool:
        if self._every.steps is not None:
            return taken % self._every.steps == 0
        return self._every.seconds is not None and self._clock.now() - self._last >= self._every.seconds
