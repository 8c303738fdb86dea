"""The divided update on TensorFlow: a stand-in computes blocks, and the slots show the shared memory.

A variable shares the memory of a tensor that is assigned to it, also of one that has borrowed its memory. An
operation that changes a variable writes to other memory if something else refers to the tensor. So between
updates, the optimizer's variables show the slots in the shared memory without a copy, and what a program
assigns to them stays in the process: the address of the value shows it.

TensorFlow borrows no small arrays, and none of bfloat16. Variables with these get copies after each update.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from lockstep.collectives.shared.divided_state import BlockGroup, DividedState, SlotValue
from lockstep.collectives.shared.pool import PrivateMapping
from lockstep.keras.backends.multi_update import Update
from lockstep.keras.backends.optimizer_blocks import OptimizerBlocks, StandIn, VariableGroup, blocks_of
from lockstep.keras.backends.tf_graphs import as_array, assign, borrowed, copied, executable, read
from lockstep.keras.private.common import trained_by
from lockstep.system.memory import return_freed_memory

Array = npt.NDArray[Any]

_EXACT = {False: ("float32", "float64"), True: ("float32", "float16", "bfloat16")}
"""The dtypes of which an element has equal bits in every array: without XLA, and with it.

Bits of others depend on whether the element is in a full vector register, or is a scalar.
"""
_ROOTS = ("RMSprop", "Adagrad", "Adadelta")
"""Optimizers that divide by square roots, which TensorFlow approximates in full vector registers."""


class _BorrowedSlot(NamedTuple):
    """A variable of the optimizer that shows a slot.

    Attributes:
        variable: the variable.
        tensor: its value. The reference prevents that an operation writes to the memory.
        address: of the value.
    """

    variable: tf.Variable
    tensor: Any
    address: int

    @property
    def lasts(self) -> bool:
        """Whether it still does. NumPy gets a copy of a scalar, which has another address each time."""
        value, shown = as_array(read(self.variable)), as_array(self.tensor)
        if value.size > 1:
            return int(value.ctypes.data) == self.address
        return value.tobytes() == shown.tobytes()


class TensorFlowBlocks:
    """The functions of a divided update, and where its slots are."""

    def __init__(
        self, update: Update, blocks: OptimizerBlocks, stand_ins: Sequence[StandIn], *, jit: bool
    ) -> None:
        self.update = update
        self.blocks = blocks
        self.trained = [variable.value for variable in trained_by(update.optimizer)]
        self.variables = [variable.value for variable in update.optimizer.variables]
        self._stand_ins = stand_ins
        self._jit = jit
        self._functions: dict[int, Callable[..., Any]] = {}
        self._state: DividedState | None = None
        self._shown: list[_BorrowedSlot] = []

    @classmethod
    def of(cls, update: Update, replicas: int, *, jit: bool) -> "TensorFlowBlocks | str":
        """Return the functions of the update of a built optimizer, or why it cannot be divided.

        Args:
            update: the update.
            replicas: R.
            jit: whether XLA compiles the whole update.
        """
        optimizer = update.optimizer
        if update.call is not None:
            return "the step makes the update in its own way"
        if any("cpu" not in variable.value.device.lower() for variable in trained_by(optimizer)):
            return "the weights are on a GPU"
        if optimizer.clipnorm or optimizer.global_clipnorm:
            return "it clips by a norm, which needs whole gradients"
        exact = _EXACT[jit] if type(optimizer).__name__ not in _ROOTS or jit else ()
        if any(variable.dtype not in exact for variable in trained_by(optimizer)):
            return "bits of its operations depend on the place of an element in its array"
        blocks = blocks_of(optimizer, trained_by(optimizer), replicas)
        if isinstance(blocks, str):
            return blocks
        stand_ins = [StandIn(optimizer, group) for group in blocks.groups]
        if not all(stand_in.fits(optimizer, blocks) for stand_in in stand_ins):
            return "its variables are not known"
        return cls(update, blocks, stand_ins, jit=jit)

    def updated(self, group: int, *arguments: Any) -> tuple[Any, list[Any], list[Any]]:
        """Update a block of a group; return its weights and slots, and the optimizer's other variables.

        Args:
            group: the number of the group.
            arguments: the factor of gradients, the block's gradient and weights, its slots, and the others.
        """
        if group not in self._functions:
            stand_in = self._stand_ins[group]
            update = Update(stand_in.optimizer, [stand_in.block], plain=self.update.kernel is None)

            def function(
                scale: Any, gradient: Any, weights: Any, slots: Sequence[Any], others: Sequence[Any]
            ) -> tuple[Any, list[Any], list[Any]]:
                variables = [variable.value for variable in stand_in.optimizer.variables]
                of_slots = [
                    variables[i] for i in sorted(stand_in.of_slots, key=stand_in.of_slots.__getitem__)
                ]
                of_others = [variables[i] for i in stand_in.of_others]
                before = [weights, *slots, *others]
                assigned = [stand_in.block.value, *of_slots, *of_others]
                for variable, value in zip(assigned, before, strict=True):
                    variable.assign(value)
                update.apply([copied(gradient, scale)])
                new, *rest = [tf.identity(variable.read_value()) for variable in assigned]
                return new, rest[: len(slots)], rest[len(slots) :]

            self._functions[group] = executable(function, self._jit, *arguments)
        result: tuple[Any, list[Any], list[Any]] = self._functions[group](*arguments)
        return result

    def are_shown(self, state: DividedState) -> bool:
        """Whether the optimizer's variables have the values of the slots in this memory."""
        return self._state is state and all(shown.lasts for shown in self._shown)

    def show(self, state: DividedState) -> None:
        """Let the optimizer's variables show the slots in the memory of `state`."""
        first = self._state is not state
        before = {id(shown.variable): shown for shown in self._shown} if not first else {}
        shown: list[_BorrowedSlot] = []
        for position, (group, kind, i) in self.blocks.slots.items():
            variable = self.variables[position]
            array = self.blocks.groups[group].elements_of(i, state.slots[group][kind])
            kept = before.get(id(variable))
            if kept is not None and kept.address == array.ctypes.data and kept.lasts:
                shown.append(kept)
                continue
            tensor = tf.reshape(borrowed(array), variable.shape)
            tf.raw_ops.AssignVariableOp(resource=variable.handle, value=tensor)
            shown.append(_BorrowedSlot(variable, tensor, _address(tensor)))
        self._state, self._shown = state, shown
        if first:
            # The memory of the slots, which the allocator would retain.
            return_freed_memory()

    def release(self) -> None:
        """Let the optimizer's variables have their values in memory of this process."""
        released, self._shown, self._state = self._shown, [], None
        for shown in released:
            if shown.lasts:
                assign(shown.variable, as_array(shown.tensor))


