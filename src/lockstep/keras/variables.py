"""The state of a model: its variables and those of its optimizers."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import keras
import numpy as np

from lockstep.collectives.shared.pool import SharedPool
from lockstep.errors import CheckpointError
from lockstep.keras.private.common import layers_of, seed_generators
from lockstep.system.prose import first_of

_SHOWN = 4
"""Maximum names of each kind that a message lists."""


class VariableState:
    """The `lockstep.keras.backends.contract.TrainingState` of a model whose state is in variables."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def published(self, state: Any) -> AbstractContextManager[None]:
        """Do nothing, because the variables are the state."""
        return nullcontext()

    def present(self) -> Any:
        """Return None, because the state is in variables."""

    def named_state(self, state: Any) -> Mapping[str, Any]:
        """Return the variables that steps read and write, by path."""
        return {name: variable.value for name, variable in step_state(self._model).items()}

    def load(
        self,
        state: Any,
        arrays: Mapping[str, Any],
        *,
        in_place: bool = False,
        shared: SharedPool | None = None,
    ) -> Any:
        """Assign the values of `arrays` to the variables."""
        assign(self._model, arrays, whole=True)

    def prepare_load(self, state: Any) -> None:
        """Do nothing, because values are assigned to variables."""

    def lasting_variables(self) -> Mapping[str, Any]:
        """Return the variables of the model and its optimizers, by path."""
        variables = all_variables(self._model)
        return named_arrays(variables, variables)

    def lasting_values(self, state: Any, variables: Mapping[str, Any]) -> Sequence[Any]:
        """Return the present values of variables."""
        return [
            variable.value if hasattr(variable, "assign") else variable for variable in variables.values()
        ]


class NamedVariables(VariableState):
    """Variables that do not belong to a model, by name.

    Attributes:
        name: the common name of all variables.
        variables: the variables.
    """

    def __init__(self, name: str, variables: Mapping[str, Any]) -> None:
        super().__init__(self)
        self.name, self.variables = name, list(variables.values())
        self._named = variables

    def lasting_variables(self) -> Mapping[str, Any]:
        """Return the variables, by name."""
        return self._named


OUTER_MOMENTUM = "outer_momentum/"
"""The beginning of the paths of the variables of `momentum_of`."""

_momenta: "WeakKeyDictionary[Any, list[Any]]" = WeakKeyDictionary()


def momentum_of(model: Any, *, creates: bool = False) -> list[Any]:
    """Return the momentum of the outer optimizer, a variable for each weight of a model that trains.

    Args:
        model: the model, built if `creates`.
        creates: whether to create the variables; otherwise there may be none.
    """
    if creates and model not in _momenta:
        with keras.name_scope(OUTER_MOMENTUM.removesuffix("/")):
            _momenta[model] = [
                keras.Variable(
                    keras.ops.zeros(weight.shape, weight.dtype),
                    dtype=weight.dtype,
                    trainable=False,
                    name=weight.path.replace("/", "_"),
                )
                for weight in model.trainable_variables
            ]
    return _momenta.get(model, [])


def forget_momentum(model: Any) -> None:
    """Forget the momentum of a model, because it is compiled again."""
    _momenta.pop(model, None)


def all_variables(model: Any) -> list[Any]:
    """Return the variables of a model and of its optimizers, each once."""
    if isinstance(model, NamedVariables):
        return list(model.variables)
    variables = [*model.variables, *(v for optimizer in optimizers_of(model) for v in optimizer.variables)]
    variables += momentum_of(model)
    return list({id(variable): variable for variable in variables}.values())


def model_state(model: Any) -> Mapping[str, Any]:
    """Return the values of a model's and its optimizers' variables, by path; not within a JAX step."""
    variables = all_variables(model)
    return named_arrays(variables, [variable.value for variable in variables])


def step_state(model: Any) -> Mapping[str, Any]:
    """Return the variables that steps of `model` read and write, by path, including those of metrics."""
    variables = [*all_variables(model), *model.metrics_variables]
    return named_arrays(variables, variables)


