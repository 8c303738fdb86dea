"""The variables of a model on one parameter server, and the part of the optimizer that updates them."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from lockstep.errors import ModelError
from lockstep.keras.backends.common import refuse_other_weights, replaced
from lockstep.keras.backends.contract import Backend, TrainingState
from lockstep.keras.backends.multi_update import Update
from lockstep.parameter_server.partitioners import Shard

Array = npt.NDArray[Any]
Slot = tuple[int, int]
"""A variable of an optimizer: the position of the variable that it belongs to, -1 if it belongs to none, and
its
number among those of the same position."""

_BY_ELEMENT = ("SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Nadam", "Ftrl", "Lion")
"""Keras's optimizers that update each element of a variable on its own: they can update shards."""

_OF_A_BUILT_OPTIMIZER = frozenset({"_lock", "built"})

_EXCLUDED = ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern")


class ServedVariables:
    """The shards of one server, updated by a copy of the model's optimizer.

    A variable that is not divided is the model's own, so its name, constraint and exclusion from weight decay
    apply.

    Args:
        model: built; its optimizer has the values to begin with.
        shards: of the server.
        backend: makes updates.
    """

    def __init__(self, model: Any, shards: Sequence[Shard], backend: Backend) -> None:
        weights = model.trainable_variables
        self._backend = backend
        self._variables = [
            weights[one.variable] if one.whole else _part(weights[one.variable], one) for one in shards
        ]
        self._optimizer, self.slots = built_copy(model.optimizer, self._variables)
        known = dict(zip(slots_of(model.optimizer, weights), model.optimizer.variables, strict=True))
        for (position, number), variable in zip(self.slots, self._optimizer.variables, strict=True):
            shard = shards[position] if position >= 0 else None
            value = backend.to_numpy(known[(-1 if shard is None else shard.variable, number)].value)
            # A copy: updates reuse the memory of the server's own variables.
            variable.assign(np.array(value if shard is None else shard.part_of(value)))
        self._update = backend.updater(Update(self._optimizer, self._variables))

    def values(self) -> list[Array]:
        """Return copies of the shards."""
        return [np.array(self._backend.to_numpy(variable.value)) for variable in self._variables]

    def slot_values(self) -> list[Array]:
        """Return copies of the variables of the optimizer, in the order of `slots`."""
        return [np.array(self._backend.to_numpy(variable.value)) for variable in self._optimizer.variables]

    def update(self, gradients: Mapping[int, Array]) -> None:
        """Update the shards once, given the gradients by the positions of their shards.

        Without any, only the iterations of the optimizer advance, as on the other servers.
        """
        if not gradients:
            self._optimizer.iterations.assign(self._optimizer.iterations.value + 1)
            return
        self._update([gradients.get(position) for position in range(len(self._variables))])

    def write(self, shards: Mapping[int, Array], slots: Mapping[Slot, Array]) -> None:
        """Replace values of shards, and of variables of the optimizer."""
        for position, value in shards.items():
            self._variables[position].assign(value)
        for slot, variable in zip(self.slots, self._optimizer.variables, strict=True):
            if slot in slots:
                variable.assign(slots[slot])


def built_copy(optimizer: Any, variables: Sequence[Any]) -> tuple[Any, tuple[Slot, ...]]:
    """Return a new optimizer with the settings of another, built for other variables, and its slots."""
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
    """Return a new optimizer with the settings of another, also those that its config leaves out.

    Raises:
        ModelError: it cannot be made from its config.
    """
    schedule = optimizer._learning_rate
    is_variable = isinstance(schedule, keras.Variable)
    try:
        # A schedule is shared and not made from its own config.
        with replaced(optimizer, "_learning_rate", schedule if is_variable else 0.5):
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
        if (
            isinstance(value, settings)
            and name not in _OF_A_BUILT_OPTIMIZER
            and vars(copy).get(name) != value
        ):
            vars(copy)[name] = value
    return copy


def slots_of(optimizer: Any, variables: Sequence[Any]) -> tuple[Slot, ...]:
    """Return the slots of a built optimizer, in the order of its variables."""
    return built_copy(optimizer, variables)[1]


def refuse_unserved(model: Any, shards: Sequence[Shard]) -> None:
    """Raise ModelError for what parameter servers do not support."""
    optimizer = model.optimizer
    name = type(optimizer).__name__
    weights = model.trainable_variables
    if optimizer.built:
        refuse_other_weights(model, optimizer._trainable_variables)
    if hasattr(optimizer, "inner_optimizer"):
        raise ModelError(
            f"{name} scales the loss by what all gradients of a step show, which parameter servers do not "
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
            f" {', '.join(_BY_ELEMENT)}, or MultiWorkerMirroredStrategy"
        )
    divided = next((one.variable for one in shards if not one.whole), None)
    if divided is None:
        return
    path = model.trainable_variables[divided].path
    if name not in _BY_ELEMENT or not type(optimizer).__module__.startswith("keras."):
        raise ModelError(
            f"the partitioner divides {path!r}, but {name} may not update each element on its own; use one "
            f"of {', '.join(_BY_ELEMENT)}, or no variable_partitioner"
        )
    if optimizer.clipnorm is not None or any(getattr(optimizer, excluded, None) for excluded in _EXCLUDED):
        raise ModelError(
            f"the partitioner divides {path!r}, but the optimizer has a clipnorm or "
            "exclude_from_weight_decay, which are for whole variables; remove them, or the "
            "variable_partitioner"
        )
    constrained = next(
        (
            variable.path
            for one in shards
            if not one.whole and (variable := model.trainable_variables[one.variable]).constraint is not None
        ),
        None,
    )
    if constrained is not None:
        raise ModelError(
            f"the partitioner divides {constrained!r}, whose constraint is for the whole variable; remove "
            "one of them"
        )


def refuse_buffers(state: TrainingState) -> None:
    """Raise ModelError for buffers of PyTorch modules, which only some of the processes would have."""
    buffer = next(
        (name for name, one in state.lasting_variables().items() if not hasattr(one, "assign")), None
    )
    if buffer is not None:
        raise ModelError(
            f"{buffer!r} is a buffer of a PyTorch module, which parameter servers do not support: use a "
            "layer of Keras, or MultiWorkerMirroredStrategy"
        )


def shapes_of(variables: Sequence[Any]) -> list[tuple[tuple[int, ...], int]]:
    """Return the shapes of variables, and the sizes of their elements in bytes."""
    return [(tuple(one.shape), _item_bytes(keras.backend.standardize_dtype(one.dtype))) for one in variables]


def _item_bytes(dtype: str) -> int:
    digits = re.search(r"\d+$", dtype)
    return max(1, int(digits[0]) // 8) if digits else 1


def _part(variable: Any, shard: Shard) -> Any:
    value = shard.part_of(keras.ops.convert_to_numpy(variable.value))
    return keras.Variable(value, dtype=variable.dtype, trainable=True, name=f"{variable.name}_{shard.start}")
