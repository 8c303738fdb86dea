from pathlib import Path
from typing import Any, cast

import pytest
from checkpoint_faults import room_for
from checkpoint_samples import sample, steps

from lockstep.checkpoint.keeper import Every, Keeper, open_keeper
from lockstep.checkpoint.store import Contents, Store
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


def test_a_checkpoint_that_makes_room_or_fails_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    room_for(2, tmp_path, monkeypatch.setattr)
    events: list[tuple[str, dict[str, Any]]] = []
    keeper = open_keeper(
        Store(tmp_path), Every(steps=1), lambda event, **fields: events.append((event, fields))
    )
    for step in (1, 2, 3):
        keeper.after_step(step, lambda step=step: sample(step))  # type: ignore[misc]
        assert keeper.close(30)
    room_for(0, tmp_path, monkeypatch.setattr)
    keeper.after_step(4, lambda: sample(4))
    assert keeper.close(30)
    told = [event for event, _ in events]
    assert told[:4] == ["checkpoint", "checkpoint", "checkpoint removed", "checkpoint"]
    assert told[4:] == ["checkpoint removed", "checkpoint failed"]
    assert [fields["path"][-1] for event, fields in events if event == "checkpoint removed"] == ["1", "2"]
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first.startswith(
        "lockstep: the disk has no room for another checkpoint, so the oldest is removed: "
    )
    assert last.startswith("lockstep: a checkpoint was not written: cannot write the checkpoint ")
    assert last.endswith("; training continues")
    assert steps(tmp_path) == [3]
