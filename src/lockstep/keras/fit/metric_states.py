"""Whether a metric's state is a sum over examples, as updates with some rows, apart and together, show.

Replicas start a step from zero, and their states are added to that of the metric, which may be that of
earlier epochs if `reset_state` keeps it. Keras's own metrics are sums. Those of the program are tried: an
update with some rows and then with others must give the sum of the separate updates, and must not depend on
a state that the metric keeps. A state that is not a sum (a maximum, a product, the last batch), and examples
that a metric keeps in Python, are right only if the metric is updated once, with the rows of all replicas
(`lockstep.keras.backends.whole_batch`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from lockstep.keras.backends.whole_batch import replaced_updates
from lockstep.keras.python_state import Kept, ObjectGraph
from lockstep.keras.variables import flat_metrics

Update = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a call of `update_state`."""

_TOLERANCE, _OF_ZERO = 1e-4, 1e-5
"""By how much two states of a metric may differ and count as equal: relative to the value, and near zero."""
_REMEDY = (
    "keep sums and counts, and compute the rest in result(), or update the metric with values that have a "
    "row for each example"
)


def metrics_of_program(model: Any) -> list[Any]:
    """Return the metrics of a model whose classes are not Keras's."""
    return [each for each in flat_metrics(model.metrics) if not type(each).__module__.startswith("keras.")]


@contextmanager
def recorded_updates(model: Any) -> Iterator[dict[int, list[Update]]]:
    """Within the block, record the updates of the program's own metrics, by the metrics' ids."""
    updates: dict[int, list[Update]] = {}

    def update(metric: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        updates.setdefault(id(metric), []).append(keras.tree.map_structure(_constant, (args, kwargs)))
        return original(*args, **kwargs)

    with replaced_updates(metrics_of_program(model), update):
        yield updates


def _constant(leaf: Any) -> Any:
    return keras.ops.stop_gradient(leaf) if keras.ops.is_tensor(leaf) else leaf


def why_not_summed(metric: Any) -> str | None:
    """Return why the state of a metric cannot be summed over replicas, for users, or None if it can be."""
    for variable in metric.variables:
        if variable.dtype == "bool":
            return f"the metric variable {variable.path!r} is a bool, which cannot be summed: use an int32"
    return None


def why_not_a_sum(metric: Any, first: Sequence[Update], second: Sequence[Update]) -> str | None:
    """Return why the state of a metric is not a sum over examples, for users, or None if it may be one.

    Args:
        metric: the metric, with its variables.
        first: the updates with some rows.
        second: the same updates with other rows.
    """
    if not first:
        return None
    with keras.StatelessScope() as scope:
        metric.reset_state()
    for variable in metric.variables:
        value = scope.get_current_value(variable)
        # It is None if the metric has a `reset_state` of its own.
        if value is not None and np.any(keras.ops.convert_to_numpy(value) != 0):
            return (
                f"the metric variable {variable.path!r} does not start from zero: replicas add up what their "
                f"examples contribute, so {_REMEDY}"
            )
    zeros = [keras.ops.zeros_like(variable.value) for variable in metric.variables]
    separate = [_state(metric, zeros, updates) for updates in (first, second)]
    together = _state(metric, zeros, [*first, *second])
    for variable, value, other, both in zip(metric.variables, *separate, together, strict=True):
        if not np.allclose(value + other, both, rtol=_TOLERANCE, atol=_OF_ZERO, equal_nan=True):
            return (
                f"the metric variable {variable.path!r} does not add up: after some examples and then others "
                f"it is not the sum of both alone; {_REMEDY}"
            )
    starts = [keras.ops.convert_to_numpy(variable.value) for variable in metric.variables]
    if not any(np.any(start != 0) for start in starts):
        return None
    for variable, start, value, increment in zip(
        metric.variables, starts, _state(metric, starts, first), separate[0], strict=True
    ):
        tolerance = _OF_ZERO * max(1.0, float(np.max(np.abs(start), initial=0)))
        if not np.allclose(value - start, increment, rtol=_TOLERANCE, atol=tolerance, equal_nan=True):
            return (
                f"the metric variable {variable.path!r} does not add up: reset_state keeps its value, and an "
                f"update changes it by an amount that depends on this; {_REMEDY}"
            )
    return None


def keeps_examples(metric: Any, first: Sequence[Update], second: Sequence[Update]) -> bool:
    """Whether a metric keeps values in Python that depend on its examples, such as a list of all outputs.

    Args:
        metric: the metric, with its variables.
        first: the updates with some rows.
        second: the same updates with other rows.
    """
    graph = ObjectGraph([(metric.name, metric)])
    zeros = [keras.ops.zeros_like(variable.value) for variable in metric.variables]

    def changes(updates: Sequence[Update]) -> list[str]:
        with Kept(graph):
            _state(metric, zeros, updates)
            return graph.changes().texts()

    return bool(first) and changes(first) != changes(second)


def _state(metric: Any, starts: Sequence[Any], updates: Sequence[Update]) -> list[npt.NDArray[Any]]:
    """Return the state of a metric after updates from some values of its variables."""
    variables = metric.variables
    mapping = [
        (variable, keras.ops.convert_to_tensor(value, dtype=variable.dtype))
        for variable, value in zip(variables, starts, strict=True)
    ]
    with keras.StatelessScope(state_mapping=mapping) as scope:
        for args, kwargs in updates:
            metric.update_state(*args, **kwargs)
    return [keras.ops.convert_to_numpy(scope.get_current_value(variable)) for variable in variables]
