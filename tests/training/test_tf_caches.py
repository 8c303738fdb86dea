"""Caches of `tf.data` in files: each has one process that fills it, and is complete after an epoch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")

import tensorflow as tf

from lockstep.keras.input.fit_inputs import global_input
from lockstep.keras.input.readings import ReadingWorker
from lockstep.worker import job, tf_caches
from lockstep.worker.patch_registry import PATCHES
from lockstep.worker.tf_caches import CacheOwner, caches_of_replica, divide_caches

CHIEF, OTHER = CacheOwner(0, True, True), CacheOwner(1, False, False)
OPTIONS: dict[str, Any] = {"batch_size": None, "steps": None, "shuffle": False, "seed": None}


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    had = PATCHES.has(tf_caches.__name__)
    monkeypatch.setattr(tf_caches, "_caches", tf_caches._Caches())
    yield
    if not had:
        PATCHES.give_back(tf_caches.__name__)


def numbers(dataset: Any) -> list[int]:
    return [int(number) for number in dataset]


def files(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def filled(path: Path) -> list[str]:
    return [f"{path.name}.data-00000-of-00001", f"{path.name}.index"]


def test_workers_fill_caches_of_one_name_at_the_same_time(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    removals = []
    read = []
    for owner in (CHIEF, OTHER):
        removals.append(divide_caches(owner))
        begun = iter(tf.data.Dataset.range(4).cache(str(path)))
        # Neither has filled its cache.
        read.append([int(next(begun)), *map(int, begun)])
        if owner is CHIEF:
            for file in tmp_path.iterdir():
                file.rename(file.with_name(f"set-aside-{file.name}"))
            (tmp_path / "cache_0.lockfile").touch()
    assert read == [[0, 1, 2, 3]] * 2
    assert [name for name in files(tmp_path) if "worker-1" in name] == filled(tmp_path / "cache.worker-1")
    removals[1]()
    assert not [name for name in files(tmp_path) if "worker-1" in name]


def test_a_complete_cache_serves_all_workers(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    divide_caches(CHIEF)
    assert numbers(tf.data.Dataset.range(4).cache(str(path))) == [0, 1, 2, 3]
    divide_caches(OTHER)
    # Its elements are those in the file, as in plain TensorFlow.
    assert numbers(tf.data.Dataset.range(9).cache(path)) == [0, 1, 2, 3]
    assert files(tmp_path) == filled(path)


def test_what_an_earlier_run_has_left_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    for count in (4, 5):
        tf_caches._caches = tf_caches._Caches()
        divide_caches(OTHER)
        dataset = tf.data.Dataset.range(count).cache(str(path))
        assert numbers(dataset) == list(range(count))
        # In the same run, another dataset reads it.
        assert numbers(tf.data.Dataset.range(9).cache(str(path))) == list(range(count))


def test_pipelines_of_replicas_have_their_own_caches(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    remove = divide_caches(CHIEF)
    pipelines = []
    for replica in range(2):
        with caches_of_replica(replica):
            pipelines.append(tf.data.Dataset.range(6).shard(2, replica).cache(str(path)))
    for _ in range(2):
        assert [numbers(pipeline) for pipeline in pipelines] == [[0, 2, 4], [1, 3, 5]]
    remove()
    assert files(tmp_path) == []


def test_a_cache_in_memory_and_a_program_without_a_job_stay_as_they_are(tmp_path: Path) -> None:
    divide_caches(OTHER)
    assert numbers(tf.data.Dataset.range(4).cache()) == [0, 1, 2, 3]
    tf_caches._caches.owner = None
    assert numbers(tf.data.Dataset.range(4).cache(str(tmp_path / "cache"))) == [0, 1, 2, 3]
    assert files(tmp_path) == filled(tmp_path / "cache")


@pytest.mark.parametrize("batches_first", [True, False])
def test_a_cache_is_complete_when_the_last_batch_is_read(tmp_path: Path, batches_first: bool) -> None:
    path = tmp_path / "cache"
    dataset = tf.data.Dataset.range(12).map(lambda number: number + 1)
    dataset = dataset.batch(4).cache(str(path)) if batches_first else dataset.cache(str(path)).batch(4)
    source = global_input(dataset, **OPTIONS, unsplit=False, reader=ReadingWorker(job.current(), 0))
    assert source.num_batches == 3
    batches = source.batches()
    for _ in range(3):
        next(batches)
    assert files(tmp_path) == filled(path)
