"""When the scheduler writes checkpoints, and what it copies."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
from checkpoint_faults import limit_space
from checkpoint_samples import leftovers, sample, steps
from hypothesis import example, given
from hypothesis import strategies as some

from lockstep.checkpoint.checkpoint_files import Contents, load
from lockstep.checkpoint.copy_check import CopyCheck
from lockstep.checkpoint.scheduler import CheckpointScheduler, Copies, Every, open_scheduler
from lockstep.checkpoint.store import Store
from lockstep.checkpoint.writer import Writer
from lockstep.observability.events import (
    CheckpointFailed,
    CheckpointNotRemoved,
    CheckpointRemoved,
    CheckpointWritten,
    Event,
    WarningShown,
)


class FakeWriter:
    """A `Writer` that records steps; each write takes `takes` seconds of the clock."""

    def __init__(self, clock: "Clock", takes: float = 0.0) -> None:
        self.steps: list[int] = []
        self.requested: int | None = None
        self.written: int | None = None
        self.seconds = takes
        self._clock = clock
        self._done = 0.0

    def busy(self) -> bool:
        return self._clock.time < self._done

    def write(self, contents: Contents) -> None:
        assert not self.busy()
        self.steps.append(contents.step)
        self.requested = self.written = contents.step
        self._done = self._clock.time + self.seconds

    def close(self, seconds: float) -> bool:
        self._clock.time = max(self._clock.time, min(self._done, self._clock.time + seconds))
        return not self.busy()


class Clock:
    """A clock that the test sets."""

    time = 0.0

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.time


class Setup:
    """A scheduler with its clock and its writer.

    Attributes:
        ends: what the scheduler reports on the end of the job.
    """

    def __init__(self, every: Every, takes: float = 0.0) -> None:
        self.clock = Clock()
        self.writer = FakeWriter(self.clock, takes)
        self.ends: list[int | str] = []
        writer = cast(Writer, self.writer)
        self.scheduler = CheckpointScheduler(writer, every, self.clock, self.ends.append, self.ends.append)

    def step(self, step: int, seconds: float = 0.0) -> None:
        self.clock.time += seconds
        self.scheduler.after_step(step, lambda: Contents(step, {}, {}))

    def hold(self, step: int) -> None:
        self.scheduler.hold(step, lambda: Contents(step, {}, {}))


def written(every: Every, steps: range, seconds: float = 0.0, takes: float = 0.0) -> list[int]:
    """Return which of `steps` are written if a step takes `seconds` and a write takes `takes` seconds."""
    setup = Setup(every, takes)
    for step in steps:
        setup.step(step, seconds)
    return setup.writer.steps


def test_an_interval_of_steps() -> None:
    assert written(Every(steps=4), range(1, 13)) == [4, 8, 12]
    assert written(Every(steps=4), range(7, 13)) == [8, 12]


def test_an_interval_passed_within_several_steps_at_once() -> None:
    assert written(Every(steps=4), range(3, 19, 3)) == [6, 9, 12, 18]


def test_an_interval_of_seconds() -> None:
    assert written(Every(seconds=10), range(1, 9), seconds=4.0) == [3, 6]


def test_training_waits_for_a_slow_disk_and_reports_it_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert written(Every(steps=1), range(1, 11), seconds=1.0, takes=1.5) == list(range(1, 11))
    (said,) = capsys.readouterr().err.splitlines()
    assert said == (
        "lockstep: the disk is slower than the steps: it writes a checkpoint in 1.5 s, and training has "
        "waited 2.0 s in total for 4 of them; save them less often to train faster"
    )


def test_an_interval_of_seconds_skips_checkpoints_if_the_disk_is_slow() -> None:
    assert written(Every(seconds=2), range(1, 9), seconds=2.0, takes=5.0) == [1, 4, 7]


def test_a_hanging_disk_skips_a_checkpoint(
    capsys: pytest.CaptureFixture[str],
) -> None:
    setup = Setup(Every(steps=1), takes=100.0)
    setup.step(1)
    setup.step(2)
    assert (setup.writer.steps, setup.clock.time) == ([1], 60.0)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "lockstep: training waits for the disk to write a checkpoint: 5 of 60 s"
    assert said[-2] == "lockstep: skipping the checkpoint of step 2: the previous one is still being written"
    setup.step(3, seconds=10.0)
    assert setup.writer.steps == [1, 3]


def test_finish_writes_the_last_step() -> None:
    setup = Setup(Every(seconds=600))
    for step in (1, 2):
        setup.step(step)
        setup.hold(step)
    assert setup.writer.steps == []
    setup.scheduler.finish()
    assert (setup.writer.steps, setup.ends) == ([2], [2])


def test_finish_does_not_write_a_step_twice() -> None:
    setup = Setup(Every(steps=2))
    for step in (1, 2):
        setup.step(step)
        setup.hold(step)
    setup.scheduler.finish()
    assert (setup.writer.steps, setup.ends) == ([2], [2])


def test_a_job_is_finished_only_if_its_last_step_is_written() -> None:
    setup = Setup(Every(steps=2))
    for step in (1, 2, 3):
        setup.step(step)
    setup.scheduler.finish()
    assert (setup.writer.steps, setup.ends) == ([2], [])
    setup = Setup(Every(steps=2))
    setup.scheduler.resumed(4)
    setup.scheduler.finish()
    assert (setup.writer.steps, setup.ends) == ([], [4])
    setup.scheduler.follow(5)
    setup.scheduler.finish()
    assert setup.ends == [4]


def test_end_call_writes_at_most_once_a_minute() -> None:
    setup = Setup(Every(seconds=600))
    for step in (1, 2, 3):
        setup.step(step, seconds=40.0)
        setup.hold(step)
        setup.scheduler.end_call()
    assert setup.writer.steps == [1, 3]


def test_hold_late_copies_the_state_at_settle() -> None:
    setup, taken = Setup(Every(seconds=600)), []

    def take(step: int) -> Contents:
        taken.append(step)
        return Contents(step, {}, {})

    for step in (1, 2, 3):
        setup.step(step)
        setup.scheduler.hold_late(step, lambda step=step: take(step))  # type: ignore[misc]
        if step == 2:
            setup.scheduler.drop()
    assert taken == []
    setup.scheduler.settle()
    setup.scheduler.settle()
    assert taken == [3]
    setup.scheduler.finish()
    assert (setup.writer.steps, setup.ends) == ([3], [3])


def test_finish_reports_a_timeout() -> None:
    setup = Setup(Every(steps=1), takes=1000.0)
    setup.step(1)
    setup.scheduler.finish()
    assert setup.ends == ["not written within 600 s after the end of the script"]


def test_removals_and_failures_are_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limit_space(2, tmp_path, monkeypatch.setattr)
    events: list[Event] = []
    scheduler = open_scheduler(Store(tmp_path), Every(steps=1), events.append)
    for step in (1, 2, 3):
        scheduler.after_step(step, lambda step=step: sample(step))  # type: ignore[misc]
        assert scheduler.close(30)
    limit_space(0, tmp_path, monkeypatch.setattr)
    for step in range(4, 16):
        scheduler.after_step(step, lambda step=step: sample(step))  # type: ignore[misc]
        assert scheduler.close(30)
    kinds = [type(event) for event in events]
    assert kinds[:4] == [CheckpointWritten, CheckpointWritten, CheckpointRemoved, CheckpointWritten]
    assert kinds[4:] == [CheckpointRemoved, *[CheckpointFailed] * 12]
    assert [event.path[-1] for event in events if isinstance(event, CheckpointRemoved)] == ["1", "2"]
    # Equal notes are shown the first time, and the tenth.
    full, *failures = capsys.readouterr().err.splitlines()
    assert full.startswith(f"lockstep: the disk has no space for another checkpoint in {tmp_path}; removing ")
    failure = f"lockstep: a checkpoint failed: cannot write a checkpoint to {tmp_path}: No space left "
    assert [line.startswith(failure) for line in failures] == [True, True]
    assert failures[0].endswith("; the job continues without it")
    assert failures[1] == f"{failures[0]} (10 times so far)"
    assert steps(tmp_path) == [3]


def test_an_old_checkpoint_that_cannot_be_removed_is_published_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = shutil.rmtree

    def refuse(path: Path, *args: Any, **options: Any) -> None:
        if not Path(path).name.startswith(".step-000000000001"):
            original(path, *args, **options)
        elif not options:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    events: list[Event] = []
    scheduler = open_scheduler(Store(tmp_path, keep=1), Every(steps=1), events.append)
    for step in range(1, 6):
        scheduler.after_step(step, lambda step=step: sample(step))  # type: ignore[misc]
        assert scheduler.close(30)
    (remained,) = [event for event in events if not isinstance(event, CheckpointWritten)]
    path, why = str(tmp_path / "step-000000000001"), "No space left on device"
    assert remained == CheckpointNotRemoved(path, why)
    assert capsys.readouterr().err == (
        f"lockstep: an old checkpoint could not be removed: {path}: {why}; training continues\n"
    )
    # The next chief knows it under the same name.
    events.clear()
    scheduler = open_scheduler(Store(tmp_path, keep=1), Every(steps=1), events.append)
    scheduler.after_step(6, lambda: sample(6))
    assert scheduler.close(30)
    assert [event for event in events if not isinstance(event, CheckpointWritten)] == [remained]
    scheduler = open_scheduler(Store(tmp_path, keep=1), Every(steps=1), events.append)
    monkeypatch.setattr(shutil, "rmtree", original)
    scheduler.after_step(7, lambda: sample(7))
    assert scheduler.close(30)
    assert (steps(tmp_path), leftovers(tmp_path)) == ([7], [])
    removed = [event for event in events if isinstance(event, CheckpointRemoved)]
    assert removed == [CheckpointRemoved(path, "it could not be removed before", late=True)]


def test_a_missing_mark_of_the_end_is_a_warning_and_no_failed_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events: list[Event] = []
    scheduler = open_scheduler(Store(tmp_path), Every(steps=1), events.append)
    scheduler.after_step(1, lambda: sample(1))
    (tmp_path / "finished.json").mkdir()
    scheduler.finish()
    told = (
        f"cannot write {tmp_path}/finished.json: Is a directory; the checkpoint of step 1 "
        "is complete, but the job does not count as finished"
    )
    assert [event for event in events if not isinstance(event, CheckpointWritten)] == [WarningShown(told)]
    assert capsys.readouterr().err == f"lockstep: {told}\n"


# Copies of the state.


def test_a_copy_that_has_changed_is_not_written_if_the_job_verifies(tmp_path: Path) -> None:
    weights, events = np.arange(6, dtype="f4").reshape(2, 3), list[Event]()
    store = Store(tmp_path)
    scheduler = open_scheduler(store, Every(steps=1), events.append)

    def flipped(contents: Contents, of: Any = Copies.of) -> Contents:
        copies: Contents = of(scheduler._copies, contents)
        words = copies.arrays["weights"].reshape(-1).view("u4")
        words[:3] ^= 1
        return copies

    for step, manifest in enumerate(({}, {"verified": 0}, {"verified": 0}), 1):
        arrays = {"weights": weights.T, "count": np.array(step)}
        scheduler._copies.of = flipped if step < 3 else Copies().of  # type: ignore[method-assign]
        scheduler.after_step(step, lambda: Contents(step, manifest, arrays))  # noqa: B023
        assert scheduler._wait_for_disk(60.0, "the test waits")
    assert scheduler.close()
    # A job that does not verify has no checksums of the state: the changed copy of step 1 is written.
    assert [entry.step for entry in store.entries()] == [1, 3]
    (failed,) = [event for event in events if isinstance(event, CheckpointFailed)]
    assert "the copy of the array 'weights' for the checkpoint of step 2 has changed" in failed.reason


def test_a_changed_bit_of_the_last_copy_is_corrected_if_the_job_verifies(tmp_path: Path) -> None:
    weights, events = np.arange(6, dtype="f4").reshape(2, 3), list[Event]()
    store = Store(tmp_path)
    scheduler = open_scheduler(store, Every(steps=100), events.append)
    right = {"weights": weights.T.copy(), "count": np.array(7)}
    scheduler.after_step(7, lambda: Contents(7, {"verified": 0}, right))
    scheduler.hold(7, lambda: Contents(7, {"verified": 0}, {**right, "weights": weights.T}))
    assert scheduler._held is not None
    scheduler._held.arrays["weights"].reshape(-1).view("u4")[1] ^= 1 << 20
    # The state is not copied again: a callback has changed it meanwhile.
    weights[:] = 0
    scheduler.finish()
    (entry,) = store.entries()
    saved = load(entry.path).arrays
    assert {name: array.tobytes() for name, array in saved.items()} == {
        name: array.tobytes() for name, array in right.items()
    }
    (shown,) = [event for event in events if isinstance(event, WarningShown)]
    assert "one word of the array 'weights' changed in the copy for the checkpoint of step 7" in shown.text


@given(some.integers(1, 1 << 17), some.integers(0, 1 << 17), some.integers(0, 7))
@example(32_767, 32_766, 7)
@example(32_769, 32_768, 0)
@example(65_536, 0, 3)
@example(2_200_003, 2_100_000, 5)
def test_each_changed_bit_of_a_copy_is_corrected(size: int, byte: int, bit: int) -> None:
    array = np.arange(size, dtype="u4").astype("u1")
    check, copy = CopyCheck.of(array), array.copy()
    copy[byte % size] ^= 1 << bit
    assert check.correct(copy)
    assert copy.tobytes() == array.tobytes()


def test_changes_of_two_words_are_not_corrected() -> None:
    array = np.arange(9000.0)
    for second in (1, 128, 129, 8999):
        copy = array.copy()
        copy[[0, second]] = -1
        assert not CopyCheck.of(array).correct(copy)


@pytest.mark.parametrize("size", [64, 30_000, 1_000_000])
def test_the_facts_about_a_copy_are_smaller_than_its_array(size: int) -> None:
    check = CopyCheck.of(np.zeros(size, "float32"))
    assert check.rows.nbytes + check.columns.nbytes < 16 * size**0.5


def contents(seed: int, length: int = 50) -> Contents:
    random = np.random.default_rng(seed)
    return Contents(
        seed,
        {"seed": seed},
        {
            "a": random.normal(size=(length, 3)).T,
            "b": random.normal(size=7).astype(ml_dtypes.bfloat16),
            "scalar": np.array(float(seed)),
            "empty": np.empty((0, 2), "int8"),
        },
    )


@pytest.mark.parametrize("ready", [False, True])
def test_a_copy_does_not_change_with_the_original(ready: bool) -> None:
    copies = Copies()
    if ready:
        copies.make_ready(contents(0))
        copies.make_ready(contents(0))
    for seed in range(4):
        original = contents(seed)
        copy = copies.of(original)
        expected = {name: (a.dtype, a.shape, a.tobytes()) for name, a in contents(seed).arrays.items()}
        for array in original.arrays.values():
            array[...] = 0
        assert {name: (a.dtype, a.shape, a.tobytes()) for name, a in copy.arrays.items()} == expected
        assert (copy.step, copy.manifest) == (seed, {"seed": seed})


def test_copies_reuse_memory_that_fits() -> None:
    copies = Copies()
    copies.make_ready(contents(0))
    assert copies._thread is not None
    copies._thread.join()
    first, second = copies.of(contents(1)), copies.of(contents(2))
    other = copies.of(contents(3, length=60))
    for name in first.arrays:
        assert first.arrays[name] is second.arrays[name]
        assert (other.arrays[name] is second.arrays[name]) == (name != "a")
