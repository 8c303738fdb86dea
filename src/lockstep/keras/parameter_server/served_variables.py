"""The variables of a program on one parameter server, and the part of its optimizers that updates them.

**Numbers.** Three kinds of numbers occur here:

* Variables that a program trains are numbered over all its optimizers (`Shard.variable`). A call of `fit` has
  one optimizer. Functions of a `ClusterCoordinator` may have several, which are added one after another.
* The shards of a server have positions, in the order in which they were added. Messages contain positions.
* A variable of an optimizer is a `Slot`: the variable (or shard) that it belongs to, and its number among
  those of the same variable. Adam's momentum of variable 3 is (3, 0), its velocity is (3, 1). The optimizer's
  variables that belong to no weight, such as the iterations, have -1 minus the number of the optimizer in
  place of the variable.

**Optimizers.** A server updates its shards by a copy of the program's optimizer, built for these shards. No
list of optimizers says which of their variables belong to which weight. `built_copy` observes it: while Keras
builds the copy, it calls `add_variable_from_reference` with the weight. Variables that are created in any
other way belong to no weight. If there are more of these for more weights, the optimizer is refused.

**Variables and tables.** `ServedVariables` has two kinds of shards. Most are variables of Keras, which one
compiled update changes together. A table of an embedding is a `TableShard`: arrays of NumPy of which an
update changes some rows. It copies the rows, and the rows of their slots, into a *block*: variables of the
size of the next power of two, with an optimizer of their own. So there are few compiled updates. The gradient
of the padding is zero, and its results are thrown away.

The blocks also get the common variables of the optimizer, with their values from before the update. That is
why tables are updated before the other shards in `ServedVariables.update`, whose update advances the
iterations. `lazy_hindrance` refuses optimizers that would need more than that.

**Copies.** In `fit`, a server may update the program's own variable, because the value is replaced at the end
of the call anyway. In scheduled functions, the script of the server reads its variables between calls, and in
a replay in one process, the chief's model has the same variables. There, all shards are copies (`copies`).
"""

import math
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from lockstep.errors import ModelError
from lockstep.keras.backends.common import refuse_other_weights
from lockstep.keras.backends.contract import Backend, TrainingState
from lockstep.keras.backends.eager_contract import EagerBackend
from lockstep.keras.backends.multi_update import Update
from lockstep.keras.parameter_server.server_tables import server_table
from lockstep.keras.parameter_server.table_rows import NO_ROWS, TableRows
from lockstep.keras.parameter_server.transfers import Transfers
from lockstep.keras.private.common import (
    RATE,
    SET_BY_BUILD,
    names_without_decay,
    rate_object,
    trained_by,
    variables_without_decay,
)
from lockstep.parameter_server.partitioners import Partitioner, Shard, place_variables
from lockstep.worker.patch_registry import replaced

Array = npt.NDArray[Any]
Slot = tuple[int, int]
"""A variable of an optimizer: the position of the variable that it belongs to, or -1 minus the number of the
optimizer if it belongs to none, and its number among those of the same position."""


_BY_ELEMENT = ("SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Nadam", "Ftrl", "Lion")
"""Keras's optimizers that update each element of a variable on its own: they can update shards."""


def transfers_of(backend: Backend | EagerBackend) -> Transfers:
    """Return the `Transfers` of a backend."""
    if keras.backend.backend() != "tensorflow":
        return Transfers(backend)
    from lockstep.keras.parameter_server.tf_functions import VariableTransfers

    return VariableTransfers(backend)


def place_weights(
    updates: Sequence[Update], servers: int, partitioner: Partitioner | None = None
) -> tuple[Shard, ...]:
    """Place the variables that optimizers update on servers. A further optimizer does not move others."""
    variables = [variable for update in updates for variable in update.variables]
    tables = {
        i: table for i, variable in enumerate(variables) if (table := server_table(variable)) is not None
    }
    ranges = {i: table.ranges for i, table in tables.items()}
    return place_variables(shapes_of(variables), servers, partitioner, ranges)


