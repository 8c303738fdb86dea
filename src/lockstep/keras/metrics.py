"""Whether a model's metrics add up over replicas."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from lockstep.errors import ModelError
from lockstep.keras.backends.losses import flat_metrics
from lockstep.keras.state.randomness import random_numbers

_PROBED_ROWS = 8


def refuse_metrics_that_do_not_add(model: Any, rows: Callable[[], Any]) -> None:
    """Raise ModelError if a metric's state is not a sum over examples; leave the model unchanged.

    Replicas start a step from zero, and their states are added. Keras's own metrics that start from zero are
    additive. A user's metric is tested: updating it with some rows and then with others must give the sum of
    the separate updates.

    Args:
        model: built, with its metrics.
        rows: reads some rows of the input, as `(x, y, sample_weight)`; called only if a metric is tested.
    """
    for metric in model.metrics:
        with keras.StatelessScope() as scope:
            metric.reset_state()
        for variable in metric.variables:
            value = scope.get_current_value(variable)
            _refuse_unless_zero(variable, variable.value if value is None else value)
    own = _own_metrics(model)
    if not own:
        return
    try:
        data = rows()
        with random_numbers(0):
            _try(model, data)
    except ModelError:
        raise
    except Exception as error:  # A custom step may pass anything to metrics.
        warnings.warn(
            f"cannot check whether the metric {own[0].name!r} adds up over replicas, because the model or "
            f"its metrics cannot be called with a batch ({type(error).__name__}); it adds up if it keeps "
            "sums and counts, and computes the rest in result()",
            stacklevel=2,
        )


def metrics_across_examples(model: Any, rows: Callable[[], Any]) -> list[str]:
    """Name the user's metrics that compare the examples of a batch.

    After one update with some rows, the state of such a metric is not the sum of updates with either half.

    Args:
        model: built, with its metrics.
        rows: reads some rows of the input, as `(x, y, sample_weight)`; called only if a metric is tested.
    """
    own = _own_metrics(model)
    if not own:
        return []
    try:
        data = rows()
        half = tried_rows(data)
        if half == 0:
            return []
        parts = (slice(0, 2 * half), slice(0, half), slice(half, 2 * half))
        with random_numbers(0):
            states = [_state(model, [_updates(model, data, part)]) for part in parts]
    except Exception:  # A custom step may pass anything to metrics.
        return []
    differing = {
        id(variable)
        for variable, whole, first, second in zip(model.metrics_variables, *states, strict=True)
        if not np.allclose(whole, first + second, rtol=1e-4, atol=1e-5, equal_nan=True)
    }
    return [one.name for one in own if any(id(variable) in differing for variable in one.variables)]


def _own_metrics(model: Any) -> list[Any]:
    return [one for one in flat_metrics(model.metrics) if not type(one).__module__.startswith("keras.")]


def tried_rows(data: Any) -> int:
    """Return the number of rows to test against as many others; 0 if the batch has fewer than two."""
    counts = [int(leaf.shape[0]) for leaf in keras.tree.flatten(data) if leaf is not None]
    return min(_PROBED_ROWS, min(counts) // 2)


def _refuse_unless_zero(variable: Any, value: Any) -> None:
    if variable.dtype == "bool":
        raise ModelError(f"the metric variable {variable.path!r} is a bool, which cannot be summed")
    if np.any(keras.ops.convert_to_numpy(value) != 0):
        raise ModelError(
            f"the metric variable {variable.path!r} does not start from zero: replicas add up what "
            "their examples contribute, so keep sums and counts, and compute the rest in result()"
        )


def _try(model: Any, data: Any) -> None:
    half = tried_rows(data)
    if half == 0:
        return
    first, second = _updates(model, data, slice(0, half)), _updates(model, data, slice(half, 2 * half))
    apart = [a + b for a, b in zip(_state(model, [first]), _state(model, [second]), strict=True)]
    for variable, sum_of_both, both in zip(
        model.metrics_variables, apart, _state(model, [first, second]), strict=True
    ):
        if not np.allclose(sum_of_both, both, rtol=1e-4, atol=1e-5, equal_nan=True):
            raise ModelError(
                f"the metric variable {variable.path!r} does not add up: after some examples and then others "
                "it is not the sum of both alone; keep sums and counts, and compute the rest in result()"
            )


def rows_of(data: Any, rows: slice) -> tuple[Any, Any, Any]:
    """Return some rows of a batch as tensors: (x, y, sample_weight)."""
    sliced = keras.tree.map_structure(
        lambda leaf: None if leaf is None else keras.ops.convert_to_tensor(leaf[rows]), data
    )
    x, y, weight = keras.utils.unpack_x_y_sample_weight(sliced)
    return x, y, weight


def _updates(model: Any, data: Any, rows: slice) -> tuple[Any, Any, Any, Any]:
    """Return (x, y, predictions, sample_weight) of some rows."""
    x, y, weight = rows_of(data, rows)
    with keras.StatelessScope():
        return x, y, model(x, training=False), weight


def _state(model: Any, updates: Sequence[tuple[Any, Any, Any, Any]]) -> list[Any]:
    """Return the metrics' state after updates from zero."""
    variables = model.metrics_variables
    zeros = [(variable, keras.ops.zeros_like(variable.value)) for variable in variables]
    with keras.StatelessScope(state_mapping=zeros) as scope:
        for x, y, prediction, weight in updates:
            model.compute_metrics(x, y, prediction, weight)
    return [keras.ops.convert_to_numpy(scope.get_current_value(variable)) for variable in variables]
