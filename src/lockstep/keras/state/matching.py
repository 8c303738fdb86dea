"""Matching the arrays of a checkpoint to the variables of a given model."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from lockstep.checkpoint.values import named
from lockstep.keras.state.naming import parts, renamed_slots, renumbered, slot
from lockstep.keras.variables import (
    OUTER_MOMENTUM,
    misfits,
    momentum_of,
    named_arrays,
    optimizers_of,
    seed_positions,
)

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class SavedModel:
    """The state of one of a job's models, as saved in a checkpoint.

    Attributes:
        name: the name of the model in the checkpoint.
        arrays: its arrays, in the checkpoint's order.
        common: the arrays of another model, some of which this model may share.
        trainable_first: whether trainable variables precede the others, regardless of the model's order.
    """

    name: str
    arrays: Mapping[str, Array]
    common: Mapping[str, Array]
    trainable_first: bool


@dataclass(frozen=True)
class Match:
    """Variables of a model, and the values for them from one of a job's models.

    Attributes:
        name: the name of the job's model in the checkpoint.
        renamed: whether some variables have other numbers in their names there.
        variables: the variables by name.
        values: the values by the name of their variable.
    """

    name: str
    renamed: bool
    variables: Mapping[str, Any]
    values: Mapping[str, Array]

    @property
    def misfits(self) -> str:
        """A text on the variables that do not fit, or an empty string."""
        return misfits({name: variable.value for name, variable in self.variables.items()}, self.values)

    def assign(self) -> None:
        """Assign the values to the variables. All must fit."""
        for name, variable in self.variables.items():
            variable.assign(self.values[name])

    def joined(self, other: "Match") -> "Match":
        """Return the union of this and another part of the same model's state."""
        renamed = self.renamed or other.renamed
        return Match(
            self.name, renamed, {**self.variables, **other.variables}, {**self.values, **other.values}
        )


@dataclass(frozen=True)
class _Buffer:
    """A buffer of a PyTorch module, with the interface of a Keras variable."""

    value: Any

    def assign(self, array: Array) -> None:
        """Set the value."""
        self.value.copy_(keras.ops.convert_to_tensor(array))


def match(model: Any, saved: SavedModel) -> Match:
    """Match `saved` to the weights of `model`, and, if those fit, to its optimizers and metrics.

    Unbuilt optimizers of `model` are built for the variables for which `saved` has state. If `model` does not
    have an optimizer, the state of optimizers is ignored. State that does not fit metrics is always ignored.
    """
    weight_names, optimizer_names, rest = parts(list(saved.arrays))
    weights, buffers = _weights(model, saved.trainable_first), _buffers(model)
    paths = renumbered(weight_names, weights)
    matched = _paired(
        model,
        saved,
        {**weights, **buffers},
        paths | {name: name for name in rest if name in buffers},
    )
    if matched.misfits:
        return matched
    if optimizers := optimizers_of(model):
        slots = renamed_slots(optimizer_names, _variables_of(optimizers), paths)
        build_optimizers(model, slots.values())
        variables = _variables_of(optimizers)
        slots = renamed_slots(optimizer_names, variables, paths)
        matched = matched.joined(_paired(model, saved, variables, slots))
    return matched.joined(_metrics(model, saved, rest))


def build_optimizers(model: Any, names: Iterable[str]) -> None:
    """Build the unbuilt optimizers of `model` for the weights for which `names` has optimizer variables."""
    names = list(names)
    for optimizer in optimizers_of(model):
        _build(optimizer, model, names)
    if any(name.startswith(OUTER_MOMENTUM) for name in names):
        momentum_of(model, creates=True)


def _weights(model: Any, trainable_first: bool) -> Mapping[str, Any]:
    # The order affects names only if Keras repeats a path.
    ordered = model.variables
    if trainable_first:
        ordered = [*model.trainable_variables, *model.non_trainable_variables]
    return named_arrays(ordered, ordered)


def _buffers(model: Any) -> Mapping[str, Any]:
    if keras.backend.backend() != "torch":
        return {}
    from lockstep.keras.backends.torch import module_buffers

    return {name: _Buffer(tensor) for name, tensor in module_buffers(model).items()}


def _variables_of(optimizers: Iterable[Any]) -> Mapping[str, Any]:
    unique = {id(variable): variable for optimizer in optimizers for variable in optimizer.variables}
    return named_arrays(list(unique.values()), unique.values())


def _build(optimizer: Any, model: Any, names: Iterable[str]) -> None:
    """Build `optimizer` for the weights for which `names` has optimizer variables."""
    prefixes = {candidate.name for candidate in (optimizer, getattr(optimizer, "inner_optimizer", optimizer))}
    optimizer_names = [name for name in names if name.split("/")[0] in prefixes]
    slots = [
        variable
        for variable in model.trainable_variables
        if any(name.partition("/")[2].startswith(slot(variable.path)) for name in optimizer_names)
    ]
    if slots and not optimizer.built:
        optimizer.build(slots)


def _metrics(model: Any, saved: SavedModel, names: Iterable[str]) -> Match:
    metrics = named_arrays(model.metrics_variables, model.metrics_variables)
    fitting = {
        old: new
        for old, new in renumbered(names, metrics).items()
        if new in metrics and not misfits({new: metrics[new].value}, {new: saved.arrays[old]})
    }
    return _paired(model, saved, {new: metrics[new] for new in fitting.values()}, fitting)


def _paired(model: Any, saved: SavedModel, variables: Mapping[str, Any], new: Mapping[str, str]) -> Match:
    """Pair `variables` with the arrays for which `new` has a name."""
    renamed = any(name != old for old, name in new.items())
    arrays = {name: saved.arrays[old] for old, name in new.items()}
    if not renamed:
        arrays = {name: saved.common[name] for name in variables if name in saved.common} | arrays
    random = seed_positions(model)
    seeds = {id(v) for position, v in enumerate(model.non_trainable_variables) if position in random}
    values = {
        name: _converted(array, variables[name], id(variables[name]) in seeds) if name in variables else array
        for name, array in arrays.items()
    }
    return Match(saved.name, renamed, variables, values)


def _converted(array: Array, variable: Any, is_seed: bool) -> Array:
    """Return integers in the variable's dtype, which depends on the backend, if it can hold them.

    A random generator uses only the lower bits of its state.
    """
    dtype = named(keras.backend.standardize_dtype(variable.value.dtype))
    if dtype is None or array.dtype.kind not in "iu" or dtype.kind not in "iu":
        return array
    converted = array.astype(dtype)
    return converted if is_seed or np.array_equal(converted, array) else array
