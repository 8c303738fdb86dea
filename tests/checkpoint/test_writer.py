"""The background writer of checkpoints."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_samples import sample, steps

from lockstep.checkpoint.checkpoint_files import Contents
from lockstep.checkpoint.latest import Latest
from lockstep.checkpoint.store import Store
from lockstep.checkpoint.writer import Writer
from lockstep.errors import CheckpointError

PATIENCE = 300.0


class BlockedStore(Store):
    """A store whose writes block until the test opens it, and then may fail."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.reached = threading.Event()
        self.open = threading.Event()
        self.error: Exception | None = None

    def write(
        self,
        contents: Contents,
        removed: Callable[[Path, bool], None] = print,
        not_removed: Callable[[Path, str], None] = print,
    ) -> Path:
        self.reached.set()
        assert self.open.wait(PATIENCE)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return super().write(contents, removed, not_removed)


class Reports:
    """The reports of a writer."""

    def __init__(self) -> None:
        self.done: list[tuple[Path, int, float]] = []
        self.failed: list[str] = []
        self.removed: list[tuple[Path, bool]] = []

    def writer(self, store: Store) -> Writer:
        return Writer(
            store,
            lambda *done: self.done.append(done),
            self.failed.append,
            lambda *removed: self.removed.append(removed),
        )


def test_requested_checkpoints_are_written(tmp_path: Path) -> None:
    reports = Reports()
    writer = reports.writer(Store(tmp_path))
    assert not writer.busy()
    assert writer.close(0)
    for step in (1, 2):
        writer.write(sample(step))
        assert writer.close(PATIENCE)
        assert not writer.busy()
    assert steps(tmp_path) == [1, 2]
    assert [(path.name[-2:], step) for path, step, _ in reports.done] == [("01", 1), ("02", 2)]
    assert all(0 < seconds < PATIENCE for _, _, seconds in reports.done)
    assert reports.failed == []


def test_a_request_replaces_a_waiting_one(tmp_path: Path) -> None:
    reports, store = Reports(), BlockedStore(tmp_path)
    writer = reports.writer(store)
    writer.write(sample(1))
    assert store.reached.wait(PATIENCE)
    for step in (2, 3, 4):
        writer.write(sample(step))
    assert writer.busy()
    assert not writer.close(0)
    store.open.set()
    assert writer.close(PATIENCE)
    assert steps(tmp_path) == [1, 4]
    assert len(reports.done) == 2


def test_failures_are_reported_and_the_next_checkpoint_is_written(tmp_path: Path) -> None:
    reports, store = Reports(), BlockedStore(tmp_path)
    writer = reports.writer(store)
    store.open.set()
    for error in (CheckpointError("the disk is full"), ValueError("odd")):
        store.error = error
        writer.write(sample(1))
        assert writer.close(PATIENCE)
    assert reports.failed == ["the disk is full", "cannot write the checkpoint of step 1: ValueError('odd')"]
    writer.write(sample(2))
    assert writer.close(PATIENCE)
    assert steps(tmp_path) == [2]


def test_a_failure_does_not_lose_the_waiting_request(tmp_path: Path) -> None:
    reports, store = Reports(), BlockedStore(tmp_path)
    writer = reports.writer(store)
    store.error = CheckpointError("the disk is full")
    writer.write(sample(1))
    assert store.reached.wait(PATIENCE)
    writer.write(sample(2))
    store.open.set()
    assert writer.close(PATIENCE)
    assert (reports.failed, steps(tmp_path)) == (["the disk is full"], [2])


class EmptyStore(Store):
    """A store that writes nothing."""

    def write(
        self,
        contents: Contents,
        removed: Callable[[Path, bool], None] = print,
        not_removed: Callable[[Path, str], None] = print,
    ) -> Path:
        return Path(str(contents.step))


class SlowWork(Latest[Contents]):
    """Work whose first thread ends only when the test allows it."""

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


def test_close_waits_for_a_request_made_while_the_thread_ends(tmp_path: Path) -> None:
    store = BlockedStore(tmp_path)
    store.open.set()
    writer = Writer(store, lambda *done: None, print, print)
    writer._work = work = SlowWork(writer._write, "checkpoints")
    work.hold()
    writer.write(sample(1))
    assert work.reached.wait(PATIENCE)
    store.open.clear()
    store.reached.clear()
    writer.write(sample(2))
    assert store.reached.wait(PATIENCE)
    work.go.set()
    work.ending[0].join(PATIENCE)
    assert writer.busy()
    assert not writer.close(0)
    store.open.set()
    assert writer.close(PATIENCE)
    assert steps(tmp_path) == [1, 2]


def test_close_does_not_wait_for_a_failed_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def done(path: Path, seconds: float) -> None:
        raise ValueError("the callback failed")

    ended = threading.Semaphore(0)
    monkeypatch.setattr(threading, "excepthook", lambda arguments: ended.release())
    writer = Writer(EmptyStore(tmp_path), done, print, print)
    for _ in range(2):
        writer.write(sample(1))
        assert writer.close(PATIENCE)
        assert ended.acquire(timeout=PATIENCE)
