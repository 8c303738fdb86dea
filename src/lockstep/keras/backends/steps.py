"""What the adapters of all backends need to know of a step: replaced methods, sums and limits."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lockstep.errors import ModelError


@contextmanager
def replaced(owner: Any, method: str, replacement: Callable[..., Any]) -> Iterator[None]:
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
