"""Some rows of a batch, as a whole and in two parts, to try how a program combines its examples."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras

_ROWS = 16
"""The maximum number of rows to try."""

Nest = Any


@dataclass(frozen=True)
class TriedRows:
    """Some rows of a batch.

    Attributes:
        batch: these rows, in the form of a batch for the program's step.
        weight: the number of these rows divided by that of all rows to try.
        rows: their range among the rows to try.
    """

    batch: Nest
    weight: float
    rows: slice

    @property
    def data(self) -> tuple[Nest, Nest, Nest]:
        """The tensors (x, y, sample_weight)."""
        tensors = keras.tree.map_structure(
            lambda leaf: None if leaf is None else keras.ops.convert_to_tensor(leaf), self.batch
        )
        x, y, weight = keras.utils.unpack_x_y_sample_weight(tensors)
        return x, y, weight

    @property
    def count(self) -> int:
        """The number of the rows."""
        return int(self.rows.stop - self.rows.start)


class TriedBatch:
    """The rows of one batch to try.

    Args:
        read: reads the batch. It is called once, when rows are first needed.
    """

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read = read
        self._batch: Any = None

    @property
    def count(self) -> int:
        """The number of rows to try."""
        return min(_ROWS, self.examples)

    @property
    def was_read(self) -> bool:
        """Whether rows were needed so far."""
        return self._batch is not None

    @property
    def whole(self) -> TriedRows:
        """All rows to try."""
        return self._rows(0, self.count)

    @property
    def parts(self) -> list[TriedRows]:
        """Two parts of different sizes, which distinguish a sum from a mean multiplied by their number."""
        first = max(1, self.count // 3)
        return [self._rows(0, first), self._rows(first, self.count)]

    @property
    def halves(self) -> list[TriedRows]:
        """An even number of rows, and each half of them."""
        half = self.count // 2
        return [self._rows(0, 2 * half), self._rows(0, half), self._rows(half, 2 * half)]

    @property
    def examples(self) -> int:
        """The number of rows of the batch."""
        counts = [int(leaf.shape[0]) for leaf in keras.tree.flatten(self._data) if leaf is not None]
        return min(counts, default=0)

    @property
    def _data(self) -> Any:
        if self._batch is None:
            self._batch = self._read()
        return self._batch

    def _rows(self, start: int, stop: int) -> TriedRows:
        # The rows are spread over the batch, whose first rows may all have one label.
        step = self.examples // self.count
        part = slice(start * step, (stop - 1) * step + 1, step)
        batch = keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[part], self._data)
        return TriedRows(batch, (stop - start) / self.count, slice(start, stop))
