"""When a checkpoint is due."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lockstep.checkpoint.copies import Copies
from lockstep.checkpoint.store import Contents, Store
from lockstep.checkpoint.writer import Writer
from lockstep.clock import Clock, SystemClock
from lockstep.notes import note


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
        self._taken: int | None = None
        self._copies = Copies()
        self.leaving = False

    def after_step(self, taken: int, take: Callable[[], Contents]) -> None:
        """Keep what `take` returns if it is time.

        Args:
            taken: how many steps of training have been taken; may be several more than the last time.
            take: returns the state, which is copied before this returns; called on this thread if at all.
        """
        if self._taken is None:
            self._copies.make_ready(take())
        due, self._taken = self._due(taken), taken
        busy = self._writer.busy()
        if not self.leaving and (not due or busy):
            return
        self._last = self._clock.now()
        # The memory of the last copy is free when it has been written.
        copies = Copies() if busy else self._copies
        self._writer.write(copies.of(take()))

    def close(self, seconds: float) -> bool:
        """Wait until what was asked for is on disk; return whether it is in time."""
        return self._writer.close(seconds)

    def _due(self, taken: int) -> bool:
        if self._every.steps is not None:
            before = taken - 1 if self._taken is None else self._taken
            return taken // self._every.steps > before // self._every.steps
        return self._every.seconds is not None and self._clock.now() - self._last >= self._every.seconds


def open_keeper(store: Store, every: Every, report: Callable[..., None]) -> Keeper:
    """Return what keeps checkpoints in `store` while its process is the chief.

    Args:
        store: where.
        every: how often.
        report: is told, from another thread, of each checkpoint that was written, of each that had to make
            room for it, and of each failure, as an event with fields.
    """

    def done(path: Path, step: int, seconds: float) -> None:
        report("checkpoint", path=str(path), step=step, seconds=seconds)

    def failed(reason: str) -> None:
        report("checkpoint failed", reason=reason)
        note(f"a checkpoint was not written: {reason}; training continues")

    def removed(path: Path) -> None:
        report("checkpoint removed", path=str(path), reason="the disk is full")
        note(
            f"the disk has no room for another checkpoint, so the oldest is removed: {path}; free space, or "
            "keep fewer checkpoints"
        )

    return Keeper(Writer(store, done, failed, removed), every, SystemClock())
