"""The order in which a job visits its examples: a function of (seed, pass), never of global state.

Every worker computes the same order from the same numbers, and can compute any pass without the earlier
ones.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Indices = slice | npt.NDArray[np.int64]
Shuffle = bool | Literal["batch"]


@dataclass(frozen=True)
class Order:
    """Batches over `count` items.

    Attributes:
        count: number of items (examples of arrays, or batches of a `PyDataset`).
        batch_size: items in a batch; the last batch of a pass may be smaller.
        shuffle: False keeps the items' order, True permutes all of them in each pass, "batch" permutes
            them inside each batch.
        seed: numbers that determine the permutations.
    """

    count: int
    batch_size: int
    shuffle: Shuffle
    seed: tuple[int, ...]

    @property
    def batches(self) -> int:
        """Number of batches in a pass."""
        return -(-self.count // self.batch_size)

    def visit(self, number: int) -> Iterator[Indices]:
        """Yield the items of each batch of pass `number`; slices if nothing is shuffled."""
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([*self.seed, number])))
        everything = generator.permutation(self.count) if self.shuffle is True else None
        for start in range(0, self.count, self.batch_size):
            stop = min(start + self.batch_size, self.count)
            if everything is not None:
                yield everything[start:stop]
            elif self.shuffle:
                yield start + generator.permutation(stop - start)
            else:
                yield slice(start, stop)


def reader_of(array: Any) -> Callable[[Indices], Any]:
    """Return a function that reads the rows of `array` at valid indices; it may return a view for a slice."""
    plain = type(array) is np.ndarray and array.flags.c_contiguous and array.flags.aligned
    return partial(_rows_at, array) if plain else array.__getitem__


def _rows_at(array: np.ndarray[Any, Any], indices: Indices) -> Any:
    """Read rows; `take` copies whole rows at once, which indexing with brackets does not do.

    For arrays with a different memory layout, `take` would first copy all rows.
    """
    return array[indices] if isinstance(indices, slice) else array.take(indices, 0, mode="clip")
