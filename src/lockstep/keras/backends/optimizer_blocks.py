"""An elementwise update in blocks of one shape, which `lockstep.keras.fit.divided_update` divides.

Variables with one dtype, and with or without weight decay, form a group. Their elements are consecutive, each
variable begins at a multiple of `ALIGNED` elements, and a block has `BLOCK` elements. So one compiled
function can update every block of a group. It is the update of a stand-in: an optimizer of the same class and
settings that was built for one variable with the shape of a block. A backend that does not compile updates
the parts of the variables in a block with the optimizer itself.

The variables of an optimizer are its slots, one of each kind for each weight (Adam's moments, for example),
and a few others, such as the number of iterations. The latter change in the same way in every block, so each
worker keeps its own.

A `LossScaleOptimizer` lets another optimizer update if all gradients are finite. This condition, and the
norms of the gradients, depend on all elements. Each worker has the total, so it computes both by itself.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import keras
import ml_dtypes  # noqa: F401  (NumPy then knows bfloat16)
import numpy as np
import numpy.typing as npt

from lockstep.collectives.shared.divided_state import BlockGroup, SlotValue
from lockstep.keras.private.common import has_weight_decay, rate_object
from lockstep.keras.python_values import is_of_keras
from lockstep.keras.variables import named_arrays

BLOCK = 1 << (18 if keras.backend.backend() == "torch" else 16)
"""The largest number of elements of a block. In a small model, each replica has about one block.

On PyTorch, the Python of an update takes as long as its arithmetic for this many elements.
"""
ALIGNED = 64
"""Elements: what the backend takes without a copy begins at a multiple of a cache line. A part of a variable
begins at a multiple, too, so that an operation on it puts the same elements together into vector registers.
"""

_ELEMENTWISE = frozenset(
    ["SGD", "Adam", "AdamW", "Adamax", "RMSprop", "Adagrad", "Adadelta", "Lion", "Ftrl", "Nadam"]
)
"""Keras's optimizers whose blocks have the bits of the whole update."""
_TORCH_DECORATORS = "torch.utils._contextlib"
"""The module of `torch.no_grad`, with which Keras decorates methods."""

Array = npt.NDArray[Any]


