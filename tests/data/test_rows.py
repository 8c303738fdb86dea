from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.order import reader_of

ARRAYS = {
    "images": np.arange(24, dtype=np.uint8).reshape(6, 2, 2),
    "numbers": np.arange(6.0),
    "texts": np.array(["a", "bc", "d", "e", "f", "g"], object),
    "columns first": np.asfortranarray(np.arange(18, dtype=np.float32).reshape(6, 3)),
    "every second": np.arange(24).reshape(12, 2)[::2],
}


@pytest.mark.parametrize("array", ARRAYS.values(), ids=list(ARRAYS))
@given(rows=st.lists(st.integers(0, 5), max_size=9))
def test_rows_are_read_as_numpy_reads_them(array: np.ndarray[Any, Any], rows: list[int]) -> None:
    indices = np.array(rows, np.int64)
    read = reader_of(array)(indices)
    assert (read.dtype, read.shape, read.tolist()) == (
        array.dtype,
        (len(rows), *array.shape[1:]),
        array[indices].tolist(),
    )


def test_rows_in_their_order_are_no_copy() -> None:
    array = np.zeros((6, 2))
    assert np.shares_memory(reader_of(array)(slice(2, 4)), array)
    assert not np.shares_memory(reader_of(array)(np.array([2, 3])), array)
