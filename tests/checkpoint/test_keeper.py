from pathlib import Path
from typing import cast

import pytest
from checkpoint_faults import room_for
from checkpoint_samples import sample, steps

from lockstep.checkpoint.scheduler import CheckpointScheduler, Every, open_scheduler
from lockstep.checkpoint.store import Contents, Store
from lockstep.checkpoint.writer import Writer
from lockstep.observability.events import CheckpointNotWritten, CheckpointRemoved, CheckpointWritten, Event


class Steps:
    """Stands for a `Writer`; notes the steps of what it is given, which takes it some time."""

    def __init__(self, clock: "Clock", takes: float = 0.0) -> None:
        self.steps: list[int] = []
        self.asked: int | None = None
        self.written: int | None = None
        self.seconds = takes
        self._clock = clock
        self._done = 0.0

    def busy(self) -> bool:
        return self._clock.time < self._done

    def write(self, contents: Contents) -> None:
        assert not self.busy()
        self.steps.append(contents.step)
        self.asked = self.written = contents.step
        self._done = self._clock.time + self.seconds

    def close(self, seconds: float) -> bool:
        self._clock.time = max(self._clock.time, min(self._done, self._clock.time + seconds))
        return not self.busy()


class Clock:
    """Stands still, unless told otherwise."""

    time = 0.0

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.time


class Kept:
    """A keeper with all that it talks to.

    Attributes:
        ends: what it says of the end of the job.
    """

    def __init__(self, every: Every, takes: float = 0.0) -> None:
        self.clock = Clock()
        self.writer = Steps(self.clock, takes)
        self.ends: list[int | str] = []
        writer = cast(Writer, self.writer)
        self.scheduler = CheckpointScheduler(writer, every, self.clock, self.ends.append, self.ends.append)

    def step(self, step: int, seconds: float = 0.0) -> None:
        self.clock.time += seconds
        self.scheduler.after_step(step, lambda: Contents(step, {}, {}))

    def hold(self, step: int) -> None:
        self.scheduler.hold(step, lambda: Contents(step, {}, {}))


def keep(every: Every, steps: range, seconds: float = 0.0, takes: float = 0.0) -> list[int]:
    """Return which of `steps` are kept if each takes `seconds`, and to write one takes so many."""
    kept = Kept(every, takes)
    for step in steps:
        kept.step(step, seconds)
    return kept.writer.steps


def test_so_many_steps_lie_between_two() -> None:
    assert keep(Every(steps=4), range(1, 13)) == [4, 8, 12]
    assert keep(Every(steps=4), range(7, 13)) == [8, 12]


def test_where_several_steps_are_taken_at_once_the_next_is_kept() -> None:
    assert keep(Every(steps=4), range(3, 19, 3)) == [6, 9, 12, 18]


def test_so_many_seconds_lie_between_two() -> None:
    assert keep(Every(seconds=10), range(1, 9), seconds=4.0) == [3, 6]


def test_each_that_steps_ask_for_is_kept_and_a_slow_disk_is_told_of_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert keep(Every(steps=1), range(1, 11), seconds=1.0, takes=1.5) == list(range(1, 11))
    (said,) = capsys.readouterr().err.splitlines()
    assert said == (
        "lockstep: the disk is slower than the steps: it writes a checkpoint in 1.5 s, and training has "
        "waited 2.0 s in all for 4 of them; save them less often to train faster"
    )


def test_what_time_asks_for_is_left_out_where_the_disk_is_behind() -> None:
    assert keep(Every(seconds=2), range(1, 9), seconds=2.0, takes=5.0) == [1, 4, 7]


