"""The rows of an embedding table that one server has, and the rows of a lookup in a table.

An optimizer that trains the table has variables for each row, the slots. A digest follows the changes of rows
and slots.
"""

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.errors import DataError
from lockstep.parameter_server.row_digest import digest_of_rows
from lockstep.protocol.parameter_server import CopiedRows
from lockstep.topology import split_evenly

Array = npt.NDArray[Any]

VALUES = -1
"""The rows themselves, in place of the number of a slot."""

NO_ROWS = np.zeros(0, np.int64)
"""The numbers of no rows."""

_HASHED_AT_ONCE = 1 << 16
"""Number of rows whose digest is computed at a time."""


class TableRows:
    """The rows of a table that one server has, and their slots of the optimizer.

    Args:
        start: the number of the first row.
        values: the rows.

    Attributes:
        start: the number of the first row.
        values: the rows, which change in place.
    """

    def __init__(self, start: int, values: Array) -> None:
        self.start, self.values = start, values
        self._optimizer: weakref.ref[Any] | None = None
        self._slots: dict[int, Array] = {}
        self._slots_of_others = weakref.WeakKeyDictionary[Any, dict[int, Array]]()
        self._loaded = False
        self._all = range(len(values))
        self._sums = self._digest(self._all, {VALUES: values})
        self._changed = np.zeros(len(values), bool)

    def slots_of(self, optimizer: Any, initial: Mapping[int, Array], *, begun: bool) -> dict[int, Array]:
        """Return the slots of an optimizer by their numbers, which change in place.

        If the optimizer already has slots here, or if slots were loaded for it, these are its slots.
        Otherwise all rows begin with the same values.

        Args:
            optimizer: the optimizer of the model.
            initial: the initial slots of one row.
            begun: whether the optimizer has made updates, perhaps before it was saved. Only such an optimizer
                gets loaded slots.
        """
        self.digest()
        last = None if self._optimizer is None else self._optimizer()
        slots = self._slots_of_others.pop(optimizer, None)
        if self._loaded and slots is None:
            slots = self._slots if begun else None
        elif last is optimizer:
            slots = self._slots
        if last is not None and last is not optimizer:
            self._slots_of_others[last] = self._slots
        if slots is None or slots.keys() != initial.keys():
            slots = {nth: self._filled(row) for nth, row in initial.items()}
        if slots is not self._slots:
            self._sums += self._digest(self._all, slots) - self._digest(self._all, self._slots)
        self._slots, self._optimizer, self._loaded = slots, weakref.ref(optimizer), False
        return self._slots

    def copied(self, numbers: Array, number_of: Mapping[Any, int]) -> tuple[CopiedRows, list[Array]]:
        """Return rows with all their slots, to be passed to `paste` in another process."""
        kept = {-1: self._slots} | {
            number_of[optimizer]: slots for optimizer, slots in self._slots_of_others.items()
        }
        last = None if self._optimizer is None else self._optimizer()
        positions = numbers - self.start
        copied_slots = {
            (of, nth): slot[positions] for of, slots in kept.items() for nth, slot in slots.items()
        }
        answer = CopiedRows(tuple(copied_slots), -1 if last is None else number_of[last], self._loaded)
        return answer, [self.values[positions], *copied_slots.values()]

    def paste(
        self, numbers: Array, copied: CopiedRows, arrays: Sequence[Array], number_of: Mapping[Any, int]
    ) -> None:
        """Copy rows, with all their slots, from another process that has them."""
        optimizers = {number: optimizer for optimizer, number in number_of.items()}
        last = optimizers.get(copied.optimizer)
        self._optimizer, self._loaded = None if last is None else weakref.ref(last), copied.loaded
        self.write(VALUES, numbers, arrays[0])
        for (of, nth), rows in zip(copied.slots, arrays[1:], strict=True):
            if of != -1 and of not in optimizers:
                continue
            slots = self._slots if of == -1 else self._slots_of_others.setdefault(optimizers[of], {})
            # Zeros do not take memory before they change.
            is_zero = nth in slots and not rows.view(np.uint8).any()
            if of == -1 and not is_zero:
                self.write(nth, numbers, rows)
            elif not is_zero:
                if nth not in slots:
                    slots[nth] = self._filled(np.zeros_like(rows[:1]))
                slots[nth][numbers - self.start] = rows

    def note_load(self) -> None:
        """Note that rows were loaded, perhaps with slots, which belong to the next `fit`'s optimizer."""
        self._loaded = True

    def touch(self, positions: Array) -> None:
        """Note that rows are about to change.

        Args:
            positions: the positions of the rows, all different; the first row of the server has position 0.
        """
        first = positions[~self._changed[positions]]
        self._sums -= self._digest(first, self._arrays)
        self._changed[first] = True

    def read(self, slot: int, numbers: Array) -> Array:
        """Return rows, or their slots, by the numbers of the rows in the whole table."""
        return take_rows(self._arrays[slot], numbers - self.start)

    def write(self, slot: int, numbers: Array, rows: Array) -> None:
        """Replace rows, or their slots."""
        if slot not in self._slots and slot != VALUES:
            self.digest()
            self._slots[slot] = self._filled(np.zeros_like(rows[:1]))
            self._sums += self._digest(self._all, {slot: self._slots[slot]})
        positions = numbers - self.start
        self.touch(positions)
        self._arrays[slot][positions] = rows

    @property
    def slots(self) -> tuple[int, ...]:
        """The numbers of the slots."""
        return tuple(self._slots)

    def digest(self) -> Array:
        """Return the digest of the rows and their slots."""
        (changed,) = np.nonzero(self._changed)
        self._sums += self._digest(changed, self._arrays)
        self._changed[:] = False
        return self._sums.copy()

    def _digest(self, positions: Array | range, arrays: Mapping[int, Array]) -> Array:
        """Return the digest of rows of the arrays of slots."""
        total = np.zeros(2, np.uint64)
        for first in range(0, len(positions), _HASHED_AT_ONCE):
            block = np.asarray(positions[first : first + _HASHED_AT_ONCE])
            for slot, array in arrays.items():
                total += digest_of_rows(self.start + block, take_rows(array, block), slot - VALUES)
        return total

    @property
    def _arrays(self) -> dict[int, Array]:
        return {VALUES: self.values, **self._slots}

    def _filled(self, row: Array) -> Array:
        """Return an array with equal rows. Zeros take no memory before they change."""
        shape = (len(self.values), *row.shape[1:])
        return np.zeros(shape, row.dtype) if not row.any() else np.repeat(row, len(self.values), axis=0)


