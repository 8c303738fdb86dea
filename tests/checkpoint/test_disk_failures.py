"""Writing checkpoints to disks that fail or are full, to unwritable folders, and by several writers."""

import errno
import itertools
import os
import re
import shutil
import threading
from pathlib import Path

import pytest
from checkpoint_faults import Countdown, limit_space
from checkpoint_samples import is_sample, leftovers, sample, steps

import lockstep.checkpoint.durable
from lockstep.checkpoint.durable import locked
from lockstep.checkpoint.store import Store
from lockstep.errors import CheckpointError


def fail(number: int) -> None:
    raise OSError(number, os.strerror(number))


def failure(folder: Path, step: int) -> str | None:
    """Write a checkpoint; return why it could not be written."""
    try:
        Store(folder, keep=2).write(sample(step, 24))
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.parametrize("step", [4, 3], ids=["new", "again"])
def test_a_failed_call_leaves_the_other_checkpoints_unchanged(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for old in (2, 3):
        Store(tmp_path / "first").write(sample(old))
    failures = 0
    for number in itertools.count():
        folder = shutil.copytree(tmp_path / "first", tmp_path / str(number))
        countdown = Countdown(number, lambda: fail(errno.EIO))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", lambda descriptor: None)
            countdown.install(patch.setattr)
            error = failure(folder, step)
        if countdown.left >= 0:
            break
        if error is not None:
            failures += 1
            assert re.match(f"cannot write a checkpoint to {folder}: Input/output error", error)
            assert steps(folder) == [2, 3]
            assert Store(folder).newest(print)[1].arrays["weights"].size == 12
            assert leftovers(folder) == []
        else:
            # Only removals after the write may fail silently.
            assert Store(folder).newest(print)[1].arrays["weights"].size == 24
        Store(folder, keep=2).write(sample(9))
        assert leftovers(folder) == []
    assert failures >= 12


@pytest.mark.parametrize(("room", "kept"), [(1, [1]), (2, [5, 6]), (3, [4, 5, 6]), (4, [4, 5, 6])])
def test_a_full_disk_keeps_the_newest(
    room: int, kept: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_space(room, tmp_path, monkeypatch.setattr)
    store, removed = Store(tmp_path, keep=3), list[str]()
    for step in range(1, 7):
        if room == 1 and step > 1:
            with pytest.raises(CheckpointError, match="No space left on device; free space there, or give"):
                store.write(sample(step))
        else:
            store.write(sample(step), lambda path, late: removed.append(path.name))
        assert is_sample(store.newest(print)[1])
    assert steps(tmp_path) == kept
    assert leftovers(tmp_path) == []
    # With space for `keep` + 1 checkpoints, none is removed early.
    expected = {2: [1, 2, 3, 4], 3: [1, 2, 3]}.get(room, [])
    assert removed == [f"step-{step:012}" for step in expected]


def test_a_full_disk_with_an_old_checkpoint_that_stays_keeps_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next oldest one is removed instead."""
    limit_space(3, tmp_path, monkeypatch.setattr)
    original = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path.name == f"step-{1:012}" and path.exists():
            fail(errno.EBUSY)
        return original(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    store, removed, not_removed = Store(tmp_path, keep=3), list[str](), set[str]()
    for step in range(1, 7):
        store.write(
            sample(step),
            lambda path, late: removed.append(path.name),
            lambda path, why: not_removed.add(f"{path.name}: {why}"),
        )
        assert is_sample(store.newest(print)[1])
    assert (steps(tmp_path), leftovers(tmp_path)) == ([1, 5, 6], [])
    assert removed == [f"step-{step:012}" for step in (2, 3, 4)]
    assert not_removed == {f"step-{1:012}: Device or resource busy"}


def test_none_is_removed_if_that_would_not_free_enough_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    for step in (1, 2):
        store.write(sample(step))
    limit_space(0, tmp_path, monkeypatch.setattr)
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((512, 512, 9, 0, 0, 9, 9, 9, 0, 255)))
    with pytest.raises(CheckpointError, match="No space left on device"):
        store.write(sample(3, 5000))
    assert steps(tmp_path) == [1, 2]


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match=f"cannot write a checkpoint to {folder}: "):
            Store(folder).write(sample(1))
    Countdown(0, lambda: fail(errno.EACCES)).install(monkeypatch.setattr)
    with pytest.raises(CheckpointError, match="Permission denied; give another folder"):
        Store(tmp_path / "denied").write(sample(1))


def test_a_folder_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointError, match="cannot be read: Not a directory"):
        Store(tmp_path / "file").entries()


def test_the_next_writer_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = store.write(sample(1))
    path.rename(tmp_path / ".step-000000000001.replaced")
    for name in (".step-000000000002.writing", ".step-000000000000.removed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_bytes(b"{}")
    assert steps(tmp_path) == [1]
    store.write(sample(3))
    assert leftovers(tmp_path) == []
    assert steps(tmp_path) == [1, 3]
    assert is_sample(store.newest(print)[1])


def test_a_writer_changes_nothing_while_another_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lockstep.checkpoint.durable, "_PATIENCE_SECONDS", 0.0)
    (tmp_path / ".step-000000000002.writing").mkdir()
    with (
        locked(tmp_path / ".lock"),
        pytest.raises(CheckpointError, match=f"another process has been writing checkpoints to {tmp_path}"),
    ):
        Store(tmp_path).write(sample(1))
    assert leftovers(tmp_path) == [".step-000000000002.writing"]
    Store(tmp_path).write(sample(1))
    assert leftovers(tmp_path) == []


def test_a_fork_of_the_writer_does_not_keep_the_lock(tmp_path: Path) -> None:
    with locked(tmp_path / ".lock"):
        # A forked process has the same open file.
        found = [link for link in Path("/proc/self/fd").iterdir() if link.resolve() == tmp_path / ".lock"]
        copies = [os.dup(int(link.name)) for link in found]
    Store(tmp_path).write(sample(1))
    assert len(copies) == 1
    os.close(copies[0])


def test_several_writers_write_one_after_another(tmp_path: Path) -> None:
    errors: list[Exception] = []

    def write(first: int) -> None:
        try:
            for step in range(first, 8, 2):
                Store(tmp_path, keep=100).write(sample(step))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(first,)) for first in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert errors == []
    assert steps(tmp_path) == list(range(8))
