from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.order import Order, Shuffle, reader_of


def visited(order: Order, number: int) -> list[list[int]]:
    everything = np.arange(order.count)
    return [everything[indices].tolist() for indices in order.visit(number)]


@given(st.integers(0, 200), st.integers(1, 50), st.sampled_from([False, True, "batch"]), st.integers(0, 3))
def test_a_pass_visits_every_item_once_in_batches(
    count: int, size: int, shuffle: Shuffle, number: int
) -> None:
    batches = visited(Order(count, size, shuffle, (1, 2)), number)
    assert sorted(item for batch in batches for item in batch) == list(range(count))
    assert [len(batch) for batch in batches] == [size] * (count // size) + [count % size] * (count % size > 0)
    assert len(batches) == Order(count, size, shuffle, (1, 2)).batches


def test_without_shuffling_batches_are_slices_in_order() -> None:
    order = Order(5, 2, False, (0,))
    assert list(order.visit(3)) == [slice(0, 2), slice(2, 4), slice(4, 5)]


def test_batch_shuffling_permutes_items_inside_batches() -> None:
    batches = visited(Order(100, 10, "batch", (0,)), 0)
    assert [sorted(batch) for batch in batches] == [list(range(i, i + 10)) for i in range(0, 100, 10)]
    assert batches != [sorted(batch) for batch in batches]


@pytest.mark.parametrize("shuffle", [True, "batch"])
def test_the_order_depends_only_on_the_seed_and_the_pass(shuffle: Shuffle) -> None:
    np.random.seed(1)
    first = visited(Order(50, 7, shuffle, (1, 0, 1)), 0)
    np.random.seed(2)
    assert visited(Order(50, 7, shuffle, (1, 0, 1)), 0) == first
    assert visited(Order(50, 7, shuffle, (1, 0, 1)), 1) != first
    assert visited(Order(50, 7, shuffle, (1, 0, 2)), 0) != first


ARRAYS = {
    "images": np.arange(24, dtype=np.uint8).reshape(6, 2, 2),
    "numbers": np.arange(6.0),
    "texts": np.array(["a", "bc", "d", "e", "f", "g"], object),
    "columns first": np.asfortranarray(np.arange(18, dtype=np.float32).reshape(6, 3)),
    "every second": np.arange(24).reshape(12, 2)[::2],
}


@pytest.mark.parametrize("array", ARRAYS.values(), ids=list(ARRAYS))
@given(rows=st.lists(st.integers(0, 5), max_size=9))
def test_readers_return_the_rows_that_numpy_indexing_returns(
    array: np.ndarray[Any, Any], rows: list[int]
) -> None:
    indices = np.array(rows, np.int64)
    read = reader_of(array)(indices)
    assert (read.dtype, read.shape, read.tolist()) == (
        array.dtype,
        (len(rows), *array.shape[1:]),
        array[indices].tolist(),
    )


def test_readers_of_slices_return_views() -> None:
    array = np.zeros((6, 2))
    assert np.shares_memory(reader_of(array)(slice(2, 4)), array)
    assert not np.shares_memory(reader_of(array)(np.array([2, 3])), array)
