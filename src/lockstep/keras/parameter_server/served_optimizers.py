"""The optimizers of a program on parameter servers: copies for some shards, and what is refused.

A server updates its shards with a copy of the program's optimizer, built for these shards. No list of
optimizers says which of their variables belong to which weight. `built_copy` observes it: while Keras builds
the copy, it calls `add_variable_from_reference` with the weight. Variables that are created in any other way
belong to no weight. If there are more of these for more weights, the optimizer is refused.

A variable of an optimizer is a `Slot`: Adam's momentum of variable 3 is (3, 0), its velocity is (3, 1). The
variables that belong to no weight, such as the iterations, have -1 minus the number of the optimizer in place
of the variable.
"""

import re
from collections.abc import Sequence
from typing import Any

import keras

from lockstep.errors import ModelError
from lockstep.keras.backends.common import has_own, refuse_other_weights
from lockstep.keras.backends.contract import Backend, TrainingState
from lockstep.keras.backends.eager_contract import EagerBackend
from lockstep.keras.backends.multi_update import Update, overrides_apply_gradients
from lockstep.keras.parameter_server.server_tables import server_table
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
from lockstep.protocol.parameter_server import Slot
from lockstep.worker.patch_registry import replaced

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
    """Place the variables that optimizers update on servers. Later optimizers do not move earlier ones."""
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


def iterations_of(optimizer: Any) -> Any:
    """Return the variable that counts how often an optimizer was applied, including mere accumulation."""
    return optimizer.variables[0]


def built_copy(optimizer: Any, variables: Sequence[Any]) -> tuple[Any, tuple[Slot, ...]]:
    """Return a new optimizer with the settings of another, built for other variables, and its slots.

    The slots are in the order of the optimizer's variables.
    """
    copy = unbuilt_copy(optimizer)
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


def unbuilt_copy(optimizer: Any) -> Any:
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
    """Raise ModelError for features that parameter servers do not support in a call of `fit`."""
    if model.optimizer.built:
        refuse_other_weights(model, trained_by(model.optimizer))
    _refuse_own_updates(model)
    refuse_optimizer(Update(model.optimizer, model.trainable_variables), shards)


def _refuse_own_updates(model: Any) -> None:
    """Raise ModelError if steps call a method of the optimizer that the servers' copies do not have."""
    optimizer, backend = model.optimizer, keras.backend.backend()
    # Keras's own step calls `apply` on PyTorch, and neither method on JAX.
    calls = backend == "tensorflow" or (backend == "torch" and has_own(model, "train_step"))
    if "apply" in vars(optimizer) or (calls and overrides_apply_gradients(optimizer)):
        name = "apply" if "apply" in vars(optimizer) else "apply_gradients"
        raise ModelError(
            f"{type(optimizer).__name__} has {name} of the program's own, which parameter servers do not "
            "call: override apply(grads, trainable_variables) in its class"
        )


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
            f"the partitioner divides {path!r}, but {name} may not update each element independently; use "
            f"one of {', '.join(_BY_ELEMENT)}, or no variable_partitioner"
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
        return f"{name} may not update each row independently"
    if optimizer.use_ema or optimizer.gradient_accumulation_steps:
        return f"{name} has use_ema or gradient_accumulation_steps, which are for all rows"
    rate = int(isinstance(rate_object(optimizer), keras.Variable))
    if sum(position < 0 for position, _ in slots_of(optimizer, variables)) > 1 + rate:
        return f"{name} has variables that belong to no weight"
    return ""


def refuse_buffers(state: TrainingState) -> None:
    """Raise ModelError for buffers of PyTorch modules, which only some processes would have."""
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
