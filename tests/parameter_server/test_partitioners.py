"""The division of variables: as TensorFlow's partitioners compute it, and every row on one server."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lockstep.errors import InputError
from lockstep.parameter_server.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
    place_variables,
)

DTYPES = {1: "int8", 2: "float16", 4: "float32", 8: "float64"}
Variable = tuple[tuple[int, ...], int]
TheirShards = Callable[[Partitioner, Variable], int]

counts = st.integers(1, 12)
# Small enough that the bytes of a shard are often exactly the limit.
limits = st.integers(1, 300)
partitioners: st.SearchStrategy[Partitioner] = st.one_of(
    st.builds(FixedShardsPartitioner, counts),
    st.builds(MinSizePartitioner, limits, counts),
    st.builds(MaxSizePartitioner, limits, st.none() | counts),
)
item_sizes = st.sampled_from(sorted(DTYPES))
filled = st.tuples(st.lists(st.integers(1, 20), min_size=1, max_size=3).map(tuple), item_sizes)
variables = st.tuples(st.lists(st.integers(0, 20), max_size=3).map(tuple), item_sizes)


@pytest.fixture(scope="module")
def their_shards() -> TheirShards:
    """Return the number of shards along the first axis that TensorFlow's partitioner of that name says."""
    tf = pytest.importorskip("tensorflow")
    from tensorflow.python.distribute import sharded_variable

    def shards(ours: Partitioner, variable: Variable) -> int:
        theirs = getattr(sharded_variable, type(ours).__name__)(**vars(ours))
        shape, item_bytes = variable
        first, *others = theirs(tf.TensorShape(shape), tf.as_dtype(DTYPES[item_bytes]))
        assert set(others) <= {1}
        return int(first)

    return shards


@pytest.mark.ci
@given(partitioners, filled)
@example(FixedShardsPartitioner(3), ((2, 5), 4))
@example(MinSizePartitioner(), ((1024, 1024), 4))
@example(MinSizePartitioner(max_shards=100), ((1024, 1024), 4))
@example(MaxSizePartitioner(256 << 10), ((1024, 1024), 4))
@example(MaxSizePartitioner(1), ((7, 3), 4))
def test_partitioners_make_as_many_shards_as_those_of_tensorflow(
    their_shards: TheirShards, partitioner: Partitioner, variable: Variable
) -> None:
    assert partitioner.shards(*variable) == their_shards(partitioner, variable)


def test_defaults_are_those_of_tensorflow(their_shards: TheirShards) -> None:
    from tensorflow.python.distribute import sharded_variable

    theirs = sharded_variable.MinSizePartitioner()
    assert theirs._min_shard_bytes == MinSizePartitioner().min_shard_bytes
    assert theirs._max_shards == MinSizePartitioner().max_shards
    assert sharded_variable.MaxSizePartitioner(1)._max_shards is MaxSizePartitioner(1).max_shards


@given(limits, filled)
def test_shards_are_as_few_as_the_limit_of_their_size_allows(limit: int, variable: Variable) -> None:
    shape, item_bytes = variable
    row = int(np.prod(shape[1:], dtype=int)) * item_bytes
    count = MaxSizePartitioner(limit).shards(shape, item_bytes)
    assert -(-shape[0] // count) * row <= max(limit, row)
    if count > 1:
        assert -(-shape[0] // (count - 1)) * row > limit


@given(partitioners, st.lists(st.integers(0, 3), max_size=3), item_sizes)
def test_scalars_and_variables_without_elements_are_whole_or_divided_by_row(
    partitioner: Partitioner, shape: list[int], item_bytes: int
) -> None:
    count = partitioner.shards(shape, item_bytes)
    assert 1 <= count <= max([1, *shape[:1]])
    if 0 in shape and not isinstance(partitioner, FixedShardsPartitioner):
        assert count == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixedShardsPartitioner(0), "num_shards is 0; expected 1 or more"),
        (lambda: FixedShardsPartitioner(-2), "num_shards is -2; expected 1 or more"),
        (lambda: MinSizePartitioner(0), "min_shard_bytes is 0; expected 1 or more"),
        (lambda: MinSizePartitioner(max_shards=0), "max_shards is 0; expected 1 or more"),
        (lambda: MaxSizePartitioner(-1), "max_shard_bytes is -1; expected 1 or more"),
        (lambda: MaxSizePartitioner(1, 0), "max_shards is 0; expected 1 or more"),
    ],
)
def test_arguments_below_one_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError) as refused:
        make()
    assert str(refused.value) == message


@given(st.lists(variables, max_size=8), st.integers(1, 5), st.none() | partitioners)
def test_shards_cover_every_row_once_in_order_on_servers_in_turn(
    placed: list[Variable], servers: int, partitioner: Partitioner | None
) -> None:
    shards = place_variables(placed, servers, partitioner)
    assert [shard.server for shard in shards] == [index % servers for index in range(len(shards))]
    assert [shard.variable for shard in shards] == sorted(shard.variable for shard in shards)
    for index, (shape, item_bytes) in enumerate(placed):
        own = [shard for shard in shards if shard.variable == index]
        assert len(own) == (1 if partitioner is None else partitioner.shards(shape, item_bytes))
        assert [shard.whole for shard in own] == [len(own) == 1] * len(own)
        rows = [row for shard in own for row in range(shard.start, shard.stop)]
        assert rows == list(range(shape[0] if shape else 0))
        sizes = [shard.stop - shard.start for shard in own]
        assert sizes == sorted(sizes, reverse=True)
        assert max(sizes) - min(sizes) <= 1


@given(st.lists(variables, max_size=8), st.integers(1, 5), st.none() | partitioners)
def test_the_parts_of_an_array_are_the_array(
    placed: list[Variable], servers: int, partitioner: Partitioner | None
) -> None:
    shards = place_variables(placed, servers, partitioner)
    for index, (shape, item_bytes) in enumerate(placed):
        array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(DTYPES[item_bytes])
        parts = [shard.part_of(array) for shard in shards if shard.variable == index]
        together = np.concatenate(parts) if len(parts) > 1 else parts[0]
        assert together.shape == shape
        assert together.dtype == array.dtype
        assert np.array_equal(together, array)


def test_the_larger_shards_come_first_and_turns_go_on_with_the_next_variable() -> None:
    shards = place_variables([((10, 2), 4), ((), 4), ((5,), 4)], 3, FixedShardsPartitioner(4))
    assert [(shard.variable, shard.start, shard.stop, shard.whole, shard.server) for shard in shards] == [
        (0, 0, 3, False, 0),
        (0, 3, 6, False, 1),
        (0, 6, 8, False, 2),
        (0, 8, 10, False, 0),
        (1, 0, 0, True, 1),
        (2, 0, 2, False, 2),
        (2, 2, 3, False, 0),
        (2, 3, 4, False, 1),
        (2, 4, 5, False, 2),
    ]
