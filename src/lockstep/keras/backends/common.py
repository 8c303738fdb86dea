"""Creates variables before the first step and refuses unsupported models, for all backends.

Keras on JAX and PyTorch calls a model with symbolic inputs to create its variables. On TensorFlow, the first
step creates them, which also works for models that cannot be called because their step calls their layers.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

import keras

from lockstep.errors import ModelError
from lockstep.keras import assignments
from lockstep.keras.backends.contract import StepKind
from lockstep.keras.backends.multi_update import UpdateCall
from lockstep.keras.private.common import build_symbolically, layers_of
from lockstep.keras.variables import optimizers_of
from lockstep.worker.patch_registry import replaced
from lockstep.worker.script import program_line


def without_summaries() -> AbstractContextManager[None]:
    """Within the block, `tf.summary` does not write, because a part of the program is only tried."""
    if keras.backend.backend() != "tensorflow":
        return nullcontext()
    from lockstep.keras.private.tensorflow import summaries_recorded_if

    return summaries_recorded_if(lambda: False)


def refuse_unequal_state(label: str, dtype: str, path: str) -> NoReturn:
    """Raise ModelError: in the step `label`, replicas set state that is not floating-point differently."""
    raise ModelError(
        f"{label}: replicas set the {dtype} variable {path!r} to different values: only floating-point layer "
        "state can be averaged over replicas; keep counts of examples in a metric, or in a float32 variable"
    )


def refuse_overwriting_gradients(model: Any) -> None:
    """Raise ModelError if a trainable variable is overwritten by its gradient instead of updated."""
    for variable in model.trainable_variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise ModelError(
                f"variable {variable.path!r} is overwritten by its gradient (float8 training), "
                "which cannot be averaged over replicas"
            )


def refuse_synchronized_normalization(model: Any) -> None:
    """Raise ModelError for layers that ask for the statistics of the global batch."""
    for layer in layers_of(model):
        if getattr(layer, "synchronized", False):
            raise ModelError(
                f"layer {layer.path!r} has synchronized=True, but statistics are computed per replica: "
                "remove it, or use fewer replicas with more examples each"
            )


def refuse_stateful_layers(model: Any) -> None:
    """Raise ModelError for layers that keep a state for each example of a batch of fixed size."""
    for layer in layers_of(model):
        if getattr(layer, "stateful", False):
            raise ModelError(
                f"layer {layer.path!r} is stateful: it keeps a state for each example of a fixed batch, "
                "which replicas split; give it stateful=False, or run with one replica (--replicas 1)"
            )


def refuse_misfit(model: Any, examples: int, whole: int, error: Exception) -> NoReturn:
    """Raise ModelError: the step of a replica has failed, and the same step with more rows has not.

    Args:
        model: the model of the step.
        examples: the number of the replica's rows.
        whole: the number of rows of the batch, with which the step succeeds.
        error: the error of the replica's step.
    """
    fixed = [
        layer.name
        for layer in layers_of(model)
        if isinstance(layer, keras.layers.InputLayer) and layer.batch_shape[0] == whole
    ]
    line = program_line(error)
    location = f" at {line}" if line else ""
    if fixed:
        cause = f"the input {fixed[0]!r} of the model has a fixed batch of {whole}"
        advice = "give it a shape without a batch size"
    else:
        cause = f"the program expects the rows of the whole batch{location}"
        advice = "take their number from the tensor, as in ops.shape(x)[0]"
    raise ModelError(
        f"the step of a replica, which has {examples} of the {whole} rows of a batch, failed "
        f"({type(error).__name__}), but succeeds with {whole} rows: {cause}, which replicas split; {advice}, "
        "or run with one replica (--replicas 1)"
    ) from error


def shapes_of(outputs: Any) -> list[tuple[int, ...]]:
    """Return the shapes of the leaves of a nest of outputs."""
    return [tuple(getattr(leaf, "shape", ())) for leaf in keras.tree.flatten(outputs)]


def refuse_other_weights(model: Any, trained: Sequence[Any]) -> None:
    """Raise ModelError if the trainable variables of `model` are not those of its prepared steps."""
    prepared = {id(variable): variable.path for variable in trained}
    present = {id(variable): variable.path for variable in model.trainable_variables}
    if prepared.keys() == present.keys():
        return
    frozen = [path for key, path in prepared.items() if key not in present]
    thawed = [path for key, path in present.items() if key not in prepared]
    change = f"{frozen[0]!r} is no longer trainable" if frozen else f"{thawed[0]!r} has become trainable"
    raise ModelError(
        f"the variable {change}, but model {model.name!r} was not compiled since: after a change of "
        "`trainable`, call model.compile(...) again, in the strategy's scope"
    )


def build_by_call(model: Any, kind: StepKind, batch: Callable[[], Any]) -> None:
    """Create variables by calling the model, its metrics and its losses, as Keras does before a loop."""
    if kind != "predict":
        build_symbolically(model, batch)
    elif not model.built:
        with keras.StatelessScope():
            model(keras.utils.unpack_x_y_sample_weight(batch())[0])


def has_own(model: Any, method: str) -> bool:
    """Whether the model overrides a method of Keras, in its class or by an attribute."""
    return getattr(type(model), method) is not getattr(keras.Model, method) or method in vars(model)


@contextmanager
def without_effects(model: Any) -> Iterator[None]:
    """Within the block, a step may run eagerly without effects other than creating variables.

    Optimizers only create their variables, and assigned variables get their old values back.
    """
    first = _FirstValues()
    assignments.install()
    with ExitStack() as stack:
        for optimizer in optimizers_of(model):
            stack.enter_context(
                replaced(optimizer, "apply", partial(_only_build, optimizer, optimizer.apply))
            )
        try:
            with assignments.observed_by(first):
                yield
        finally:
            for variable, value in first.values.values():
                variable.assign(value)


class _FirstValues:
    """The values of variables before their first assignments, by the variables' ids; a `VariableObserver`."""

    def __init__(self) -> None:
        self.values: dict[int, tuple[Any, Any]] = {}

    def on_create(self, variable: Any) -> None:
        """Do nothing: a new variable keeps its first value."""

    def on_assign(self, variable: Any) -> None:
        """Save the value of a variable before its first assignment."""
        if id(variable) not in self.values:
            self.values[id(variable)] = variable, variable.numpy()


def _only_build(optimizer: Any, apply: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    _, variables = UpdateCall.of("apply", apply, args, kwargs).gradients_and_variables
    if variables is not None and not optimizer.built:
        optimizer.build(variables)
