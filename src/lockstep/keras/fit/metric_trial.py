"""Tries the program's own metrics, and the figures that its own `compute_metrics` returns."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import keras
import numpy.typing as npt

from lockstep.keras.backends.common import has_own
from lockstep.keras.backends.contract import METRICS, WholePart
from lockstep.keras.backends.logs import LogTemplate, recorded_results
from lockstep.keras.backends.losses import weighted_means
from lockstep.keras.backends.whole_batch import may_compare_examples
from lockstep.keras.fit.metric_states import (
    Update,
    keeps_examples,
    metrics_of_program,
    recorded_updates,
    why_not_a_sum,
    why_not_summed,
)
from lockstep.keras.fit.part_names import METRIC
from lockstep.keras.fit.plain_function import HALF_TYPES
from lockstep.keras.fit.tried_model import NOTHING, ArrayOwners, TriedModel
from lockstep.keras.fit.tried_outputs import outputs_to_try
from lockstep.keras.fit.tried_rows import TriedRows
from lockstep.keras.nests import Nest
from lockstep.keras.private.common import wrapped_function
from lockstep.keras.randomness import random_numbers
from lockstep.keras.reached_objects import unchanged
from lockstep.keras.variables import flat_metrics

Array = npt.NDArray[Any]
Updates = Mapping[int, Sequence[Update]]
"""The updates of metrics, by the metrics' ids."""


class MetricTrial:
    """The trial of metrics.

    Args:
        tried: the model.
        whole: the parts of a step that are computed from the whole batch.

    Attributes:
        refused: why the model is refused unless the whole batch updates a metric, by the metric's name.
    """

    def __init__(self, tried: TriedModel, whole: frozenset[WholePart]) -> None:
        self._tried = tried
        self._model = tried.model
        self._whole = whole
        self.refused: dict[str, str] = {}

    def measure(self) -> dict[tuple[int, str], int]:
        """Return the growths of metrics and figures that are not means; name those that compare examples."""
        for metric in metrics_of_program(self._model):
            self._refuse(metric, why_not_summed(metric))
        if "metrics" in self._whole:
            return {}
        model = self._model
        overrides = has_own(model, "compute_metrics")
        doubtful = [metric for metric in flat_metrics(model.metrics) if may_compare_examples(metric)]
        if not (overrides or doubtful):
            return {}
        functions = [metric for metric in doubtful if wrapped_function(metric)[0] is not None]
        names = [f"{METRIC}{metric.name}" for metric in doubtful]
        attempts = self._tried.results(names or ["compute_metrics"], self.states)
        if not attempts:
            return {}
        growths_by_name: dict[str, Any] = {}
        owners = ArrayOwners(model)
        for name in {name for attempt in attempts for name in attempt}:
            growths = {attempt[name] for attempt in attempts if name in attempt} - {NOTHING}
            if len(growths) == 1 and None not in growths:
                growths_by_name[name] = growths.pop()
            elif growths:
                self._tried.name_array(name, owners, "compute_metrics")
            else:
                growths_by_name[name] = NOTHING
                if any(owners.owner(name) is metric for metric in functions):
                    self._tried.name(f"{METRIC}{owners.owner(name).name}", tried=False)
        return {(0, name): growth for name, growth in owners.unlike_means(growths_by_name).items()}

    def states(self) -> list[dict[str, Any]]:
        """Return, for some attempts, the growth of the metrics' variables and of other figures."""
        growths = []
        for outputs, weights in outputs_to_try(self._model, self._tried.batch.whole):
            updates: list[Updates] = []
            arrays = self._tried.each(partial(self._metric_arrays, outputs, weights, updates))
            half = any(_is_half(output) for output in keras.tree.flatten(outputs))
            values = {name: [each[name] for each in arrays] for name in arrays[0]}
            growths.append({name: self._tried.growth(values[name], half=half) for name in values})
            if "metrics" not in self._whole:
                self.name_metrics_that_do_not_add(*updates[1:])
        return growths

    def name_metrics_that_do_not_add(self, first: Updates, second: Updates) -> None:
        """Name the metrics whose state is not a sum over examples. Replicas have to refuse them.

        With changed numbers, sums may be so large that their rounding differs.
        """
        if self._tried.changes_values:
            return
        for metric in metrics_of_program(self._model):
            updates = first.get(id(metric), ()), second.get(id(metric), ())
            with random_numbers(0), unchanged(self._model):
                self._refuse(metric, why_not_a_sum(metric, *updates))
                if self._tried.runs_python and keeps_examples(metric, *updates):
                    self._tried.name(f"{METRIC}{metric.name}")

    def _refuse(self, metric: Any, why: str | None) -> None:
        """Name a metric, and keep why the model is refused unless the whole batch updates it."""
        if why is not None:
            name = f"{METRIC}{metric.name}"
            self.refused.setdefault(name, why)
            self._tried.name(name)

    def _metric_arrays(
        self, outputs: Nest, weights: Nest, updates: list[Updates], part: TriedRows
    ) -> dict[str, Array]:
        model = self._model
        variables = model.metrics_variables
        zeros = [(variable, keras.ops.zeros_like(variable.value)) for variable in variables]
        x, y, _ = part.data
        if "metrics" in self._whole and "inputs" not in self._whole:
            x = None
        with (
            keras.StatelessScope(state_mapping=zeros) as scope,
            weighted_means(part.weight),
            recorded_results(model) as results,
            recorded_updates(model) as updates_of_part,
        ):
            updates.append(updates_of_part)
            logs = model.compute_metrics(x, y, part.cut(outputs), part.cut(weights))
            figures = LogTemplate(model, logs, results).values
        arrays = {
            f"{METRICS}{i}": keras.ops.convert_to_numpy(scope.get_current_value(variable)) / part.weight
            for i, variable in enumerate(variables)
        }
        return arrays | {name: keras.ops.convert_to_numpy(value) for name, value in figures.items()}


def _is_half(tensor: Any) -> bool:
    return tensor is not None and keras.backend.standardize_dtype(tensor.dtype) in HALF_TYPES