def slots_of_all(updates: Sequence[Update]) -> list[list[Slot]]:
    """Return the slots of each optimizer, in the order of its variables."""
    slots_by_optimizer, first = [], 0
    for index, update in enumerate(updates):
        slots = slots_of(update.optimizer, update.variables)
        slots_by_optimizer.append([(first + k if k >= 0 else -1 - index, number) for k, number in slots])
        first += len(update.variables)
    return slots_by_optimizer


@dataclass(frozen=True)
class _ServedOptimizer:
    """The part of one optimizer that a server has.

    Attributes:
        positions: the positions of its shards that are not tables, among the shards of the server.
        variables: these shards.
        optimizer: a copy of the optimizer, which updates them.
        slots: the slots of the copy.
        update: updates the shards from their gradients.
        tables: the shards of which rows are updated, by their positions.
    """

    positions: tuple[int, ...]
    variables: Sequence[Any]
    optimizer: Any
    slots: tuple[Slot, ...]
    update: Callable[[Sequence[Array | None]], None]
    tables: Mapping[int, "TableShard"]

    def common(self) -> dict[int, Any]:
        """Return the variables of the optimizer that belong to no shard, by their numbers."""
        pairs = zip(self.slots, self.optimizer.variables, strict=True)
        return {number: variable for (position, number), variable in pairs if position < 0}


class TableShard:
    """Rows of an embedding's table, updated lazily: an update touches the rows that have a gradient.

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
        self._optimizer = _unbuilt_copy(optimizer)
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
            common: the optimizer's variables that belong to no weight, as they are before the update.
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
                *(_padded(array[numbers], size) for array in kept),
                *self._transfers.read([common[nth] for nth in block.common]),
            ],
        )
        block.update([_padded(gradients, size)])
        self._keep_for_snapshots(numbers)
        for array, new in zip(kept, self._transfers.read(block.variables), strict=True):
            array[numbers] = new[:count]

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
            again: whether to return the rows of the last call, too.
        """
        if again:
            self._changed |= self._reported
        self._reported, self._changed = self._changed, np.zeros_like(self._changed)
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
            snapshot.keep(numbers, self.value[numbers])

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
    """The rows of a shard as they were at a moment. It keeps the rows that have changed since.

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
        snapshot_rows: Array = self._table.value[numbers]
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
        """Empty, because the standby has the rows, too."""
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
        common: the optimizer's variables that belong to no weight, by their numbers.
        update: updates all from the gradient of the rows.
    """

    slots: tuple[int, ...]
    variables: Sequence[Any]
    common: Mapping[int, Any]
    update: Callable[[Sequence[Array | None]], None]


def _padded(rows: Array, size: int) -> Array:
    padded = np.zeros((size, *rows.shape[1:]), rows.dtype)
    padded[: len(rows)] = rows
    return padded


