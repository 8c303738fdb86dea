"""The divided update on PyTorch: slots are updated in place, in the shared memory.

The optimizer itself updates the parts of its variables in a block, which replace their values meanwhile. So
its current options count, and a scalar stays a scalar.

Between updates, the optimizer's variables show the shared memory through a private mapping. They have its
values without a copy. A write to them outside of a divided update stays in the process, and the page table
shows it: then all workers fill the shared memory again. Version counters would not be enough: fused kernels,
and writes to `tensor.data` or to the memory of `tensor.numpy()`, do not change them. A write through another
tensor or array that had the memory of a slot before the first step of a `fit` is lost, because it goes to the
old memory. A fork would copy the mapping, not the memory, so the variables get copies before a fork.
"""

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import torch

from lockstep.collectives.shared.divided_state import BlockGroup, DividedState, SlotValue
from lockstep.collectives.shared.pool import PAGEMAP, PrivateMapping, SharedPool
from lockstep.keras.backends.multi_update import Update
from lockstep.keras.backends.optimizer_blocks import (
    BlockPart,
    OptimizerBlocks,
    VariableGroup,
    blocks_of,
    class_attributes,
    clips_by_norm,
    own_methods,
    scales_loss,
    updating_part,
)
from lockstep.keras.backends.torch_tensors import borrowed, to_numpy
from lockstep.keras.private.common import (
    clipped,
    has_weight_decay,
    knowing_finite,
    rate_object,
    stored_value,
    trained_by,
    with_clipped,
    with_parts,
)
from lockstep.system.memory import return_freed_memory
from lockstep.worker.patch_registry import replaced

Array = npt.NDArray[Any]

_EXACT = ("float32", "float64")
"""The dtypes of which an operation computes an element with equal bits wherever a thread begins.

The bits of others, and of the powers in Ftrl, depend on whether the element is in a full vector register.
"""


@dataclass(frozen=True)
class _Shown:
    """A tensor that shows a slot in the shared memory.

    Attributes:
        variable: the optimizer's variable.
        tensor: the variable's value.
        address: the address of the slot in the private mapping.
    """

    variable: Any
    tensor: torch.Tensor
    address: int

    @property
    def lasts(self) -> bool:
        """Whether the variable still shows the slot."""
        return stored_value(self.variable) is self.tensor and self.tensor.data_ptr() == self.address

    def release(self) -> None:
        """Copy the value to memory of this process."""
        if self.tensor.data_ptr() == self.address:
            self.tensor.data = self.tensor.data.clone()


