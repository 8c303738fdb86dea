"""The divided update on JAX: blocks are computed from shared memory, and their results are copied to it.

Between updates, the state of a step has a `SharedValue` in the place of each slot and weight. Compiled
functions read the weights there. An update does not write to the memory of the weights before it, and all
workers have the new weights before the next update begins.

A JAX array does not change. The arrays that Keras and the program get at the end of an epoch show the shared
memory through a private mapping. If the next epoch begins with these arrays, its state has the shared values
again. Arrays that are still in use get pages of their own before the next update.
"""

import mmap
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import numpy.typing as npt

from lockstep.collectives.shared.divided_state import BlockGroup, DividedState, SlotValue
from lockstep.collectives.shared.pool import SharedPool
from lockstep.keras.backends.optimizer_blocks import (
    OptimizerBlocks,
    VariableGroup,
    blocks_of,
    clips_by_norm,
    hindrance,
    scales_loss,
    updating_part,
)
from lockstep.keras.private.common import (
    clipped,
    knowing_finite,
    rate_object,
    trained_by,
    with_clipped,
    with_values,
)

Array = npt.NDArray[Any]

_VERSIONS = 2
"""The versions of the weights in shared memory: those before an update, and those after it."""


class SharedValue:
    """The value of a weight or a slot between two updates, in memory that a later update changes.

    JAX and Keras get an array that keeps the value, NumPy the memory itself.

    Args:
        pool: the pool that has the memory.
        state: the whole state; None before the first update of a worker that joins.
        array: the part of it that has the value.
    """

    def __init__(self, pool: SharedPool, state: DividedState | None, array: Array) -> None:
        self.state = state
        self._pool = pool
        self._given: tuple[int, weakref.ref[Any]] | None = None
        self.array = array
        self.shape, self.dtype = array.shape, array.dtype

    @classmethod
    def of(cls, pool: SharedPool, array: Array) -> "SharedValue | None":
        """Return the value in a part of the memory, or None if the array is not one."""
        return None if pool.offset_of(array) is None else cls(pool, None, array)

    def is_of(self, value: Any) -> bool:
        """Whether another shared value is the same part of the memory; any value without elements is."""
        if not (isinstance(value, SharedValue) and self.array.size):
            return not self.array.size
        parts = [(each.array.ctypes.data, each.shape, each.dtype) for each in (self, value)]
        return parts[0] == parts[1]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Return the memory itself, unless NumPy wants a copy."""
        return np.array(self.array, dtype) if copy or dtype not in (None, self.dtype) else self.array

    def __jax_array__(self) -> Any:
        """Return an array that shows the memory, or a copy."""
        shown = self._pool.show(self.array)
        array = self.copied() if shown is None else _in_place(shown)
        self._given = self._pool.changes, weakref.ref(array)
        return array

    def is_value_of(self, array: Any) -> bool:
        """Whether `array` was made from this value, which has not changed since."""
        if self._given is None:
            return False
        changes, given = self._given
        return changes == self._pool.changes and given() is array

    def copied(self) -> Any:
        """Return a copy in memory that goes back to the kernel, where an allocator would retain it."""
        memory = np.frombuffer(mmap.mmap(-1, max(1, self.array.nbytes)), np.uint8)
        copied = memory[: self.array.nbytes].view(self.dtype).reshape(self.shape)
        np.copyto(copied, self.array)
        return _in_place(copied)


def _in_place(array: Array) -> Any:
    """Return an array of JAX with the memory of another one, to which nothing else refers, or with a copy."""
    try:
        return jax.dlpack.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError):
        # NumPy's exchange of memory lacks bfloat16.
        return jax.block_until_ready(jnp.array(array))


def present(values: Sequence[Any]) -> list[Any]:
    """Return the values of variables as arguments of a compiled function."""
    return [value.array if isinstance(value, SharedValue) else value for value in values]


def owned(values: Sequence[Any]) -> list[Any]:
    """Return the values of variables as arrays of JAX."""
    return [value.copied() if isinstance(value, SharedValue) else value for value in values]


class StandIn:
    """An optimizer that resembles another one, and updates a block of a group of its variables.

    Attributes:
        optimizer: the optimizer, built for one variable with the shape of a block.
        updating: the part of the optimizer that updates.
        of_slots: the numbers of the kinds of slots, by their positions among its variables.
        of_others: the numbers of its other variables, likewise.
    """

    def __init__(self, optimizer: Any, group: VariableGroup) -> None:
        updating = updating_part(optimizer)
        source = rate_object(updating)
        variables = [source] if isinstance(source, keras.Variable) else []
        # Within a `fit`, Keras's trainer has the values.
        with with_values(variables, [np.zeros((), np.float32) for _ in variables]):
            settings = updating.get_config()
        # AdamW does not take None at first.
        settings |= {"learning_rate": 0.0, "weight_decay": settings["weight_decay"] or 0.0}
        self.updating: Any = type(updating).from_config(settings)
        if not variables:
            self.updating.learning_rate = source
        if not group.decays:
            self.updating.weight_decay = None
        self.optimizer: Any = self.updating
        if scales_loss(optimizer):
            growth = optimizer.dynamic_growth_steps
            self.optimizer = type(optimizer)(self.updating, dynamic_growth_steps=growth)
            self.updating.loss_scale_factor = updating.loss_scale_factor
        self.optimizer.build([keras.Variable(np.zeros(group.elements), dtype=group.dtype.name, name="block")])
        slots = [id(slot) for kind in group.kinds for slot in vars(self.updating)[kind]]
        self.of_slots, self.of_others = dict[int, int](), dict[int, int]()
        for i, variable in enumerate(self.optimizer.variables):
            if id(variable) in slots:
                self.of_slots[i] = slots.index(id(variable))
            else:
                self.of_others[i] = len(self.of_others)

    def fits(self, optimizer: Any, blocks: OptimizerBlocks) -> bool:
        """Whether it has one slot of each kind, and the other variables of the optimizer."""

        def forms(part: Any, positions: Iterable[int]) -> list[Any]:
            variables = [part.variables[i] for i in positions]
            return [(variable.shape, variable.dtype) for variable in variables]

        is_like = forms(self.optimizer, self.of_others) == forms(optimizer, blocks.others)
        return is_like and len(self.of_slots) == len(blocks.groups[0].kinds)


class WholeGradients:
    """Computes what an update needs of whole gradients, in a compiled function of its own.

    In another function, XLA may round a norm or a clipped gradient differently, even with a
    `jax.lax.optimization_barrier` between them and the update. So the whole update and that of blocks get the
    results of this function.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._scales_loss = scales_loss(optimizer)
        self.clips = clips_by_norm(updating_part(optimizer))
        self._position = -1
        if self._scales_loss:
            self._position = [id(each) for each in optimizer.variables].index(id(optimizer.dynamic_scale))
        self._compiled = jax.jit(self._computed)

    @classmethod
    def of(cls, optimizer: Any) -> "WholeGradients | None":
        """Return the function of a built optimizer, or None if its update cannot be divided."""
        return None if hindrance(optimizer, trained_by(optimizer)) else cls(optimizer)

    def compute(self, values: Sequence[Any], density: Any, gradients: Sequence[Any]) -> tuple[Any, Any]:
        """Return whether all are finite, and the clipped gradients; None for what the update does not need.

        Args:
            values: the values of the optimizer's variables.
            density: the divisor of the gradients; None for no division.
            gradients: the gradients of all variables.
        """
        if not (self._scales_loss or self.clips):
            return None, None
        scale = values[self._position] if self._scales_loss else None
        result: tuple[Any, Any] = self._compiled(scale, density, list(gradients))
        return result

    def _computed(self, loss_scale: Any, density: Any, gradients: Sequence[Any]) -> tuple[Any, Any]:
        gradients = [_divided(gradient, density) for gradient in gradients]
        finite = self._optimizer.check_finite(gradients) if self._scales_loss else None
        if not self.clips:
            return finite, None
        updating = updating_part(self._optimizer)
        for divisor in (loss_scale, updating.loss_scale_factor):
            if divisor is not None:
                gradients = [gradient / divisor for gradient in gradients]
        return finite, clipped(updating, gradients)


