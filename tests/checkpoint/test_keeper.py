from typing import cast

from lockstep.checkpoint.keeper import Every, Keeper
from lockstep.checkpoint.store import Contents
from lockstep.checkpoint.writer import Writer


class Steps:
    """Stands for a `Writer` that is never busy; notes the steps of what it is given."""

    def __init__(self) -> None:
        self.written: list[int] = []

    def busy(self) -> bool:
        return False

    def write(self, contents: Contents) -> None:
        self.written.append(contents.step)


class Clock:
    """Stands still, unless told otherwise."""

    time = 0.0

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.time


def keep(every: Every, steps: range, clock: Clock | None = None, seconds: float = 0.0) -> list[int]:
    """Return which of `steps` are kept if each takes `seconds`."""
    writer, clock = Steps(), clock or Clock()
    keeper = Keeper(cast(Writer, writer), every, clock)
    for step in steps:
        clock.time += seconds
        keeper.after_step(step, lambda step=step: Contents(step, {}, {}))  # type: ignore[misc]
    return writer.written


def test_so_many_steps_lie_between_two() -> None:
    assert keep(Every(steps=4), range(1, 13)) == [4, 8, 12]
    assert keep(Every(steps=4), range(7, 13)) == [8, 12]


def test_where_several_steps_are_taken_at_once_the_next_is_kept() -> None:
    assert keep(Every(steps=4), range(3, 19, 3)) == [6, 9, 12, 18]


def test_so_many_seconds_lie_between_two() -> None:
    assert keep(Every(seconds=10), range(1, 9), seconds=4.0) == [3, 6]
