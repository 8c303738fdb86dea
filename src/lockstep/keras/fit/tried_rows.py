"""Some rows of a batch, as a whole and in two parts, to try how a program combines its examples."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, zip_longest
from typing import Any

import keras
import numpy as np

from lockstep.keras.nests import Nest, has_weights

_OF_PROBABILITIES = 1e-3
"""By how much the probabilities of classes may differ from 1 in sum."""
_ROWS = 16
"""The maximum number of rows to try."""


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

    def cut(self, nest: Nest) -> Nest:
        """Return these rows of a nest of values that has a row for each example to try."""
        return keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[self.rows], nest)

    @property
    def count(self) -> int:
        """The number of the rows."""
        return int(self.rows.stop - self.rows.start)


class TriedBatch:
    """The rows of one batch to try.

    Functions that compare examples often compare only those with different labels, or those of one class. So
    if all rows have the same label, some get another label. A batch of one row has this row twice.

    Args:
        read: reads the batch. It is called once, when rows are first needed.

    Attributes:
        was_read: whether rows have been needed so far.
    """

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read = read
        self.was_read = False

    @property
    def count(self) -> int:
        """The number of rows to try."""
        return _examples(self._rows)

    @property
    def whole(self) -> TriedRows:
        """All rows to try."""
        return self._part(0, self.count)

    @property
    def parts(self) -> list[TriedRows]:
        """Two parts of different sizes, which distinguish a sum from a mean multiplied by their number."""
        first = max(1, self.count // 3)
        return [self._part(0, first), self._part(first, self.count)]

    @property
    def halves(self) -> list[TriedRows]:
        """An even number of rows, and each half of them."""
        half = self.count // 2
        return [self._part(0, 2 * half), self._part(0, half), self._part(half, 2 * half)]

    @property
    def examples(self) -> int:
        """The number of rows of the batch."""
        return _examples(self._batch)

    @property
    def weighs(self) -> bool:
        """Whether the batch has sample weights."""
        return has_weights(self._batch)

    @cached_property
    def _batch(self) -> Nest:
        self.was_read = True
        return self._read()

    @cached_property
    def _rows(self) -> Nest:
        """The rows to try, in the form of the batch."""
        if self.examples == 1:
            rows = keras.tree.map_structure(_twice, self._batch)
        else:
            # They are spread over the batch, whose first rows may all have one label.
            count = min(_ROWS, self.examples)
            step = self.examples // max(1, count)
            rows = _cut(self._batch, slice(0, count * step, max(1, step)))
        if not _has_labels(rows):
            return rows
        parts = list(rows)
        parts[1] = keras.tree.map_structure(_varied, parts[1])
        return type(rows)(parts) if type(rows) in (tuple, list) else type(rows)(*parts)

    def padded(self) -> "TriedBatch | None":
        """Return the same rows, some of them with padding: elements that are 0. None if nothing changes.

        The two `parts` have different amounts of padding, and so do the two `halves`.
        """
        padded = keras.tree.map_structure(_padded, self._rows)
        pairs = zip(keras.tree.flatten(self._rows), keras.tree.flatten(padded), strict=True)
        return None if all(before is after for before, after in pairs) else TriedBatch(lambda: padded)

    def with_extremes(self) -> "TriedBatch | None":
        """Return the rows, some replaced by examples with extreme labels. None if nothing changes.

        The program may ignore an extreme label, such as -1 or 255, that none of the rows has. Whole examples
        are replaced, because elements of labels may have different ranges, or belong to the inputs.
        """
        batch, rows = self._batch, self._rows
        leaves = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]
        if not _has_labels(batch) or not all(isinstance(leaf, np.ndarray) for leaf in leaves):
            return None
        labels = zip(keras.tree.flatten(batch[1]), keras.tree.flatten(rows[1]), strict=True)
        extremes = zip_longest(*(_extremes(leaf, tried) for leaf, tried in labels if _may_be_padded(leaf)))
        numbers = [number for number in dict.fromkeys(chain.from_iterable(extremes)) if number is not None]
        # They are in one of the `halves`.
        numbers = numbers[: self.count // 2]
        if not numbers:
            return None
        changed = keras.tree.map_structure(
            lambda leaf, tried: (
                None if leaf is None else np.concatenate([leaf[numbers], tried[len(numbers) :]])
            ),
            batch,
            rows,
        )
        return TriedBatch(lambda: changed)

    def _part(self, start: int, stop: int) -> TriedRows:
        rows = slice(start, stop)
        return TriedRows(_cut(self._rows, rows), (stop - start) / self.count, rows)


def _examples(nest: Nest) -> int:
    return min((int(leaf.shape[0]) for leaf in keras.tree.flatten(nest) if leaf is not None), default=0)


def _cut(nest: Nest, rows: slice) -> Nest:
    return keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[rows], nest)


def _twice(leaf: Any) -> Any:
    return np.repeat(leaf, 2, axis=0) if isinstance(leaf, np.ndarray) else leaf


def _has_labels(batch: Nest) -> bool:
    return isinstance(batch, tuple | list) and len(batch) > 1


def _may_be_padded(leaf: Any) -> bool:
    """Whether a leaf is an array of numbers, but not of class probabilities, such as one-hot labels."""
    if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "biuf" or not leaf.ndim:
        return False
    of_classes = leaf.ndim == 2 and leaf.shape[1] > 1 and np.all(leaf >= 0)
    return not (of_classes and np.allclose(leaf.sum(1), 1, 0, _OF_PROBABILITIES))


def _padded(leaf: Any) -> Any:
    """Return an array with zeros in its first rows: at the end of each of them, or in every second one."""
    if not _may_be_padded(leaf):
        return leaf
    padded, first = leaf.copy(), max(1, len(leaf) // 3)
    if leaf.ndim > 1 and leaf.shape[1] > 1:
        padded[:first, (leaf.shape[1] + 1) // 2 :] = 0
    else:
        padded[:first:2] = 0
    return leaf if np.array_equal(leaf, padded) else padded


def _extremes(labels: Any, tried: Any) -> list[int]:
    """Return the examples with the smallest and the largest label, if the tried ones do not have these.

    The elements along the last axis may mean different things, so the extremes of each also count if they are
    few.
    """
    of_all, of_tried = (
        np.ma.masked_invalid(array.reshape(len(array), -1, array.shape[-1] if array.ndim > 1 else 1))
        for array in (labels, tried)
    )
    numbers: list[int] = []
    columns = of_all.shape[-1]
    for column in (slice(None), *range(columns if columns <= _ROWS else 0)):
        elements = of_all[..., column]
        for value in (elements.min(), elements.max()):
            if value is not np.ma.masked and not (of_tried[..., column] == value).any():
                numbers.append(int(np.argwhere(elements == value)[0, 0]))
    return numbers


def _varied(leaf: Any) -> Any:
    """Return labels, nearly half of them of another class, if all rows are equal.

    That is the next class for labels with an element for each class. Otherwise, it is 0, or 1 in place of 0.
    """
    if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "biuf" or not (leaf == leaf[:1]).all():
        return leaf
    row = leaf[0]
    by_class = row.ndim > 0 and (row != row[..., :1]).any()
    varied, count = leaf.copy(), len(leaf)
    # No two parts that trials compare have the same share of each class.
    varied[count // 2 : max(2, count - 1)] = np.roll(row, 1, axis=-1) if by_class else row == 0
    return varied
