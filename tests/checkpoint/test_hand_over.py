"""The newest checkpoint of all hosts is chosen, and copied to others completely or not at all."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest

from lockstep.checkpoint.checkpoint_files import STATE, Contents, load
from lockstep.checkpoint.hand_over import ArrivingCheckpoint, held_of, newest_held, parts_of_checkpoint
from lockstep.checkpoint.held import HeldCheckpoint, JobFacts, choose_newest
from lockstep.checkpoint.store import Store
from lockstep.errors import CheckpointError, ConfigError

JOB = {"replicas": 2, "seed": 3, "threads": 1, "input": "divided"}


def write(folder: Path, step: int, value: float = 1.0, keep: int = 3) -> Path:
    arrays = {"weights": np.full(1000, value, np.float32), "bias": np.zeros(3)}
    return Store(folder, keep).write(Contents(step, {"job": JOB, "of": str(folder)}, arrays))


def copy(source: Path, folder: Path, keep: int = 3, size: int = 100) -> Path:
    arriving = ArrivingCheckpoint(folder, held_of(source), keep)
    for file, part in parts_of_checkpoint(source, size):
        assert 0 < len(part) <= size
        arriving.add(file, part)
    return arriving.complete()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".lock"}


def held(step: int, digest: str = "a") -> HeldCheckpoint:
    return HeldCheckpoint(step, digest, JobFacts(2, 0, 1))


@pytest.mark.parametrize(
    ("found", "chosen"),
    [
        ([None, None], None),
        ([None, held(4)], 1),
        ([held(8), held(4), None], 0),
        ([held(4), held(8), held(8)], 1),
        ([held(4, "a"), held(4, "b"), held(8)], 2),
    ],
)
def test_the_first_of_the_hosts_with_the_newest(
    found: list[HeldCheckpoint | None], chosen: int | None
) -> None:
    assert choose_newest([f"node{number}" for number, _ in enumerate(found, 1)], found) == chosen


def test_two_trainings_are_refused() -> None:
    wanted = "the checkpoints of step 4 on node2 and node3 belong to different jobs"
    with pytest.raises(ConfigError, match=wanted):
        choose_newest(["node1", "node2", "node3"], [held(2), held(4, "a"), held(4, "b")])


def test_a_checkpoint_written_again_on_another_host_is_the_same(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one", 4), write(tmp_path / "two", 4)
    assert held_of(one).is_same(held_of(two))
    assert not held_of(one).is_same(held_of(write(tmp_path / "three", 4, 2.0)))
    assert not held_of(one).is_same(held_of(write(tmp_path / "four", 5)))


def test_facts_survive_the_way_without_those_that_are_missing(tmp_path: Path) -> None:
    sent = msgspec.msgpack.encode(held_of(write(tmp_path, 4)))
    assert msgspec.to_builtins(msgspec.msgpack.decode(sent, type=HeldCheckpoint).job) == JOB


def test_a_copy_is_complete_and_marked_as_finished(tmp_path: Path) -> None:
    source = write(tmp_path / "one", 4)
    Store(tmp_path / "one").finish(4)
    path = copy(source, tmp_path / "new" / "two")
    assert path == tmp_path / "new" / "two" / source.name
    assert load(path).arrays["weights"].tobytes() == load(source).arrays["weights"].tobytes()
    assert Store(path.parent).finished() == 4
    found = newest_held(path.parent, pytest.fail)
    assert found == (path, held_of(source))


def test_older_checkpoints_are_removed_and_a_damaged_one_is_replaced(tmp_path: Path) -> None:
    source = write(tmp_path / "one", 9)
    for step in (1, 2, 3):
        write(tmp_path / "two", step)
    (write(tmp_path / "two", 9) / STATE).write_bytes(b"damaged")
    copy(source, tmp_path / "two", keep=2)
    assert names(tmp_path / "two") == {f"step-{step:012}" for step in (3, 9)}
    load(tmp_path / "two" / source.name)


@pytest.mark.parametrize("fault", ["missing", "changed", "another"])
def test_a_damaged_copy_leaves_nothing(tmp_path: Path, fault: str) -> None:
    source = write(tmp_path / "one", 4)
    sent = write(tmp_path / "other", 5) if fault == "another" else source
    arriving = ArrivingCheckpoint(tmp_path / "two", held_of(source), 3)
    for number, (file, part) in enumerate(parts_of_checkpoint(sent, 500)):
        if number == 3 and fault == "missing":
            continue
        arriving.add(file, part[::-1] if number == 3 and fault == "changed" else part)
    with pytest.raises(CheckpointError):
        arriving.complete()
    assert names(tmp_path / "two") == set()


def test_hosts_that_share_the_folder_may_copy_at_the_same_time(tmp_path: Path) -> None:
    source, both = write(tmp_path / "one", 4), threading.Barrier(2, timeout=60.0)

    def host() -> Path:
        arriving = ArrivingCheckpoint(tmp_path / "two", held_of(source), 3)
        both.wait()
        for file, part in parts_of_checkpoint(source, 500):
            arriving.add(file, part)
        both.wait()
        return arriving.complete()

    with ThreadPoolExecutor() as threads:
        paths = [one.result() for one in [threads.submit(host) for _ in range(2)]]
    assert paths == [tmp_path / "two" / source.name] * 2
    load(paths[0])
    assert names(tmp_path / "two") == {source.name}


def test_what_a_killed_process_has_left_is_removed_later(tmp_path: Path) -> None:
    source, folder = write(tmp_path / "one", 4), tmp_path / "two"
    old, new = folder / ".arriving-old", folder / ".arriving-new"
    for path in (old, new):
        path.mkdir(parents=True)
    os.utime(old, (time.time() - 7200,) * 2)
    copy(source, folder)
    assert names(folder) == {source.name, new.name}


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    source = write(tmp_path / "one", 4)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="give another folder"):
        ArrivingCheckpoint(tmp_path / "file", held_of(source), 3)
