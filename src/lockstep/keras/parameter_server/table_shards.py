"""Tables of embeddings on one parameter server: NumPy arrays in which an update changes some rows.

An update copies the rows, and the rows of their slots, into a *block*: variables of the size of the next
power of two, with an optimizer of their own. So few updates are compiled. The gradient of the padding is
zero, and its results are discarded. The blocks also get the common variables of the optimizer, with their
values from before the update. `lazy_hindrance` of `served_optimizers.py` refuses optimizers that need more
than that.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.keras.backends.contract import Backend
from lockstep.keras.backends.multi_update import Update
from lockstep.keras.parameter_server.served_optimizers import built_copy, transfers_of, unbuilt_copy
from lockstep.keras.parameter_server.table_rows import TableRows, put_rows, take_rows

Array = npt.NDArray[Any]


class TableShard:
    """Rows of an embedding's table, updated lazily: an update touches only the rows with a gradient.

    A copy of the optimizer has a variable for a block of rows, which is padded to one of a few sizes.

    Args:
        backend: makes updates.
        optimizer: the optimizer whose copies update the rows.
        make: returns a variable like the table, with the given rows.
        value: the initial rows.
        slots: the slots of the rows, by number.
    """

    def __init__(
        self,
        backend: Backend,
        optimizer: Any,
        make: Callable[[Array], Any],
        value: Array,
        slots: Mapping[int, Array],
    ) -> None:
        self._backend, self._make = backend, make
        # While Keras's loop runs on JAX, the program's optimizer has no values.
        self._optimizer = unbuilt_copy(optimizer)
        self._transfers = transfers_of(backend)
        self.value, self.slots = np.array(value), {nth: np.array(slot) for nth, slot in slots.items()}
        self._blocks: dict[int, _Block] = {}
        self._snapshots: weakref.WeakSet[TableSnapshot] = weakref.WeakSet()
        self._changed, self._reported = np.zeros(len(value), bool), np.zeros(len(value), bool)

    def update(self, numbers: Array, gradients: Array, common: Mapping[int, Any]) -> None:
        """Update rows.

        Args:
            numbers: the numbers of the rows, all different.
            gradients: the gradients of the rows.
            common: the optimizer's variables that do not belong to a weight, as they are before the update.
        """
        count = len(numbers)
        if not count:
            return
        self._note(numbers)
        size = max(_SMALLEST_BLOCK, 1 << (count - 1).bit_length())
        if size not in self._blocks:
            self._blocks[size] = self._block(size)
        block = self._blocks[size]
        kept = [self.value, *(self.slots[nth] for nth in block.slots)]
        self._transfers.assign(
            [*block.variables, *block.common.values()],
            [
                *(_padded(take_rows(array, numbers), size) for array in kept),
                *self._transfers.read([common[nth] for nth in block.common]),
            ],
        )
        block.update([_padded(gradients, size)])
        self._keep_for_snapshots(numbers)
        for array, new in zip(kept, self._transfers.read(block.variables), strict=True):
            put_rows(array, numbers, new[:count])

    def write(self, value: Array | None, slots: Mapping[int, Array]) -> None:
        """Replace all rows, and slots by their numbers."""
        if value is not None:
            self._keep_for_snapshots(np.arange(len(self.value)))
            self.value = np.array(value)
        self.slots |= {nth: np.array(slot) for nth, slot in slots.items()}

    def snapshot(self) -> "TableSnapshot":
        """Return the rows as they are now."""
        made = TableSnapshot(self)
        self._snapshots.add(made)
        return made

    def pop_changed(self, *, again: bool) -> Array:
        """Return the numbers of the rows that were updated since the last call.

        Args:
            again: whether to return the rows of the last call again.
        """
        if again:
            self._changed |= self._reported
        self._reported, self._changed = self._changed, self._reported
        self._changed[:] = False
        (numbers,) = np.nonzero(self._reported)
        return numbers

    @property
    def state(self) -> list[Array]:
        """All arrays that change."""
        return [self.value, *self.slots.values(), self._changed, self._reported]

    def restore(self, state: Sequence[Array]) -> None:
        """Copy the state of another table with the same rows."""
        value, *slots, self._changed, self._reported = (array.copy() for array in state)
        self.value, self.slots = value, dict(zip(self.slots, slots, strict=True))

    def _keep_for_snapshots(self, numbers: Array) -> None:
        """Keep rows that are about to change for snapshots."""
        for snapshot in self._snapshots:
            snapshot.keep(numbers, take_rows(self.value, numbers))

    def _note(self, numbers: Array) -> None:
        """Note that rows are about to be updated."""
        self._changed[numbers] = True

    def _block(self, size: int) -> "_Block":
        row_variable = self._make(np.zeros((size, *self.value.shape[1:]), self.value.dtype))
        optimizer, slots = built_copy(self._optimizer, [row_variable])
        pairs = list(zip(slots, optimizer.variables, strict=True))
        row_slots = {number: variable for (position, number), variable in pairs if position == 0}
        return _Block(
            tuple(row_slots),
            [row_variable, *row_slots.values()],
            {number: variable for (position, number), variable in pairs if position < 0},
            self._backend.updater(Update(optimizer, [row_variable])),
        )


class TableSnapshot:
    """The rows of a shard as they were at a moment. It keeps the rows that have changed since then.

    Args:
        table: the shard.
    """

    def __init__(self, table: TableShard) -> None:
        self._table = table
        self._kept: list[tuple[Array, Array]] = []

    def keep(self, numbers: Array, rows: Array) -> None:
        """Keep rows, which are about to change."""
        self._kept.append((numbers, rows))

    def rows(self, numbers: Array) -> Array:
        """Return rows by their numbers."""
        snapshot_rows = take_rows(self._table.value, numbers)
        for changed, rows in reversed(self._kept):
            _, positions, at = np.intersect1d(numbers, changed, return_indices=True)
            snapshot_rows[positions] = rows[at]
        return snapshot_rows


class LastingTableShard(TableShard):
    """The rows of a table that only servers have, in a call of `fit`.

    Args:
        backend: makes updates.
        optimizer: the optimizer whose copies update the rows.
        make: returns a variable like the table, with the given rows.
        rows: the rows of the server.
        initial: the initial values of the slots of one row, by number.
        begun: whether the optimizer has made updates.
    """

    def __init__(
        self,
        backend: Backend,
        optimizer: Any,
        make: Callable[[Array], Any],
        rows: TableRows,
        initial: Mapping[int, Array],
        begun: bool,
    ) -> None:
        super().__init__(backend, optimizer, make, rows.values[:0], {})
        self._rows = rows
        self.value, self.slots = rows.values, rows.slots_of(optimizer, initial, begun=begun)

    @property
    def state(self) -> list[Array]:
        """Empty, because the standby also has the rows."""
        return []

    def _note(self, numbers: Array) -> None:
        self._rows.touch(numbers)

    def digest(self) -> Array:
        """Return the digest of the rows and their slots."""
        return self._rows.digest()


_SMALLEST_BLOCK = 64
"""Rows. Smaller blocks would take as long."""


@dataclass(frozen=True)
class _Block:
    """Variables for some rows of a table.

    Attributes:
        slots: the numbers of the slots.
        variables: the rows, and the slots of the rows in this order.
        common: the optimizer's variables that do not belong to a weight, by their numbers.
        update: updates all of them from the gradient of the rows.
    """

    slots: tuple[int, ...]
    variables: Sequence[Any]
    common: Mapping[int, Any]
    update: Callable[[Sequence[Array | None]], None]


def _padded(rows: Array, size: int) -> Array:
    padded = np.zeros((size, *rows.shape[1:]), rows.dtype)
    padded[: len(rows)] = rows
    return padded
