"""What the adapters of all backends need to know of a step: its one update, its generators, its limits."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

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


def only_application(record: list[Any], remedy: str) -> Any:
    """Return the one application of the optimizer that a step must have.

    Raises:
        ModelError: the step applied its optimizer never or several times.
    """
    if len(record) != 1:
        raise ModelError(f"train_step applied the model's optimizer {len(record)} times; {remedy}")
    return record[0]


def seed_positions(model: Any) -> frozenset[int]:
    """Find which of `model.non_trainable_variables` are states of random generators."""
    generators = [seed for layer in model._flatten_layers() for seed in layer._seed_generators]
    states = {id(generator.state) for generator in generators}
    return frozenset(i for i, v in enumerate(model.non_trainable_variables) if id(v) in states)


def refuse_integer_state(variable: Any) -> None:
    """Raise ModelError: the step changes layer state that is not floating-point."""
    raise ModelError(
        f"the step changes the {variable.dtype} variable {variable.path!r}: only floating-point layer state "
        "can be averaged over replicas; keep counters in a metric, or in a float32 variable"
    )


def refuse_metrics_that_do_not_add(model: Any) -> None:
    """Reset the model's metrics; raise ModelError for one whose state then is not zero.

    Replicas start a step from zero, and their states are added. A metric that starts elsewhere (a maximum,
    from minus infinity) is no sum.
    """
    for metric in model.metrics:
        metric.reset_state()
        for variable in metric.variables:
            if np.any(keras.ops.convert_to_numpy(variable.value) != 0):
                raise ModelError(
                    f"the metric variable {variable.path!r} does not start from zero: replicas add up what "
                    "their examples contribute, so keep sums and counts, and compute the rest in result()"
                )