class TorchBlocks:
    """The blocks of an update, and where its slots are."""

    def __init__(self, update: Update, blocks: OptimizerBlocks) -> None:
        self.update = update
        self.blocks = blocks
        self.updating = updating_part(update.optimizer)
        self.trained = trained_by(update.optimizer)
        self._state: DividedState | None = None
        self._mapping: PrivateMapping | None = None
        self._shown: list[_Shown] = []

    @classmethod
    def of(cls, update: Update, replicas: int) -> "TorchBlocks | str":
        """Return the blocks of the update of a built optimizer, or why it cannot be divided."""
        variables = trained_by(update.optimizer)
        if update.call is not None:
            return "the step makes the update in its own way"
        if any(variable.value.device.type != "cpu" for variable in variables):
            return "the weights are on a GPU"
        exact = all(variable.dtype in _EXACT for variable in variables)
        is_ftrl = type(updating_part(update.optimizer)).__name__ == "Ftrl"
        if torch.get_num_threads() > 1 and (is_ftrl or not exact):
            return "several threads share its operations, whose bits depend on where a thread begins"
        if not os.access(PAGEMAP, os.R_OK):
            return f"{PAGEMAP} is not readable"
        blocks = blocks_of(update.optimizer, variables, replicas)
        return blocks if isinstance(blocks, str) else cls(update, blocks)

    @staticmethod
    def decisive(update: Update) -> list[Any]:
        """Return the values on which `of` depends and that the program may change, to compare by identity."""
        optimizer, variables = update.optimizer, trained_by(update.optimizer)
        updating = updating_part(optimizer)
        return [
            update,
            updating,
            *own_methods(optimizer).values(),
            *own_methods(updating).values(),
            *(value for part in (optimizer, updating) for _, value in class_attributes(part)),
            *optimizer.variables,
            *variables,
            *(variable.constraint for variable in variables),
            rate_object(updating),
            updating.weight_decay is None,
            bool(updating.gradient_accumulation_steps),
            clips_by_norm(updating),
            torch.get_num_threads() > 1,
        ]

    @property
    def needs_all_gradients(self) -> bool:
        """Whether the update changes variables of a weight without a gradient."""
        return bool(self.updating.use_ema or self.updating.gradient_accumulation_steps)

    def finite(self, gradients: Mapping[int, torch.Tensor]) -> Any:
        """Return whether all gradients are finite, or None if this does not matter."""
        optimizer = self.update.optimizer
        return optimizer.check_finite(list(gradients.values())) if scales_loss(optimizer) else None

    def clipped(self, gradients: Mapping[int, torch.Tensor]) -> Mapping[int, torch.Tensor]:
        """Return gradients of whole variables, clipped if clipping is by norms, which need all elements."""
        if not clips_by_norm(self.updating):
            return gradients
        optimizer, of_all = self.update.optimizer, list(gradients.values())
        if scales_loss(optimizer):
            of_all = [keras.ops.divide(gradient, optimizer.dynamic_scale) for gradient in of_all]
        if (scale := self.updating.loss_scale_factor) is not None:
            of_all = [gradient / scale for gradient in of_all]
        return dict(zip(gradients, clipped(self.updating, of_all), strict=True))

    def decays(self, variables: Sequence[Any]) -> bool:
        """Whether weight decay applies to some of these variables."""
        return any(has_weight_decay(self.updating, variable) for variable in variables)

    @property
    def others(self) -> list[Any]:
        """The optimizer's variables that are not slots."""
        variables = self.update.optimizer.variables
        return [variables[i] for i in self.blocks.others]

    def are_shown(self, state: DividedState) -> bool:
        """Whether the optimizer's variables have the values of the slots in this memory."""
        if self._state is not state or self._mapping is None:
            return False
        return all(shown.lasts for shown in self._shown) and not self._mapping.is_written()

    def show(self, state: DividedState, mapping: PrivateMapping) -> None:
        """Let the optimizer's variables show the slots in another mapping of the memory of `state`."""
        variables, shown = self.update.optimizer.variables, []
        private = DividedState(state.layout, mapping.bytes)
        for position, (group, kind, i) in self.blocks.slots.items():
            tensor = stored_value(variables[position])
            array = self.blocks.groups[group].elements_of(i, private.slots[group][kind])
            tensor.data = borrowed(array).reshape(tensor.shape)
            shown.append(_Shown(variables[position], tensor, tensor.data_ptr()))
        self._state, self._mapping, self._shown = state, mapping, shown
        _showing.add(self)
        # This is the memory of the slots, which the allocator would retain.
        return_freed_memory()

    def release(self) -> None:
        """Let the optimizer's variables have their values in memory of this process."""
        # Another thread may fork meanwhile.
        released, self._shown = self._shown, []
        self._state, self._mapping = None, None
        for shown in released:
            shown.release()


_showing: weakref.WeakSet[TorchBlocks] = weakref.WeakSet()
"""Those whose slots may be shown."""


def _release_all() -> None:
    """Let variables have their values in memory of this process, which a fork copies.

    In the new process, they would otherwise change with each update.
    """
    for blocks in list(_showing):
        blocks.release()


os.register_at_fork(before=_release_all)