def take_rows(array: Array, numbers: Array) -> Array:
    """Return copies of rows of an array."""
    # This takes a third of the time of `array[numbers]`.
    rows: Array = array.take(numbers, axis=0)
    return rows


def put_rows(array: Array, numbers: Array, rows: Array) -> None:
    """Replace rows of a contiguous array."""
    assert array.flags.c_contiguous
    assert len(rows) == len(numbers)
    size = array.itemsize * math.prod(array.shape[1:])
    if size and len(numbers):
        # NumPy copies a row as one item in a third of the time of `array[numbers] = rows`.
        item = np.dtype((np.void, size))
        new = np.ascontiguousarray(rows, array.dtype)
        array.reshape(-1).view(item).put(numbers, new.reshape(-1).view(item))


def ranges_of(rows: int, servers: int) -> list[tuple[int, int]]:
    """Return the range of rows of each server that has some."""
    ranges, start = [], 0
    for size in split_evenly(rows, min(rows, servers)):
        ranges.append((start, start + size))
        start += size
    return ranges


def summed_by_row(gradients: Array, inverse: Array, count: int) -> Array:
    """Return the sum of the gradients of each row.

    Args:
        gradients: the gradients of lookups.
        inverse: for each lookup, the index of its row.
        count: number of rows, all of which are looked up.
    """
    if not len(inverse):
        return gradients[:0]
    order = np.argsort(inverse, kind="stable")
    starts = np.searchsorted(inverse[order], np.arange(count))
    sums: Array = np.add.reduceat(gradients[order], starts, axis=0)
    return sums


def positions_of(name: str, rows: int, ids: Array) -> Array:
    """Return ids as positions of rows. Negative ids count from the end, as in Keras.

    Raises:
        DataError: an id is outside of the table.
    """
    ids = ids if ids.dtype in (np.int32, np.int64) else ids.astype(np.int32)
    ids = ids.astype(np.int64, copy=False)
    if ids.size and not (-rows <= ids.min() and ids.max() < rows):
        wrong = int(ids.min()) if ids.min() < -rows else int(ids.max())
        raise DataError(
            f"layer {name!r} looks up row {wrong}, but its table has {rows} rows: check the ids of the "
            "data, or give the layer a larger input_dim"
        )
    return np.where(ids < 0, ids + rows, ids)