def test_a_disk_that_hangs_costs_a_checkpoint_and_not_the_training(
    capsys: pytest.CaptureFixture[str],
) -> None:
    kept = Kept(Every(steps=1), takes=100.0)
    kept.step(1)
    kept.step(2)
    assert (kept.writer.steps, kept.clock.time) == ([1], 60.0)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "lockstep: training waits for the disk to write a checkpoint: 10 of 60 s"
    assert said[-2] == "lockstep: skipping the checkpoint of step 2: the previous one is still being written"
    kept.step(3, seconds=10.0)
    assert kept.writer.steps == [1, 3]


def test_the_last_step_is_kept_when_the_program_ends() -> None:
    kept = Kept(Every(seconds=600))
    for step in (1, 2):
        kept.step(step)
        kept.hold(step)
    assert kept.writer.steps == []
    kept.scheduler.finish()
    assert (kept.writer.steps, kept.ends) == ([2], [2])


def test_what_is_kept_already_is_not_kept_again() -> None:
    kept = Kept(Every(steps=2))
    for step in (1, 2):
        kept.step(step)
        kept.hold(step)
    kept.scheduler.finish()
    assert (kept.writer.steps, kept.ends) == ([2], [2])


def test_a_job_is_finished_only_if_its_last_step_is_kept() -> None:
    kept = Kept(Every(steps=2))
    for step in (1, 2, 3):
        kept.step(step)
    kept.scheduler.finish()
    assert (kept.writer.steps, kept.ends) == ([2], [])
    kept = Kept(Every(steps=2))
    kept.scheduler.resumed(4)
    kept.scheduler.finish()
    assert (kept.writer.steps, kept.ends) == ([], [4])
    kept.scheduler.follow(5)
    kept.scheduler.finish()
    assert kept.ends == [4]


def test_the_end_of_a_call_is_kept_now_and_then() -> None:
    kept = Kept(Every(seconds=600))
    for step in (1, 2, 3):
        kept.step(step, seconds=40.0)
        kept.hold(step)
        kept.scheduler.end_call()
    assert kept.writer.steps == [1, 3]


def test_what_is_held_late_is_taken_before_it_changes_or_not_at_all() -> None:
    kept, taken = Kept(Every(seconds=600)), []

    def take(step: int) -> Contents:
        taken.append(step)
        return Contents(step, {}, {})

    for step in (1, 2, 3):
        kept.step(step)
        kept.scheduler.hold_late(step, lambda step=step: take(step))  # type: ignore[misc]
        if step == 2:
            kept.scheduler.drop()
    assert taken == []
    kept.scheduler.settle()
    kept.scheduler.settle()
    assert taken == [3]
    kept.scheduler.finish()
    assert (kept.writer.steps, kept.ends) == ([3], [3])


def test_an_end_that_cannot_be_kept_is_told() -> None:
    kept = Kept(Every(steps=1), takes=1000.0)
    kept.step(1)
    kept.scheduler.finish()
    assert kept.ends == ["not written within 600 s after the end of the script"]


def test_a_checkpoint_that_makes_room_or_fails_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    room_for(2, tmp_path, monkeypatch.setattr)
    events: list[Event] = []
    scheduler = open_scheduler(Store(tmp_path), Every(steps=1), events.append)
    for step in (1, 2, 3):
        scheduler.after_step(step, lambda step=step: sample(step))  # type: ignore[misc]
        assert scheduler.close(30)
    room_for(0, tmp_path, monkeypatch.setattr)
    scheduler.after_step(4, lambda: sample(4))
    assert scheduler.close(30)
    told = [type(event) for event in events]
    assert told[:4] == [CheckpointWritten, CheckpointWritten, CheckpointRemoved, CheckpointWritten]
    assert told[4:] == [CheckpointRemoved, CheckpointNotWritten]
    assert [event.path[-1] for event in events if isinstance(event, CheckpointRemoved)] == ["1", "2"]
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first.startswith("lockstep: the disk has no space for another checkpoint; removing the oldest: ")
    assert last.startswith("lockstep: a checkpoint was not written: cannot write the checkpoint ")
    assert last.endswith("; training continues")
    assert steps(tmp_path) == [3]
