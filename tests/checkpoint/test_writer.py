"""Checkpoints that are written in the background."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_samples import sample, steps

from lockstep.checkpoint.store import Contents, Store
from lockstep.checkpoint.writer import Writer
from lockstep.errors import CheckpointError

PATIENCE = 300.0


class Gate(Store):
    """A store that waits to be let through, and then may fail."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.reached = threading.Event()
        self.open = threading.Event()
        self.error: Exception | None = None

    def write(self, contents: Contents, removed: Callable[[Path], None] = print) -> Path:
        self.reached.set()
        assert self.open.wait(PATIENCE)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return super().write(contents, removed)


class Heard:
    """What a writer has said."""

    def __init__(self) -> None:
        self.done: list[tuple[Path, int, float]] = []
        self.failed: list[str] = []
        self.removed: list[Path] = []

    def on(self, store: Store) -> Writer:
        return Writer(store, lambda *done: self.done.append(done), self.failed.append, self.removed.append)


def test_it_writes(tmp_path: Path) -> None:
    heard = Heard()
    writer = heard.on(Store(tmp_path))
    assert not writer.busy()
    assert writer.close(0)
    for step in (1, 2):
        writer.write(sample(step))
        assert writer.close(PATIENCE)
        assert not writer.busy()
    assert steps(tmp_path) == [1, 2]
    assert [(path.name[-2:], step) for path, step, _ in heard.done] == [("01", 1), ("02", 2)]
    assert all(0 < seconds < PATIENCE for _, _, seconds in heard.done)
    assert heard.failed == []


def test_the_newest_request_waits_in_the_place_of_an_older_one(tmp_path: Path) -> None:
    heard, gate = Heard(), Gate(tmp_path)
    writer = heard.on(gate)
    writer.write(sample(1))
    assert gate.reached.wait(PATIENCE)
    for step in (2, 3, 4):
        writer.write(sample(step))
    assert writer.busy()
    assert not writer.close(0)
    gate.open.set()
    assert writer.close(PATIENCE)
    assert steps(tmp_path) == [1, 4]
    assert len(heard.done) == 2


def test_failures_are_told_and_the_next_one_is_written(tmp_path: Path) -> None:
    heard, gate = Heard(), Gate(tmp_path)
    writer = heard.on(gate)
    gate.open.set()
    for error in (CheckpointError("the disk is full"), ValueError("odd")):
        gate.error = error
        writer.write(sample(1))
        assert writer.close(PATIENCE)
    assert heard.failed == ["the disk is full", "cannot write the checkpoint of step 1: ValueError('odd')"]
    writer.write(sample(2))
    assert writer.close(PATIENCE)
    assert steps(tmp_path) == [2]


def test_a_failure_does_not_lose_the_request_that_waits(tmp_path: Path) -> None:
    heard, gate = Heard(), Gate(tmp_path)
    writer = heard.on(gate)
    gate.error = CheckpointError("the disk is full")
    writer.write(sample(1))
    assert gate.reached.wait(PATIENCE)
    writer.write(sample(2))
    gate.open.set()
    assert writer.close(PATIENCE)
    assert (heard.failed, steps(tmp_path)) == (["the disk is full"], [2])


class Nowhere(Store):
    """A store that keeps nothing, at once."""

    def write(self, contents: Contents, removed: Callable[[Path], None] = print) -> Path:
        return Path(str(contents.step))


class Slow(Writer):
    """A writer whose first thread takes its time to end."""

    def hold(self) -> None:
        self.ending: list[threading.Thread] = []
        self.reached = threading.Event()
        self.go = threading.Event()

    def _next(self) -> Contents | None:
        contents = super()._next()
        if contents is None and not self.ending:
            self.ending.append(threading.current_thread())
            self.reached.set()
            assert self.go.wait(PATIENCE)
        return contents


def test_a_request_just_when_the_thread_ends_is_waited_for(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    gate.open.set()
    writer = Slow(gate, lambda *done: None, print, print)
    writer.hold()
    writer.write(sample(1))
    assert writer.reached.wait(PATIENCE)
    gate.open.clear()
    gate.reached.clear()
    writer.write(sample(2))
    assert gate.reached.wait(PATIENCE)
    writer.go.set()
    writer.ending[0].join(PATIENCE)
    assert writer.busy()
    assert not writer.close(0)
    gate.open.set()
    assert writer.close(PATIENCE)
    assert steps(tmp_path) == [1, 2]


def test_nobody_waits_for_a_thread_that_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def done(path: Path, seconds: float) -> None:
        raise ValueError("a callback that is wrong")

    ended = threading.Semaphore(0)
    monkeypatch.setattr(threading, "excepthook", lambda arguments: ended.release())
    writer = Writer(Nowhere(tmp_path), done, print, print)
    for _ in range(2):
        writer.write(sample(1))
        assert writer.close(PATIENCE)
        assert ended.acquire(timeout=PATIENCE)