class TorchBlockUpdate:
    """One update of a step, by blocks; a `lockstep.keras.backends.contract.BlockUpdate`.

    Args:
        blocks: the blocks of the update.
        gradients: the gradients of all replicas, by the positions of the variables that have one.
        rest: applies the rest of the total; returns the logs.
    """

    def __init__(self, blocks: TorchBlocks, gradients: Mapping[int, Array], rest: Callable[[], Any]) -> None:
        self._blocks = blocks
        with torch.no_grad():
            whole = {i: borrowed(gradient) for i, gradient in gradients.items()}
            self._finite, clipped = blocks.finite(whole), blocks.clipped(whole)
        self._gradients = {i: gradient.reshape(-1) for i, gradient in clipped.items()}
        self._rest = rest
        groups = blocks.blocks.groups
        self._new_weights = [np.zeros(blocks.blocks.elements, group.dtype) for group in groups]
        self._flat_weights = [to_numpy(variable.value).reshape(-1) for variable in blocks.trained]
        self._others: list[torch.Tensor] = []

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
        """A function that moves the values of the optimizer's variables to memory of this process."""
        return self._blocks.release

    @property
    def versions(self) -> int:
        """One, because PyTorch updates weights in place, so they are not in shared memory."""
        return 1

    def prepare(self) -> None:
        """Do nothing: nothing is compiled."""

    def forget_values(self) -> None:
        """Do nothing: the state is in variables."""

    def has(self, state: DividedState) -> bool:
        """Whether this memory has the values of the slots."""
        return self._blocks.are_shown(state)

    def adopt(self, state: DividedState, updates: int, pool: SharedPool) -> bool:
        """Return False: variables show the shared slots only after an update."""
        return False

    def own_values(self) -> None:
        """Do nothing: each worker has its own weights, and `release` copies the slots."""

    def own_slots(self) -> Iterator[SlotValue]:
        """Yield this worker's values of the slots."""
        variables = self._blocks.update.optimizer.variables
        return self._blocks.blocks.values(lambda position: to_numpy(variables[position].value))

    def fill(self, state: DividedState, block: int) -> None:
        """Write the values of the slots of a block."""
        group, start, stop = state.layout.places[block]
        variables, kinds = self._blocks.updating, self._group(group).kinds
        for kind, slot in zip(kinds, state.slots[group], strict=True):
            flat = {
                i: to_numpy(vars(variables)[kind][i].value).reshape(-1) for i in self._group(group).offsets
            }
            np.copyto(slot[start:stop], self._group(group).gathered(start // self.elements, flat))

    def _group(self, group: int) -> VariableGroup:
        return self._blocks.blocks.groups[group]

    def compute(self, group: int, number: int, slots: Sequence[Array]) -> Sequence[Array]:
        """Update the slots of a block in place, given its number in its group; return weights and slots."""
        of, new_weights = self._group(group), self._new_weights[group]
        for variable, start, stop, at in of.parts[number]:
            new_weights[at : at + stop - start] = self._flat_weights[variable][start:stop]
        self._apply(of, of.parts[number], new_weights, slots, self._gradients)
        return [new_weights, *slots]

    def _apply(
        self,
        group: VariableGroup,
        parts: Sequence[BlockPart],
        weights: Array,
        slots: Sequence[Array],
        gradients: Mapping[int, torch.Tensor],
    ) -> None:
        """Let the optimizer update parts of its variables in arrays with the elements of a block."""
        updating, trained = self._blocks.updating, self._blocks.trained
        values: list[tuple[Any, torch.Tensor]] = []
        present = []
        tensors = [borrowed(array) for array in (weights, *slots)]

        def of_variable(i: int) -> list[Any]:
            return [trained[i], *(vars(updating)[kind][i] for kind in group.kinds)]

        for i, start, stop, at in parts:
            whole = stop - start == group.sizes[i]
            shape = trained[i].shape if whole else (stop - start,)
            values += [
                (variable, tensor[at : at + stop - start].reshape(shape))
                for variable, tensor in zip(of_variable(i), tensors, strict=True)
            ]
            if i in gradients:
                present.append((trained[i], gradients[i][start:stop].reshape(shape)))
        if not present:
            return
        absent = set[int]()
        first = next(iter(self._gradients))
        if trained[first].dtype != group.dtype.name:
            # Keras computes numbers, such as the learning rate, with the dtype of the first variable.
            absent.add(first)
            present.insert(0, (trained[first], self._gradients[first][:0]))
        if self._blocks.needs_all_gradients:
            # The optimizer also changes variables of other weights.
            absent |= set(range(len(trained))) - {part.variable for part in parts}
        for i in absent:
            empty = torch.zeros(0, dtype=stored_value(trained[i]).dtype)
            values += [(variable, empty) for variable in of_variable(i)]
        others = [(variable, variable.value.detach().clone()) for variable in self._blocks.others]
        of_block = [gradient for _, gradient in present]
        update = replace(
            self._blocks.update,
            variables=[variable for variable, _ in present],
            plain=self._blocks.update.kernel is None,
        )
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(with_parts([*values, *others]))
            if updating.weight_decay is not None and not self._blocks.decays(update.variables):
                # Keras raises an error if no variable decays.
                stack.enter_context(replaced(updating, "weight_decay", None))
            if self._finite is not None:
                stack.enter_context(knowing_finite(update.optimizer, self._finite))
            if clips_by_norm(updating):
                stack.enter_context(with_clipped(updating, of_block))
            update.apply(of_block)
        self._others = [value for _, value in others]

    def finish(self, state: DividedState, updates: int, pool: SharedPool) -> tuple[Any, Any]:
        """Return (logs, None), once all blocks are updated."""
        blocks = self._blocks
        if not self._others:
            # This worker has updated no weight.
            i = next(i for i, gradient in self._gradients.items() if len(gradient))
            of = next(group for group in blocks.blocks.groups if i in group.offsets)
            weight, *slots = (np.zeros(1, of.dtype) for _ in ("weight", *of.kinds))
            self._apply(of, [BlockPart(i, 0, 1, 0)], weight, slots, {i: self._gradients[i][:1]})
        with torch.no_grad():
            for number, group in enumerate(blocks.blocks.groups):
                for i in group.offsets:
                    tensor = blocks.trained[i].value
                    new = borrowed(group.elements_of(i, state.weights_after(updates)[number]))
                    tensor.copy_(new.reshape(tensor.shape))
            for variable, value in zip(blocks.others, self._others, strict=True):
                variable.assign(value)
        if not blocks.are_shown(state):
            blocks.show(state, pool.map_privately(state.layout.size))
        return self._rest(), None
