"""What the adapters of all backends need to know of a step: replaced methods, sums and limits."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from lockstep.errors import LockstepError, ModelError


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