class TensorFlowBlockUpdate:
    """One update of a step, by blocks; a `lockstep.keras.backends.contract.BlockUpdate`.

    Args:
        blocks: of the update.
        gradients: of all replicas, by the positions of the variables.
        scale: the factor of the gradients, a tensor.
        rest: applies the rest of the total; returns the logs.
    """

    def __init__(
        self, blocks: TensorFlowBlocks, gradients: Mapping[int, Array], scale: Any, rest: Callable[[], Any]
    ) -> None:
        self._blocks = blocks
        self._scale = scale
        self._rest = rest
        self._flat_gradients = {i: gradient.reshape(-1) for i, gradient in gradients.items()}
        weights = [as_array(read(weight)) for weight in blocks.trained]
        self._flat_weights = {i: weight.reshape(-1) for i, weight in enumerate(weights)}
        self._others: list[Any] | None = None

    @property
    def groups(self) -> tuple[BlockGroup, ...]:
        """The groups of blocks."""
        return self._blocks.blocks.block_groups

    @property
    def elements(self) -> int:
        """The elements of a block."""
        return self._blocks.blocks.elements

    @property
    def release(self) -> Callable[[], None]:
        """Lets the optimizer's variables have their values in memory of this process."""
        return self._blocks.release

    def has(self, state: DividedState) -> bool:
        """Whether the values of the slots are in this memory."""
        return self._blocks.are_shown(state)

    def own_slots(self) -> Iterator[SlotValue]:
        """Yield this worker's values of the slots."""
        return self._blocks.blocks.values(lambda position: as_array(read(self._blocks.variables[position])))

    def fill(self, state: DividedState, block: int) -> None:
        """Write the values of the slots of a block."""
        group, start, stop = state.layout.places[block]
        flat: dict[int, dict[int, Array]] = {}
        for position, (of, kind, i) in self._blocks.blocks.slots.items():
            if of == group:
                flat.setdefault(kind, {})[i] = as_array(read(self._blocks.variables[position])).reshape(-1)
        for kind, arrays in flat.items():
            np.copyto(
                state.slots[group][kind][start:stop],
                self._group(group).gathered(start // self.elements, arrays),
            )

    def _group(self, group: int) -> VariableGroup:
        return self._blocks.blocks.groups[group]

    def compute(self, group: int, number: int, slots: Sequence[Array]) -> Sequence[Array]:
        """Return the new weights and slots of a block, given its number in its group."""
        of = self._group(group)
        gradient, weights = of.gathered(number, self._flat_gradients), of.gathered(number, self._flat_weights)
        others = [read(self._blocks.variables[i]) for i in self._blocks.blocks.others]
        new, new_slots, new_others = self._blocks.updated(
            group, self._scale, borrowed(gradient), borrowed(weights), list(map(borrowed, slots)), others
        )
        if self._others is None:
            self._others = new_others
        return [as_array(new), *map(as_array, new_slots)]

    def finish(self, state: DividedState, private: Callable[[], PrivateMapping]) -> tuple[Any, Any]:
        """Return (logs, None), once all blocks are updated."""
        blocks = self._blocks
        if self._others is None:
            # This worker has no block.
            first = self._group(0)
            slots = [np.zeros(first.elements, first.dtype) for _ in first.kinds]
            self.compute(0, 0, slots)
            assert self._others is not None
        for number, group in enumerate(blocks.blocks.groups):
            for i in group.offsets:
                weight = blocks.trained[i]
                assign(weight, group.elements_of(i, state.weights[number]).reshape(weight.shape))
        for position, value in zip(blocks.blocks.others, self._others, strict=True):
            assign(blocks.variables[position], as_array(value))
        blocks.show(state)
        return self._rest(), None


def _address(tensor: Any) -> int:
    return int(as_array(tensor).ctypes.data)
