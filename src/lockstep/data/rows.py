"""Reading rows of arrays: pure copying, in the order in which they are asked for."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from lockstep.data.order import Indices


def reader_of(array: Any) -> Callable[[Indices], Any]:
    """Return what reads the rows of `array` at indices that it has; those of a slice may be a view."""
    plain = type(array) is np.ndarray and array.flags.c_contiguous and array.flags.aligned
    return partial(_taken, array) if plain else array.__getitem__


def _taken(array: np.ndarray[Any, Any], indices: Indices) -> Any:
    """Copy whole rows at once, which NumPy does not where it is given indices in brackets.

    Of other memory than this `take` would copy all rows first.
    """
    return array[indices] if isinstance(indices, slice) else array.take(indices, 0, mode="clip")
