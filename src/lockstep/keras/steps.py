"""What the adapters of all backends need to know of a step: replaced methods, sums and limits."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras

from lockstep.errors import ModelError


@contextmanager
def replaced(optimizer: Any, method: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Within the block `optimizer.method` is `replacement`."""
    # Past the optimizer's own __setattr__, which tracks what it is given.
    vars(optimizer)[method] = replacement
    try:
        yield
    finally:
        del vars(optimizer)[method]


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


@contextmanager
def whole_sums(model: Any, weight: Any) -> Iterator[None]:
    """Within the block a loss that is a sum over examples counts as the replica's part of it.

    Replicas' gradients are averaged with `weight`, each replica's share of the examples; a sum divided by
    it survives that as the sum. Losses that were added to the model, regularizers for example, are means.

    Raises:
        ModelError: some of the model's losses are sums and others means.
    """
    reductions = {getattr(loss, "reduction", "mean") == "sum" for loss in keras.tree.flatten(model.loss)}
    if True not in reductions:
        yield
        return
    if False in reductions:
        raise ModelError(
            "some of the model's losses have reduction='sum' and others are means over the examples: "
            "replicas cannot weigh both; give all of them the same reduction"
        )
    compute = model._compute_loss

    def compute_whole(*args: Any, **kwargs: Any) -> Any:
        total = compute(*args, **kwargs)
        added = sum(model._aggregate_additional_loss(loss) for loss in model.losses)
        return (total - added) / keras.ops.cast(weight, total.dtype) + added

    # Past the model's own __setattr__, which tracks what it is given.
    vars(model)["_compute_loss"] = compute_whole
    try:
        yield
    finally:
        del vars(model)["_compute_loss"]
