"""Shards of `tf.data`: the auto-shard policies FILE and DATA."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

tf = pytest.importorskip("tensorflow")

from tensorflow.python.distribute import input_lib  # noqa: E402

from lockstep import show_input  # noqa: E402
from lockstep.data.input_context import InputContext  # noqa: E402
from lockstep.keras.input.shards import Shards, shards_of  # noqa: E402

Make = Callable[[list[str]], Any]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Four files of 5, 7, 3 and 9 lines."""
    paths = [tmp_path_factory.mktemp("files") / str(number) for number in range(4)]
    for number, (path, lines) in enumerate(zip(paths, (5, 7, 3, 9), strict=True)):
        path.write_text("".join(f"{number}{line}\n" for line in range(lines)))
    return list(map(str, paths))


def lines(files: list[str]) -> Any:
    names = tf.data.Dataset.from_tensor_slices(files).shuffle(4)
    return names.interleave(tf.data.TextLineDataset, cycle_length=2).map(tf.strings.to_number)


def with_policy(dataset: Any, policy: str) -> Any:
    options = tf.data.Options()
    chosen = getattr(tf.data.experimental.AutoShardPolicy, policy)
    options.experimental_distribute.auto_shard_policy = chosen
    return dataset.with_options(options)


def of_tf_distribute(dataset: Any, replica: int, replicas: int) -> Any:
    """Return what one of several workers with a replica each reads in `tf.distribute`."""
    return input_lib.DistributedDataset(
        input_lib.InputWorkers([("/CPU:0", ("/CPU:0",))]),
        tf.distribute.OneDeviceStrategy("/CPU:0"),
        dataset,
        num_replicas_in_sync=replicas,
        input_context=tf.distribute.InputContext(replicas, replica, replicas),
    )._cloned_datasets[0]


def passes(dataset: Any) -> list[Any]:
    return [[batch.tolist() for batch in dataset.as_numpy_iterator()] for _ in range(2)]


@pytest.mark.slow("small", "shuffled batches", "unknown size")
@pytest.mark.ci("cached", "random", "interleaved")
@pytest.mark.parametrize(
    ("policy", "make"),
    [
        ("FILE", lambda files: lines(files).shuffle(5).batch(6)),
        ("FILE", lambda files: lines(files).batch(2)),
        ("FILE", lambda files: lines(files).batch(5).shuffle(9).prefetch(2)),
        ("FILE", lambda files: lines(files).batch(6).filter(lambda rows: True)),
        ("FILE", lambda files: tf.data.TextLineDataset(files).batch(7, drop_remainder=True)),
        ("DATA", lambda files: lines(files).shuffle(5).cache().shuffle(9).batch(6).repeat(2)),
        ("DATA", lambda files: tf.data.Dataset.range(23).shuffle(50, seed=3).batch(6, drop_remainder=True)),
        ("DATA", lambda files: tf.data.Dataset.range(22).batch(5).shuffle(9)),
        ("DATA", lambda files: tf.data.Dataset.range(4).map(lambda row: tf.random.uniform([])).batch(2)),
    ],
    ids=[
        "interleaved",
        "small",
        "shuffled batches",
        "unknown size",
        "reader",
        "cached",
        "drop_remainder",
        "uneven",
        "random",
    ],
)
def test_shards_are_those_of_tf_distribute(policy: str, make: Make, files: list[str]) -> None:
    for replicas in (2, 3, 4):
        tf.random.set_seed(1)
        dataset = with_policy(make(files), policy)
        shards = shards_of(dataset, replicas)
        assert isinstance(shards, Shards)
        # A program may look at its dataset, and each worker makes shards at times of its own.
        next(iter(dataset))
        for replica in reversed(range(replicas)):
            tf.random.set_seed(1)
            expected = passes(of_tf_distribute(with_policy(make(files), policy), replica, replicas))
            for _ in range(2):
                assert passes(shards.shard(InputContext(replicas, replica, replicas))) == expected


@pytest.mark.parametrize(
    ("policy", "make", "reason"),
    [
        ("FILE", lambda files: tf.data.TextLineDataset(files[:2]), "the dataset has 2 for 3 replicas"),
        (
            "FILE",
            lambda files: tf.data.Dataset.zip(*map(tf.data.TextLineDataset, (files, files[0]))),
            "the dataset has 1 for 3 replicas",
        ),
        ("FILE", lambda files: tf.data.Dataset.range(9), "finds no reader of files"),
        ("DATA", lambda files: lines(files).cache(f"{Path(files[0]).parent}/cache"), "files of its cache"),
    ],
    ids=["few", "few of one reader", "no reader", "cache on disk"],
)
def test_a_dataset_without_shards_has_a_reason(
    policy: str, make: Make, reason: str, files: list[str]
) -> None:
    found = shards_of(with_policy(make(files).batch(2), policy), 3)
    assert isinstance(found, str)
    assert f"AutoShardPolicy.{policy}" in found
    assert reason in found


def test_a_shard_draws_in_order_what_its_dataset_draws_in_parallel() -> None:
    found = []
    for calls in (8, None):
        tf.random.set_seed(3)
        rows = tf.data.Dataset.range(400).map(lambda _: tf.random.normal([]), num_parallel_calls=calls)
        shards = shards_of(with_policy(rows.shuffle(9).batch(8), "DATA"), 2)
        assert isinstance(shards, Shards)
        found.append([passes(shards.shard(InputContext(2, replica, 2))) for replica in range(2)])
    assert found[0] == found[1]


def test_a_dataset_without_these_policies_has_no_shards(files: list[str]) -> None:
    for policy in ("AUTO", "OFF"):
        assert shards_of(with_policy(lines(files).batch(2), policy), 3) is None
    assert shards_of([], 3) is None


def test_the_table_shows_shards(files: list[str]) -> None:
    dataset = with_policy(tf.data.TextLineDataset(files).batch(8), "FILE")
    table = show_input(dataset, steps=2, replicas=3)
    assert str(table).splitlines() == [
        "each worker reads the files of its replicas: AutoShardPolicy.FILE",
        "step  replica  worker  examples",
        "   1        0       0  0-2 of batch 0",
        "   1        1       0  0-2 of batch 0",
        "   1        2       0  0, 1 of batch 0",
        "   2        0       0  0-2 of batch 1",
        "   2        1       0  0, 1 of batch 1",
        "   2        2       0  0 of batch 1",
    ]