class JaxBlocks:
    """The compiled functions of one divided update."""

    def __init__(
        self, blocks: OptimizerBlocks, stand_ins: Sequence[StandIn], whole_gradients: WholeGradients
    ) -> None:
        self.blocks = blocks
        self.whole_gradients = whole_gradients
        clips = whole_gradients.clips
        self.functions = [jax.jit(partial(_updated, stand_in, clips)) for stand_in in stand_ins]
        self._state: DividedState | None = None
        self._slots: list[SharedValue | None] = []
        self._weights: list[list[SharedValue]] = []
        self._updates = 0

    @classmethod
    def of(cls, optimizer: Any, replicas: int) -> "JaxBlocks | str":
        """Return the functions of a built optimizer, or why its update cannot be divided."""
        blocks = blocks_of(optimizer, trained_by(optimizer), replicas)
        if isinstance(blocks, str):
            return blocks
        stand_ins = [StandIn(optimizer, group) for group in blocks.groups]
        if not all(stand_in.fits(optimizer, blocks) for stand_in in stand_ins):
            return "its variables are not known"
        return cls(blocks, stand_ins, WholeGradients(optimizer))

    def views(
        self, pool: SharedPool, state: DividedState, updates: int, weights: Sequence[Any]
    ) -> tuple[list[SharedValue | None], list[SharedValue]]:
        """Return the shared slots by the positions of the variables, and the shared weights after an update.

        Args:
            pool: the pool that has the memory of `state`.
            state: the shared memory.
            updates: the number of updates of its slots.
            weights: the weights, for their shapes.
        """
        if self._state is not state:
            shapes = [weight.shape for weight in weights]
            slots: list[SharedValue | None] = [None] * (len(self.blocks.slots) + len(self.blocks.others))
            for position, (group, kind, i) in self.blocks.slots.items():
                array = self.blocks.groups[group].elements_of(i, state.slots[group][kind])
                slots[position] = SharedValue(pool, state, array.reshape(shapes[i]))
            self._state, self._slots, self._weights = state, slots, []
            for version in range(_VERSIONS):
                shared: dict[int, SharedValue] = {}
                for of, array in zip(self.blocks.groups, state.weights_after(version), strict=True):
                    for i in of.offsets:
                        value = of.elements_of(i, array).reshape(shapes[i])
                        shared[i] = SharedValue(pool, state, value)
                self._weights.append([shared[i] for i in range(len(shapes))])
        self._updates = updates
        return self._slots, self._weights[updates % _VERSIONS]

    def take_back(self, weights: list[Any], values: list[Any]) -> None:
        """Replace arrays that were made from shared values with these values: all weights, or all slots.

        Args:
            weights: the weights before an update.
            values: the values of the optimizer's variables.
        """
        if self._state is None:
            return
        for arrays, shared in ((weights, self._weights[self._updates % _VERSIONS]), (values, self._slots)):
            pairs = zip(arrays, shared, strict=True)
            if all(value is None or value.is_value_of(array) for array, value in pairs):
                arrays[:] = [value or array for array, value in zip(arrays, shared, strict=True)]


