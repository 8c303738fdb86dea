"""What the state of a model consists of: its variables and those of its optimizers."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras

from lockstep.errors import CheckpointError


def all_variables(model: Any) -> list[Any]:
    """Return the variables of a model and of its optimizers, each once."""
    variables = [*model.variables, *(v for optimizer in optimizers_of(model) for v in optimizer.variables)]
    return list({id(variable): variable for variable in variables}.values())


def model_state(model: Any) -> Mapping[str, Any]:
    """Return the values of a model's and its optimizers' variables, by path; not within a JAX step."""
    variables = all_variables(model)
    return named_arrays(variables, [variable.value for variable in variables])


def step_state(model: Any) -> Mapping[str, Any]:
    """Return the variables that steps of `model` read and write, by path: those of metrics as well."""
    variables = [*all_variables(model), *model.metrics_variables]
    return named_arrays(variables, variables)


def assign(model: Any, arrays: Mapping[str, Any]) -> None:
    """Give the variables of `step_state` the values of the same names.

    Raises:
        CheckpointError: they do not fit.
    """
    variables = step_state(model)
    refuse_misfits({name: variables[name] for name in arrays if name in variables}, arrays)
    for name, value in arrays.items():
        variables[name].assign(value)


def refuse_misfits(variables: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless there is an array of the same shape for each variable, and no other."""
    for name in sorted(variables.keys() | arrays.keys()):
        shapes = [tuple(one[name].shape) if name in one else None for one in (arrays, variables)]
        if shapes[0] != shapes[1]:
            raise CheckpointError(
                f"the checkpoint has {_shape(shapes[0])} for {name!r} where the model has "
                f"{_shape(shapes[1])}: the script builds another model than the one that was saved"
            )


def named_arrays(variables: Sequence[Any], values: Iterable[Any]) -> Mapping[str, Any]:
    """Pair values with their variables' paths, made unique where Keras repeats one."""
    named: dict[str, Any] = {}
    for variable, value in zip(variables, values, strict=True):
        name = path = variable.path
        copies = 1
        while name in named:
            copies += 1
            name = f"{path} ({copies})"
        named[name] = value
    return named


def seed_positions(model: Any) -> frozenset[int]:
    """Find which of `model.non_trainable_variables` are states of random generators."""
    generators = [seed for layer in model._flatten_layers() for seed in layer._seed_generators]
    states = {id(generator.state) for generator in generators}
    return frozenset(i for i, v in enumerate(model.non_trainable_variables) if id(v) in states)


def optimizers_of(model: Any) -> list[Any]:
    """Return the optimizer that `model` was compiled with, and those it and its layers keep as attributes."""
    found = [getattr(model, "optimizer", None)]
    for layer in model._flatten_layers():
        found.extend(_optimizers(vars(layer).values()))
    return list({id(optimizer): optimizer for optimizer in found if optimizer is not None}.values())


def _optimizers(values: Iterable[Any]) -> list[Any]:
    found = []
    for value in values:
        if isinstance(value, keras.optimizers.Optimizer):
            found.append(value)
        elif isinstance(value, dict):
            found.extend(_optimizers(value.values()))
        elif isinstance(value, list | tuple):
            found.extend(_optimizers(value))
    return found


def _shape(shape: tuple[int, ...] | None) -> str:
    return "nothing" if shape is None else f"the shape {list(shape)}"