class ServedVariables:
    """The shards of one server, updated by copies of the program's optimizers.

    Args:
        backend: makes updates.
        copies: whether all shards are copies. Otherwise the shard of a variable that is not divided is the
            program's variable itself.
        plain: as in `Update`.

    Attributes:
        state_bytes: the size of `state`.
    """

    def __init__(self, backend: Backend, *, copies: bool = False, plain: bool = False) -> None:
        self._backend, self._copies, self._plain = backend, copies, plain
        self._transfers = transfers_of(backend)
        self._shards: list[Any] = []
        self._served: list[_ServedOptimizer] = []
        self._weights = 0
        self.state_bytes = 0

    def add(self, update: Update, shards: Sequence[Shard], tables: frozenset[int] = frozenset()) -> None:
        """Add the variables of a further optimizer.

        Args:
            update: the optimizer, built, with its initial values, and the variables that it updates.
            shards: the shards of all variables on the server.
            tables: the variables of which workers read and update rows.
        """
        first, weights = self._weights, update.variables
        self._weights += len(weights)
        own_shards = [shard for shard in shards if first <= shard.variable < self._weights]
        program_slots = dict(
            zip(slots_of(update.optimizer, weights), update.optimizer.variables, strict=True)
        )
        before, whole, made = len(self._shards), list[Shard](), dict[int, Any]()
        for position, shard in enumerate(own_shards, before):
            variable = weights[shard.variable - first]
            if shard.variable in tables:
                made[position] = self._table(
                    update.optimizer, variable, shard, program_slots, shard.variable - first
                )
            else:
                made[position] = self._variable(variable, shard)
                whole.append(shard)
        positions = [k for k, made_shard in made.items() if not isinstance(made_shard, TableShard)]
        variables = [made[position] for position in positions]
        optimizer, slots = built_copy(update.optimizer, variables)
        for (at, nth), variable in zip(slots, optimizer.variables, strict=True):
            part = whole[at] if at >= 0 else None
            key = (-1 if part is None else part.variable - first, nth)
            value = self._backend.to_numpy(program_slots[key].value)
            # A copy, because updates reuse the memory of the server's own variables.
            variable.assign(np.array(value if part is None else part.part_of(value)))
        number = len(self._served)
        made_tables = {k: made_shard for k, made_shard in made.items() if isinstance(made_shard, TableShard)}
        self._shards += made.values()
        self._served.append(
            _ServedOptimizer(
                tuple(positions),
                variables,
                optimizer,
                tuple((positions[at] if at >= 0 else -1 - number, nth) for at, nth in slots),
                self._backend.updater(Update(optimizer, variables, self._plain)),
                made_tables,
            )
        )
        changing = shapes_of([*variables, *optimizer.variables])
        self.state_bytes += sum(math.prod(shape) * size for shape, size in changing)
        self.state_bytes += sum(array.nbytes for table in made_tables.values() for array in table.state)

    def _table(
        self, optimizer: Any, variable: Any, shard: Shard, program_slots: Mapping[Slot, Any], number: int
    ) -> TableShard:
        def make(value: Array) -> Any:
            return _like(variable, value)

        def part(source: Any) -> Array:
            return shard.part_of(self._backend.to_numpy(source.value))

        if (table := server_table(variable)) is not None:
            rows = table.rows_of(shard.server)
            assert rows is not None
            first = {
                nth: np.array(self._backend.to_numpy(slot.value))
                for (of, nth), slot in program_slots.items()
                if of == number
            }
            begun = bool(self._backend.to_numpy(iterations_of(optimizer).value))
            return LastingTableShard(self._backend, optimizer, make, rows, first, begun)
        slots = {nth: part(slot) for (of, nth), slot in program_slots.items() if of == number}
        return TableShard(self._backend, optimizer, make, part(variable), slots)

    def _variable(self, variable: Any, shard: Shard) -> Any:
        if not shard.whole:
            return _part(variable, shard, f"{variable.name}_{shard.start}")
        if not self._copies:
            return variable
        made = _like(variable, shard.part_of(keras.ops.convert_to_numpy(variable.value)))
        made.constraint = variable.constraint
        return made

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The slots of the optimizers, with the positions of the server's shards."""
        return tuple(slot for served in self._served for slot in served.slots) + tuple(
            (position, nth)
            for position, table in self._tables()
            if not isinstance(table, LastingTableShard)
            for nth in table.slots
        )

    def values(self, rows: Mapping[int, Array] | None = None) -> list[Array]:
        """Return copies of the shards. Of tables in `rows`, by position, return only those rows."""
        wanted, whole = rows or {}, [shard for shard in self._shards if not isinstance(shard, TableShard)]
        whole_values = iter(self._transfers.read(whole))
        return [
            (shard.value[wanted[k]] if k in wanted else shard.value.copy())
            if isinstance(shard, TableShard)
            else next(whole_values)
            for k, shard in enumerate(self._shards)
        ]

    def rows(self, position: int, numbers: Array) -> Array:
        """Return rows of a table, by the position of its shard and their numbers in it."""
        table = self._shards[position]
        assert isinstance(table, TableShard)
        rows: Array = table.value[numbers]
        return rows

    def tables(self) -> dict[int, "TableSnapshot"]:
        """Return the tables as they are now, by the positions of their shards."""
        return {position: table.snapshot() for position, table in self._tables()}

    def digests(self) -> dict[int, Array]:
        """Return the digests of the shards that only servers have, by position."""
        return {k: table.digest() for k, table in self._tables() if isinstance(table, LastingTableShard)}

    def common(self) -> tuple[tuple[Slot, ...], list[Array]]:
        """Return the slots that belong to no shard, such as the iterations, and copies of their values."""
        common = [
            ((-1 - number, nth), variable)
            for number, served in enumerate(self._served)
            for nth, variable in served.common().items()
        ]
        return tuple(slot for slot, _ in common), self._transfers.read([variable for _, variable in common])

    def changes(self, *, again: bool = False) -> tuple[list[Array], dict[int, Array]]:
        """Return copies of the shards and then of `slots`, and the numbers of rows by position.

        Of a table and its slots, only the rows are returned that were updated since the last call. For a
        table that only servers have, an empty array is returned.

        Args:
            again: whether to return the rows of the last call, too, because they did not arrive.
        """
        tables = [(k, table) for k, table in self._tables() if not isinstance(table, LastingTableShard)]
        rows = {position: table.pop_changed(again=again) for position, table in tables}
        slots = self._transfers.read([v for served in self._served for v in served.optimizer.variables])
        slots += [slot[rows[position]] for position, table in tables for slot in table.slots.values()]
        none = {position: NO_ROWS for position, _ in self._tables() if position not in rows}
        return [*self.values({**rows, **none}), *slots], rows

    def update(
        self,
        gradients: Mapping[int, Array],
        updates: Sequence[int] = (0,),
        rows: Mapping[int, Array] | None = None,
    ) -> None:
        """Update the shards once, given the gradients by the positions of their shards.

        Without gradients, only the iterations of the optimizers advance, as they do on the other servers.

        Args:
            gradients: the gradients by position; of a table, those of some rows.
            updates: the numbers of the optimizers that are applied.
            rows: the numbers of the rows of tables, by position.
        """
        for number in updates:
            served = self._served[number]
            for position, table in served.tables.items():
                if position in gradients:
                    assert rows is not None
                    table.update(rows[position], gradients[position], served.common())
            shard_gradients = [gradients.get(position) for position in served.positions]
            if any(gradient is not None for gradient in shard_gradients):
                served.update(shard_gradients)
            else:
                iterations = iterations_of(served.optimizer)
                iterations.assign(iterations.value + 1)

    def write(self, shards: Mapping[int, Array], slots: Mapping[Slot, Array]) -> None:
        """Replace values of shards, and of variables of the optimizers."""
        for position, value in shards.items():
            if not isinstance(shard := self._shards[position], TableShard):
                shard.assign(value)
        for position, table in self._tables():
            table_slots = {nth: value for (at, nth), value in slots.items() if at == position}
            table.write(shards.get(position), table_slots)
        for served in self._served:
            for slot, variable in zip(served.slots, served.optimizer.variables, strict=True):
                if slot in slots:
                    variable.assign(slots[slot])

    def state(self) -> list[Array]:
        """Return all arrays that change. Some are not copies, so the caller uses them before the next update.

        The arrays of optimizers that are added later follow those of earlier ones.
        """
        return [
            array
            for served in self._served
            for array in (
                *self._transfers.read([*served.variables, *served.optimizer.variables]),
                *(array for table in served.tables.values() for array in table.state),
            )
        ]

    def restore(self, state: Sequence[Array]) -> None:
        """Restore the state of the same shards in another process, perhaps from before some were added."""
        rest = list(state)

        def next_arrays(count: int) -> list[Array]:
            nonlocal rest
            arrays, rest = rest[:count], rest[count:]
            return arrays

        for served in self._served:
            if not rest:
                return
            variables = [*served.variables, *served.optimizer.variables]
            self._transfers.assign(variables, next_arrays(len(variables)))
            for table in served.tables.values():
                table.restore(next_arrays(len(table.state)))

    def _tables(self) -> list[tuple[int, TableShard]]:
        return [(k, shard) for k, shard in enumerate(self._shards) if isinstance(shard, TableShard)]


