"""What the adapters of all backends share: replaced methods, making variables before a first step, limits.

Keras on JAX and PyTorch calls a model on symbols to make its variables. On TensorFlow it leaves them to the
first step, which works for models that cannot be called: those whose own step calls their parts.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import keras

from lockstep.errors import LockstepError, ModelError
from lockstep.keras import assignments
from lockstep.keras.backends.contract import Kind
from lockstep.keras.variables import optimizers_of


@contextmanager
def replaced(owner: Any, method: str, replacement: Any) -> Iterator[None]:
    """Within the block `owner.method` is `replacement`."""
    # Past the owner's __setattr__, which tracks what it is given.
    attributes = vars(owner)
    before = {method: attributes[method]} if method in attributes else {}
    attributes[method] = replacement
    try:
        yield
    finally:
        del attributes[method]
        attributes.update(before)


def refuse_integer_state(variable: Any) -> None:
    """Raise ModelError: the step changes layer state that is not floating-point."""
    raise ModelError(
        f"the step changes the {variable.dtype} variable {variable.path!r}: only floating-point layer state "
        "can be averaged over replicas; keep counters in a metric, or in a float32 variable"
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
    for layer in model._flatten_layers():
        if getattr(layer, "synchronized", False):
            raise ModelError(
                f"layer {layer.path!r} has synchronized=True, but statistics are computed per replica: "
                "remove it, or use fewer replicas with more examples each"
            )


def refuse_stateful_layers(model: Any) -> None:
    """Raise ModelError for layers that keep a state for each example of a batch of fixed size."""
    for layer in model._flatten_layers():
        if getattr(layer, "stateful", False):
            raise ModelError(
                f"layer {layer.path!r} is stateful: it keeps a state for each example of a fixed batch, "
                "which replicas split; give it stateful=False, or run with one replica (--replicas 1)"
            )


@contextmanager
def misfits_explained(model: Any, examples: int) -> Iterator[None]:
    """Within the block, which computes a replica of so many examples, a failure names what does not fit that.

    That is an input with a batch of fixed size, and an index of a row that the replica does not have.

    An input may know the size of a batch without any harm, as Keras's own Sequential models do.
    """
    try:
        yield
    except LockstepError:
        raise
    except Exception as error:
        for layer in model._flatten_layers():
            fixed = layer.batch_shape[0] if isinstance(layer, keras.layers.InputLayer) else None
            if fixed is not None and fixed != examples:
                raise ModelError(
                    f"the step of a replica, which has {examples} examples, failed ({type(error).__name__}); "
                    f"the input {layer.name!r} of the model has a fixed batch of {fixed}, which replicas "
                    "split: give it a shape without a batch size, or run with one replica (--replicas 1)"
                ) from error
        if isinstance(error, IndexError):
            raise ModelError(
                f"the step of a replica, which has {examples} of the batch's rows, failed: {error}; "
                "replicas split the first axis of each array, which must be that of the examples: run with "
                "one replica (--replicas 1) where it is not"
            ) from error
        raise


def refuse_other_weights(model: Any, trained: Sequence[Any]) -> None:
    """Raise ModelError if other variables are trainable than those of the steps that were made of `model`."""
    now = model.trainable_variables
    if {id(variable) for variable in now} == {id(variable) for variable in trained}:
        return
    known, wanted = ({id(variable): variable.path for variable in some} for some in (trained, now))
    frozen = [path for key, path in known.items() if key not in wanted]
    thawed = [path for key, path in wanted.items() if key not in known]
    change = f"{frozen[0]!r} is no longer trainable" if frozen else f"{thawed[0]!r} has become trainable"
    raise ModelError(
        f"the variable {change}, but model {model.name!r} was not compiled since: after a change of "
        "`trainable`, call model.compile(...) again, in the strategy's scope"
    )


def build_by_call(model: Any, kind: Kind, batch: Callable[[], Any]) -> None:
    """Call the model, its metrics and its losses as Keras does before a loop."""
    if kind != "predict":
        model._symbolic_build(iterator=((0, 0, [batch()]) for _ in range(1)))
    elif not model.built:
        with keras.StatelessScope():
            model(keras.utils.unpack_x_y_sample_weight(batch())[0])


def has_own_step(model: Any, kind: Kind) -> bool:
    """Whether a step of the program's own stands for Keras's."""
    name = f"{kind}_step"
    return getattr(type(model), name) is not getattr(keras.Model, name) or name in vars(model)


@contextmanager
def undone(model: Any) -> Iterator[None]:
    """Within the block a step may run: optimizers only make their variables, and others get theirs back.

    For a step that runs eagerly.
    """
    firsts = _Firsts()
    assignments.install()
    with ExitStack() as stack:
        for optimizer in optimizers_of(model):
            stack.enter_context(replaced(optimizer, "apply", partial(_only_build, optimizer)))
        try:
            with assignments.heard_by(firsts):
                yield
        finally:
            for variable, value in firsts.values.values():
                variable.assign(value)


class _Firsts:
    """The values that variables had before they were assigned for the first time, by the variables' ids."""

    def __init__(self) -> None:
        self.values: dict[int, tuple[Any, Any]] = {}

    def made(self, variable: Any) -> None:
        """Do nothing: its first value is its own."""

    def assigned(self, variable: Any) -> None:
        """Keep the value that is about to be replaced."""
        if id(variable) not in self.values:
            self.values[id(variable)] = variable, variable.numpy()


def _only_build(optimizer: Any, grads: Any, trainable_variables: Any = None) -> None:
    if trainable_variables is not None and not optimizer.built:
        optimizer.build(list(trainable_variables))