class BlockPart(NamedTuple):
    """The elements `start <= i < stop` of a flattened variable, and where they begin in a block."""

    variable: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class VariableGroup:
    """Variables that one function updates.

    Attributes:
        elements: the number of elements of a block.
        dtype: the dtype of all of them, in NumPy's form.
        decays: whether weight decay applies to all of them, or to none.
        kinds: the names of the slots.
        offsets: for each variable, by its position, the element at which it begins.
        sizes: the number of elements of each variable, likewise.
    """

    elements: int
    dtype: np.dtype[Any]
    decays: bool
    kinds: tuple[str, ...]
    offsets: dict[int, int] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)

    @cached_property
    def blocks(self) -> int:
        """The number of blocks that contain the elements of all variables."""
        end = max(offset + self.sizes[i] for i, offset in self.offsets.items())
        return -(-end // self.elements)

    @cached_property
    def parts(self) -> tuple[tuple[BlockPart, ...], ...]:
        """The parts of variables in each block."""
        parts: list[list[BlockPart]] = [[] for _ in range(self.blocks)]
        size = self.elements
        for i, offset in self.offsets.items():
            stop = offset + self.sizes[i]
            for block in range(offset // size, -(-stop // size)):
                first, last = max(offset, block * size), min(stop, (block + 1) * size)
                if first < last:
                    parts[block].append(BlockPart(i, first - offset, last - offset, first - block * size))
        return tuple(map(tuple, parts))

    def elements_of(self, variable: int, array: Array) -> Array:
        """Return the elements of a variable, by its position, in an array of the group."""
        return array[self.offsets[variable] :][: self.sizes[variable]]

    def gathered(self, block: int, arrays: Mapping[int, Array]) -> Array:
        """Return a block of flat arrays of the variables, in their dtype; unused elements are zero."""
        parts = self.parts[block]
        if len(parts) == 1 and parts[0].stop - parts[0].start == self.elements:
            variable, start, stop, _ = parts[0]
            return arrays[variable][start:stop]
        gathered = np.zeros(self.elements, arrays[next(iter(self.offsets))].dtype)
        for variable, start, stop, at in parts:
            gathered[at : at + stop - start] = arrays[variable][start:stop]
        return gathered


@dataclass(frozen=True)
class OptimizerBlocks:
    """The division of an optimizer's update into blocks.

    Attributes:
        elements: the number of elements of a block.
        groups: the variables, by group.
        slots: for each variable of the optimizer that is a slot, by its position: the group, the number of
            its kind, and the position of its weight.
        others: the positions of the optimizer's other variables.
        names: the names of the optimizer's variables.
    """

    elements: int
    groups: tuple[VariableGroup, ...]
    slots: dict[int, tuple[int, int, int]]
    others: tuple[int, ...]
    names: tuple[str, ...]

    def values(self, value: Callable[[int], Array]) -> Iterator[SlotValue]:
        """Yield the slots, whose values `value` returns by position."""
        for position, (group, kind, i) in self.slots.items():
            start = self.groups[group].offsets[i]
            yield SlotValue(self.names[position], group, kind, start, value(position).reshape(-1))

    @property
    def block_groups(self) -> tuple[BlockGroup, ...]:
        """The groups, as shared memory has them."""
        return tuple(BlockGroup(g.blocks, g.dtype, len(g.kinds)) for g in self.groups)


def updating_part(optimizer: Any) -> Any:
    """Return the optimizer that updates weights: the one in a `LossScaleOptimizer`, or the optimizer."""
    return optimizer.inner_optimizer if scales_loss(optimizer) else optimizer


def scales_loss(optimizer: Any) -> bool:
    """Whether this is a `LossScaleOptimizer` of Keras."""
    return type(optimizer) is keras.optimizers.LossScaleOptimizer


def clips_by_norm(optimizer: Any) -> bool:
    """Whether an optimizer that updates weights clips gradients by norms."""
    return bool(optimizer.clipnorm or optimizer.global_clipnorm)


def hindrance(optimizer: Any, variables: Sequence[Any]) -> str:
    """Return why the update of these variables cannot be cut into blocks, or an empty string if it can."""
    updating = updating_part(optimizer)
    kind = type(updating)
    if kind.__name__ not in _ELEMENTWISE or not kind.__module__.startswith("keras."):
        return f"blocks of {kind.__name__} do not have its bits"
    if methods := [name for part in (optimizer, updating) for name in _replaced_methods(part)]:
        return f"the program replaces {kind.__name__}.{min(methods)}"
    if not any(0 not in variable.shape for variable in variables):
        return "it updates no weights"
    if any(variable.constraint is not None for variable in variables):
        return "a weight has a constraint"
    if any(getattr(variable, "overwrite_with_gradient", False) for variable in variables):
        return "a weight takes the value of its gradient"
    source = rate_object(updating)
    if not isinstance(source, keras.Variable | keras.optimizers.schedules.LearningRateSchedule):
        return "its learning rate is a function"
    if updating.gradient_accumulation_steps and clips_by_norm(updating):
        return "it clips sums of gradients by their norms"
    return ""


def own_methods(optimizer: Any) -> dict[str, Any]:
    """Return the methods with which the program has replaced those of the optimizer's class."""
    kind = type(optimizer)
    return {name: value for name, value in vars(optimizer).items() if callable(getattr(kind, name, None))}


def class_attributes(optimizer: Any) -> list[tuple[str, Any]]:
    """Return the names and values of the attributes that the optimizer's class and its bases define."""
    return [item for kind in type(optimizer).__mro__[:-1] for item in vars(kind).items()]


def _replaced_methods(optimizer: Any) -> list[str]:
    """Return the names of methods that the program has replaced, in the optimizer or in its classes."""
    of_classes = [name for name, value in class_attributes(optimizer) if _is_of_program(value)]
    return [*own_methods(optimizer), *of_classes]


def _is_of_program(value: Any) -> bool:
    """Whether an attribute of a class is a method that neither Keras nor Lockstep defines.

    `functools.wraps` copies the `__module__` of a method, so the module of the method's globals counts.
    """
    if isinstance(value, property):
        return any(map(_is_of_program, filter(None, (value.fget, value.fset, value.fdel))))
    if isinstance(value, classmethod | staticmethod):
        return _is_of_program(value.__func__)
    is_method = callable(value) or hasattr(type(value), "__get__")
    if not is_method or inspect.isgetsetdescriptor(value):
        return False
    module = getattr(value, "__globals__", {}).get("__name__", "")
    if module == _TORCH_DECORATORS:
        return _is_of_program(value.__wrapped__)
    return not is_of_keras(module)


def blocks_of(optimizer: Any, variables: Sequence[Any], replicas: int) -> OptimizerBlocks | str:
    """Return the division of an optimizer's update of variables, or why there is none.

    The division depends on the number of replicas, not on the number of workers.
    """
    if why := hindrance(optimizer, variables):
        return why
    updating = updating_part(optimizer)
    positions = {id(variable): i for i, variable in enumerate(optimizer.variables)}
    kinds = [
        name
        for name, value in vars(updating).items()
        if isinstance(value, list)
        and len(value) == len(variables) > 0
        and all(
            id(slot) in positions and slot.shape == weight.shape and slot.dtype == weight.dtype
            for slot, weight in zip(value, variables, strict=True)
        )
    ]
    sizes = [int(np.prod(variable.shape, dtype=np.int64)) for variable in variables]
    elements = min(BLOCK, _aligned(-(-sum(map(_aligned, sizes)) // replicas)))
    groups: dict[tuple[str, bool], VariableGroup] = {}
    slots: dict[int, tuple[int, int, int]] = {}
    ends = dict[tuple[str, bool], int]()
    for i, variable in enumerate(variables):
        decays = updating.weight_decay is not None and has_weight_decay(updating, variable)
        key = variable.dtype, decays
        if key not in groups:
            groups[key] = VariableGroup(elements, np.dtype(variable.dtype), decays, tuple(kinds))
        groups[key].offsets[i], groups[key].sizes[i] = ends.get(key, 0), sizes[i]
        ends[key] = ends.get(key, 0) + _aligned(sizes[i])
        for number, kind in enumerate(kinds):
            slots[positions[id(vars(updating)[kind][i])]] = list(groups).index(key), number, i
    others = tuple(i for i in range(len(optimizer.variables)) if i not in slots)
    names = tuple(named_arrays(optimizer.variables, optimizer.variables))
    return OptimizerBlocks(elements, tuple(groups.values()), slots, others, names)


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