def assign(model: Any, arrays: Mapping[str, Any], *, whole: bool = False) -> None:
    """Assign values to the variables of `step_state` with the same names.

    Args:
        model: the model, built, with built optimizers.
        arrays: the values by the names of `step_state`.
        whole: whether there must be a value for every variable.

    Raises:
        CheckpointError: the values do not fit. Then none is assigned.
    """
    variables = step_state(model)
    expected = variables if whole else {name: variables[name] for name in arrays if name in variables}
    refuse_misfits(expected, arrays)
    for name, value in arrays.items():
        # On JAX, a variable may take over the memory of the value that it is assigned. Other code may change
        # this.
        variables[name].assign(np.array(value))


def refuse_misfits(variables: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless there is exactly one array of the same shape and dtype per variable."""
    if text := misfits(variables, arrays):
        raise CheckpointError(
            f"the script builds a different model from the saved one: {text}. To resume, build "
            "and compile the model as before; to start over, give another --checkpoint folder"
        )


def misfits(expected: Mapping[str, Any], arrays: Mapping[str, Any]) -> str:
    """Return a text on arrays without a counterpart of the same shape and dtype, or an empty string.

    Args:
        expected: the variables of a model, or their values, by name. In a call, variables may have no values.
        arrays: the arrays of a checkpoint, by name.
    """
    differing = [
        f"{name!r} ({' '.join(_form(arrays[name]))} in the checkpoint, {' '.join(_form(value))} in the model)"
        for name, value in expected.items()
        if name in arrays and not _alike(_form(arrays[name]), _form(value))
    ]
    names_by_problem = {
        "of another shape or dtype": differing,
        "missing in the checkpoint": [repr(name) for name in expected if name not in arrays],
        "missing in the model": [repr(name) for name in arrays if name not in expected],
    }
    return "; ".join(
        f"{problem}: {first_of(names, _SHOWN)}" for problem, names in names_by_problem.items() if names
    )


def named_arrays(variables: Sequence[Any], values: Iterable[Any]) -> Mapping[str, Any]:
    """Pair values with their variables' paths, made unique if Keras repeats one."""
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
    """Return the positions in `model.non_trainable_variables` of states of random generators."""
    generators = [seed for layer in layers_of(model) for seed in seed_generators(layer)]
    states = {id(generator.state) for generator in generators}
    return frozenset(i for i, v in enumerate(model.non_trainable_variables) if id(v) in states)


def flat_metrics(metrics: Iterable[Any]) -> list[Any]:
    """Return the metrics, with the elements of containers of metrics instead of the containers."""
    flat = []
    for metric in metrics:
        inner = getattr(metric, "metrics", None)
        flat.extend(flat_metrics(inner) if inner else [metric])
    return flat


def optimizers_of(model: Any) -> list[Any]:
    """Return the optimizer of `model`, and the optimizers that it and its layers have as attributes."""
    optimizers = [getattr(model, "optimizer", None)]
    for layer in layers_of(model):
        optimizers.extend(_optimizers(vars(layer).values()))
    return list({id(optimizer): optimizer for optimizer in optimizers if optimizer is not None}.values())


def _optimizers(values: Iterable[Any]) -> list[Any]:
    optimizers = []
    for value in values:
        if isinstance(value, keras.optimizers.Optimizer):
            optimizers.append(value)
        elif isinstance(value, dict):
            optimizers.extend(_optimizers(value.values()))
        elif isinstance(value, list | tuple):
            optimizers.extend(_optimizers(value))
    return optimizers


def _form(array: Any) -> tuple[str, str]:
    return keras.backend.standardize_dtype(array.dtype), str(list(array.shape))


_ON_TORCH = {"uint16": "int32", "uint32": "int64"}
"""The dtypes in which PyTorch stores variables of dtypes that it lacks. The variables report the latter."""


def _alike(first: tuple[str, str], second: tuple[str, str]) -> bool:
    # On JAX, a variable requested with 64 bits usually has 32, but reports 64.
    if keras.backend.backend() == "jax":
        first, second = ((dtype.replace("64", "32"), shape) for dtype, shape in (first, second))
    if keras.backend.backend() == "torch":
        first, second = ((_ON_TORCH.get(dtype, dtype), shape) for dtype, shape in (first, second))
    return first == second