def iterations_of(optimizer: Any) -> Any:
    """Return the variable that counts how often an optimizer was applied, even if it only accumulated."""
    return optimizer.variables[0]


def built_copy(optimizer: Any, variables: Sequence[Any]) -> tuple[Any, tuple[Slot, ...]]:
    """Return a new optimizer with the settings of another, built for other variables, and its slots.

    The slots are in the order of the optimizer's variables.
    """
    copy = _unbuilt_copy(optimizer)
    positions = {id(variable): position for position, variable in enumerate(variables)}
    belongs: dict[int, int] = {}
    add = copy.add_variable_from_reference

    def recorded(reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
        made = add(reference_variable, *args, **kwargs)
        belongs[id(made)] = positions.get(id(reference_variable), -1)
        return made

    with replaced(copy, "add_variable_from_reference", recorded):
        copy.build(list(variables))
    counts: dict[int, int] = {}
    slots = []
    for variable in copy.variables:
        position = belongs.get(id(variable), -1)
        number = counts.get(position, 0)
        counts[position] = number + 1
        slots.append((position, number))
    return copy, tuple(slots)


def _unbuilt_copy(optimizer: Any) -> Any:
    """Return a new optimizer with the settings of another, including those that its config leaves out.

    Raises:
        ModelError: it cannot be made from its config.
    """
    schedule = rate_object(optimizer)
    is_variable = isinstance(schedule, keras.Variable)
    try:
        # A schedule is shared between the optimizers. It is not made from its config.
        with replaced(optimizer, RATE, schedule if is_variable else 0.5):
            config = optimizer.get_config()
        copy = type(optimizer).from_config(config if is_variable else {**config, "learning_rate": schedule})
    except Exception as error:
        raise ModelError(
            f"parameter servers make their own {type(optimizer).__name__} from the config of the model's, "
            f"which failed ({type(error).__name__}: {error}): give the class the methods get_config and "
            "from_config"
        ) from error
    for name, value in vars(optimizer).items():
        settings = (bool, int, float, str, set, re.Pattern, type(None))
        if isinstance(value, settings) and name not in SET_BY_BUILD and vars(copy).get(name) != value:
            vars(copy)[name] = value
    return copy


def slots_of(optimizer: Any, variables: Sequence[Any]) -> tuple[Slot, ...]:
    """Return the slots of a built optimizer, in the order of its variables."""
    return built_copy(optimizer, variables)[1]


def refuse_unserved(model: Any, shards: Sequence[Shard]) -> None:
    """Raise ModelError for what parameter servers do not support in a call of `fit`."""
    if model.optimizer.built:
        refuse_other_weights(model, trained_by(model.optimizer))
    refuse_optimizer(Update(model.optimizer, model.trainable_variables), shards)


def refuse_optimizer(update: Update, shards: Sequence[Shard]) -> None:
    """Raise ModelError for an optimizer that parameter servers do not support.

    Args:
        update: the optimizer, and the variables that it updates.
        shards: the shards of these variables, which are numbered from 0.
    """
    optimizer, weights = update.optimizer, update.variables
    name = type(optimizer).__name__
    if hasattr(optimizer, "inner_optimizer"):
        raise ModelError(
            f"{name} scales the loss depending on all gradients of a step, which parameter servers do not "
            "have together: compile the model with its inner optimizer, and use the dtype policy "
            "mixed_bfloat16"
        )
    if optimizer.global_clipnorm is not None:
        raise ModelError(
            f"{name} has global_clipnorm={optimizer.global_clipnorm}, the norm of all gradients, which "
            "parameter servers do not have together: use clipnorm or clipvalue"
        )
    common = [
        sum(position < 0 for position, _ in slots_of(optimizer, some)) for some in (weights, weights[:1])
    ]
    if common[0] != common[1]:
        raise ModelError(
            f"{name} creates variables for a weight that parameter servers cannot assign to it; use one of "
            f"{', '.join(_BY_ELEMENT)}, or MultiWorkerMirroredStrategy"
        )
    divided = next((shard.variable for shard in shards if not shard.whole), None)
    if divided is None:
        return
    path = weights[divided].path
    if name not in _BY_ELEMENT or not type(optimizer).__module__.startswith("keras."):
        raise ModelError(
            f"the partitioner divides {path!r}, but {name} may not update each element on its own; use one "
            f"of {', '.join(_BY_ELEMENT)}, or no variable_partitioner"
        )
    excluded = variables_without_decay(optimizer) or names_without_decay(optimizer)
    if optimizer.clipnorm is not None or excluded:
        raise ModelError(
            f"the partitioner divides {path!r}, but the optimizer has a clipnorm or "
            "exclude_from_weight_decay, which are for whole variables; remove them, or the "
            "variable_partitioner"
        )
    constrained = next(
        (
            variable.path
            for shard in shards
            if not shard.whole and (variable := weights[shard.variable]).constraint is not None
        ),
        None,
    )
    if constrained is not None:
        raise ModelError(
            f"the partitioner divides {constrained!r}, whose constraint is for the whole variable; remove "
            "one of them"
        )


def lazy_hindrance(optimizer: Any, variables: Sequence[Any]) -> str:
    """Return why an optimizer cannot update only some rows of a variable, or an empty string if it can."""
    name = type(optimizer).__name__
    if name not in _BY_ELEMENT or not type(optimizer).__module__.startswith("keras."):
        return f"{name} may not update each row on its own"
    if optimizer.use_ema or optimizer.gradient_accumulation_steps:
        return f"{name} has use_ema or gradient_accumulation_steps, which are for all rows"
    rate = int(isinstance(rate_object(optimizer), keras.Variable))
    if sum(position < 0 for position, _ in slots_of(optimizer, variables)) > 1 + rate:
        return f"{name} has variables that belong to no weight"
    return ""


def refuse_buffers(state: TrainingState) -> None:
    """Raise ModelError for buffers of PyTorch modules, which only some of the processes would have."""
    buffer = next(
        (name for name, variable in state.lasting_variables().items() if not hasattr(variable, "assign")),
        None,
    )
    if buffer is not None:
        raise ModelError(
            f"{buffer!r} is a buffer of a PyTorch module, which parameter servers do not support: use a "
            "layer of Keras, or MultiWorkerMirroredStrategy"
        )


def shapes_of(variables: Sequence[Any]) -> list[tuple[tuple[int, ...], int]]:
    """Return the shapes of variables, and the sizes of their elements in bytes."""
    return [(tuple(v.shape), _item_bytes(keras.backend.standardize_dtype(v.dtype))) for v in variables]


def _item_bytes(dtype: str) -> int:
    digits = re.search(r"\d+$", dtype)
    return max(1, int(digits[0]) // 8) if digits else 1


def _like(variable: Any, value: Array) -> Any:
    """Return a new variable with a value, and with the path and the dtype of another."""
    with ExitStack() as scopes:
        # Some optimizers choose variables by their paths.
        for name in variable.path.split("/")[:-1]:
            scopes.enter_context(keras.name_scope(name))
        return keras.Variable(np.array(value), dtype=variable.dtype, trainable=True, name=variable.name)


def _part(variable: Any, shard: Shard, name: str) -> Any:
    value = np.array(shard.part_of(keras.ops.convert_to_numpy(variable.value)))
    return keras.Variable(value, dtype=variable.dtype, trainable=True, name=name)