class JaxBlockUpdate:
    """One update of a step, by blocks; a `lockstep.keras.backends.contract.BlockUpdate`.

    Args:
        functions: the functions of the update.
        state: the state before the update, as Keras's trainer has it.
        gradients: the gradients of all replicas, in the memory of the total, which does not change during the
            update.
        density: the divisor of the gradients; None for no division.
        rest: applies the rest of the total to the layers' state and the metrics, whose memory it reuses;
            returns (logs, layers' state, metrics, a marker).
        pending: receives arrays that are ready when nothing reads shared memory any more.
    """

    def __init__(
        self,
        functions: JaxBlocks,
        state: Any,
        gradients: Sequence[Array],
        density: Any,
        rest: Callable[[Any, Any], tuple[Any, Any, Any, Any]],
        pending: list[Any],
    ) -> None:
        self._functions = functions
        self._weights, self._layers, self._values, self._metrics = state
        self._density = density
        self._rest = rest
        self._pending = pending
        whole_gradients = functions.whole_gradients
        finite, clipped_gradients = whole_gradients.compute(self._values, density, gradients)
        self._finite = None if finite is None else np.asarray(finite)
        if whole_gradients.clips:
            gradients = [np.asarray(gradient) for gradient in clipped_gradients]
        self._flat_gradients = dict(enumerate(gradient.reshape(-1) for gradient in gradients))
        self._borrow_weights()
        self._others: list[Any] | None = None

    def _borrow_weights(self) -> None:
        jax.block_until_ready(self._weights)
        self._flat_weights = dict(enumerate(np.asarray(weight).reshape(-1) for weight in self._weights))

    @property
    def groups(self) -> tuple[BlockGroup, ...]:
        """The groups of blocks."""
        return self._functions.blocks.block_groups

    @property
    def elements(self) -> int:
        """The elements of a block."""
        return self._functions.blocks.elements

    @property
    def versions(self) -> int:
        """Two, because compiled functions read the weights in shared memory."""
        return _VERSIONS

    def prepare(self) -> None:
        """Compile the functions of the update; see `BlockUpdate`."""
        for group in range(len(self.groups)):
            self._compute_zeros(group)
        self._rest(*jax.tree_util.tree_map(jnp.copy, (self._layers, self._metrics)))

    def forget_values(self) -> None:
        """Replace the weights and slots in the state by zeros that take no memory."""
        self._flat_weights.clear()
        for values, positions in (
            (self._weights, range(len(self._weights))),
            (self._values, self._functions.blocks.slots),
        ):
            for i in positions:
                # The kernel provides a page when it is first used.
                values[i] = np.zeros(values[i].shape, values[i].dtype)

    def has(self, state: DividedState) -> bool:
        """Whether this memory has the values of the slots."""
        return all(
            isinstance(self._values[position], SharedValue) and self._values[position].state is state
            for position in self._functions.blocks.slots
        )

    def adopt(self, state: DividedState, updates: int, pool: SharedPool) -> bool:
        """Use this memory if the weights and the slots are there; see `BlockUpdate`."""
        if not any(isinstance(value, SharedValue) for value in self._weights):
            return False
        slots, weights = self._functions.views(pool, state, updates, self._weights)
        values = [*zip(self._weights, weights, strict=True), *zip(self._values, slots, strict=True)]
        if not all(place is None or place.is_of(value) for value, place in values):
            return False
        self._weights[:] = weights
        self._values[:] = [place or value for value, place in zip(self._values, slots, strict=True)]
        return True

    def own_values(self) -> None:
        """Copy the weights and the slots before the update, if they are in shared memory."""
        self._weights, self._values = owned(self._weights), owned(self._values)
        self._borrow_weights()

    def own_slots(self) -> Iterator[SlotValue]:
        """Yield this worker's values of the slots."""
        return self._functions.blocks.values(lambda position: np.asarray(self._values[position]))

    def fill(self, state: DividedState, block: int) -> None:
        """Write the values of the slots of a block."""
        group, start, stop = state.layout.places[block]
        flat: dict[int, dict[int, Array]] = {}
        for position, (of, kind, i) in self._functions.blocks.slots.items():
            if of == group:
                flat.setdefault(kind, {})[i] = np.asarray(self._values[position]).reshape(-1)
        for kind, arrays in flat.items():
            np.copyto(
                state.slots[group][kind][start:stop],
                self._group(group).gathered(start // self.elements, arrays),
            )

    def _group(self, group: int) -> VariableGroup:
        return self._functions.blocks.groups[group]

    def compute(self, group: int, number: int, slots: Sequence[Array]) -> Sequence[Array]:
        """Return the new weights and slots of a block, given its number in its group."""
        of = self._group(group)
        gradient, weights = of.gathered(number, self._flat_gradients), of.gathered(number, self._flat_weights)
        others = [self._values[i] for i in self._functions.blocks.others]
        new, new_slots, new_others = self._functions.functions[group](
            others, self._density, gradient, weights, list(slots), self._finite
        )
        if self._others is None:
            self._others = new_others
        return [np.asarray(new), *map(np.asarray, new_slots)]

    def _compute_zeros(self, group: int) -> None:
        of = self._group(group)
        self.compute(group, 0, [np.zeros(of.elements, of.dtype) for _ in of.kinds])

    @property
    def release(self) -> Callable[[], None]:
        """Do nothing: Keras copies the weights and the slots into variables at the end of a `fit`."""
        return lambda: None

    def finish(self, state: DividedState, updates: int, pool: SharedPool) -> tuple[Any, Any]:
        """Return (logs, the state after the step), once all blocks are updated."""
        functions = self._functions
        if self._others is None:
            # This worker has no block.
            self._compute_zeros(0)
            assert self._others is not None
        slots_after, weights = functions.views(pool, state, updates, self._weights)
        logs, layers, metrics, applied = self._rest(self._layers, self._metrics)
        self._pending.append(applied)
        others = iter(self._others)
        values = [next(others) if slot is None else slot for slot in slots_after]
        return logs, (list(weights), layers, values, metrics)


def _updated(
    stand_in: StandIn,
    is_clipped: bool,
    others: Sequence[Any],
    density: Any,
    gradient: Any,
    weights: Any,
    slots: Sequence[Any],
    finite: Any,
) -> tuple[Any, list[Any], list[Any]]:
    """Update one block; return its weights and slots, and the optimizer's other variables.

    Args:
        stand_in: the stand-in that updates it.
        is_clipped: whether the gradient is divided by the density and clipped.
        others: the values of the other variables, before the update.
        density: the divisor of the gradient; None for no division.
        gradient: the gradient of the block.
        weights: the weights of the block.
        slots: the slots of the block, one of each kind.
        finite: whether the gradients of all blocks are finite; None if this does not count.
    """
    of_slots, of_others = stand_in.of_slots, stand_in.of_others
    values = [
        slots[of_slots[i]] if i in of_slots else others[of_others[i]]
        for i in range(len(of_slots) + len(of_others))
    ]
    with ExitStack() as stack:
        if finite is not None:
            stack.enter_context(knowing_finite(stand_in.optimizer, finite))
        if is_clipped:
            stack.enter_context(with_clipped(stand_in.updating, [gradient]))
        else:
            gradient = _divided(gradient, density)
        (new,), after = stand_in.optimizer.stateless_apply(values, [gradient], [weights])
    new_slots = [after[i] for i in sorted(of_slots, key=of_slots.__getitem__)]
    return new, new_slots, [after[i] for i in of_others]


def _divided(gradient: Any, density: Any) -> Any:
    """Return a gradient, divided as in a whole update; see `lockstep.keras.backends.losses.divided`."""
    return gradient if density is None else gradient / (density + (density == 0)).astype(gradient.dtype)
