"""Tries steps of the program's own: the gradients, metrics, figures and states of layers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from lockstep.data.batch import Share
from lockstep.keras.backends.common import has_own
from lockstep.keras.backends.contract import (
    DENSITY,
    GATHERED,
    GRADIENTS,
    LOGS,
    METRICS,
    PRESENT,
    STATE_CHANGES,
    StepKind,
)
from lockstep.keras.backends.growth import LIKE_LOSS, MEAN, Growths, nearest_growth, set_growths
from lockstep.keras.backends.losses import names_like_loss, observed_denominators, thinned_denominators
from lockstep.keras.backends.whole_batch import is_gather
from lockstep.keras.fit.metric_states import recorded_updates
from lockstep.keras.fit.metric_trial import MetricTrial, Updates
from lockstep.keras.fit.other_values import bounded
from lockstep.keras.fit.part_names import METRIC
from lockstep.keras.fit.tried_model import NOTHING, ArrayOwners, TriedModel
from lockstep.keras.fit.tried_outputs import near_outputs
from lockstep.keras.fit.tried_rows import TriedRows
from lockstep.keras.private.common import layers_of, loss_tracker, run_eagerly
from lockstep.keras.randomness import random_numbers
from lockstep.keras.reached_objects import unchanged
from lockstep.keras.variables import flat_metrics, optimizers_of
from lockstep.worker.patch_registry import replaced

_HALVES = (0.5, 0.5)
"""The weights of the parts in the trial of a step: programs may divide by the number of equal replicas."""

_EITHER = object()
"""Represents the growth of a value that trials do not show: it may be `MEAN` or `LIKE_LOSS`."""

Array = npt.NDArray[Any]


class StepTrial:
    """The trial of the steps of a model.

    Args:
        tried: the model.
        metrics: the trial of its metrics.
        context: returns the context of the program's own `train_step`.

    Attributes:
        row_bytes: the bytes that a step exchanges for each row to compute parts from the whole batch.
    """

    def __init__(
        self, tried: TriedModel, metrics: MetricTrial, context: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._tried = tried
        self._metrics = metrics
        self._context = context
        self._model = tried.model
        self._backend = tried.backend
        self._growths = Growths()
        self._gathers = False
        self._has_denominators = False
        self.row_bytes = 0.0

    def measure(self, kind: StepKind, growths: Growths) -> Growths:
        """Measure the gradients, metrics and figures of the program's own step.

        In a step of Keras's, it measures only the metrics that layers update.
        """
        model = self._model
        methods = [name for name in (f"{kind}_step", "compute_loss") if has_own(model, name)]
        layers = layers_of(model, include_self=False)
        # A step does not have the metrics that a model was compiled with if it is a layer of another one.
        of_step = set(map(id, flat_metrics(model.metrics)))
        of_layers = {
            id(metric): metric
            for layer in layers
            for metric in flat_metrics(layer.metrics)
            if id(metric) in of_step
        }
        self._growths, whole = growths, growths.whole
        if not (methods or of_layers or whole):
            return growths
        # `tf.distribute` also divides Keras's losses by the number of replicas, and adds gradients up.
        follows = self._context is not nullcontext and self._tried.job.settings.tf_distribute
        summed = follows and "train_step" in methods
        names = [f"{name} of {type(model).__name__}" for name in methods]
        step = methods[0] if methods else f"{kind}_step"
        names = names or [f"{METRIC}{metric.name}" for metric in of_layers.values()] or [f"{kind}_step"]
        self._has_denominators = False
        attempts = self._tried.results(names, lambda: self._attempts(kind, summed))
        if attempts and "compute_loss" in methods:
            # All distances of the outputs may exceed a margin, so a comparison has no effect yet.
            with suppress(Exception, SystemExit), self._tried.undisturbed(), near_outputs(model), bounded():
                attempts.append(self._rounds(kind, summed))
        measured = dict(growths.steps.get(kind, {}))
        figures = self._whole_figures()
        owners = ArrayOwners(model)
        for number in range(max(map(len, attempts), default=0)):
            growths_by_name: dict[str, Any] = {}
            rounds = [rounds[number] for rounds in attempts if number < len(rounds)]
            for group in _groups(rounds[0][0]):
                if group[0] in figures:
                    continue
                arrays = rounds[0]
                is_state = group[0].startswith(STATE_CHANGES)
                if is_state and (not (methods or whole) or arrays[0][group[0]].dtype.kind != "f"):
                    continue
                if not is_state and not (methods or whole) and id(owners.owner(group[0])) not in of_layers:
                    continue
                value, values = self._growth_of_group(
                    kind, group, rounds, with_loss=number == 0 and "loss" not in whole
                )
                if summed and group[0].startswith(GRADIENTS):
                    # The rule has made these values means.
                    if value not in (MEAN, NOTHING):
                        self._tried.name(f"{names[0]}, whose gradients are added up as in tf.distribute")
                    continue
                if value is None:
                    self._tried.name_array(group[0], owners, step)
                    # If a step is nearly a sum, it is probably one.
                    counts = self._counts_rows(group[0], owners, rounds[0])
                    value = MEAN if counts else nearest_growth(values[0], values[1:], _HALVES)
                if value is _EITHER:
                    self._tried.name_array(group[0], owners, step, tried=False)
                    value = MEAN
                if value is NOTHING and methods and not self._gathers and self._shows_loss(group[0], owners):
                    self._tried.name(f"{methods[-1]} of {type(model).__name__}", tried=False)
                growths_by_name |= dict.fromkeys(group, value)
            measured |= {
                (number, name): growth for name, growth in owners.unlike_means(growths_by_name).items()
            }
        return replace(
            growths,
            steps={**growths.steps, kind: measured},
            divisor=self._tried.job.view.replicas if summed else growths.divisor,
        )

    def _growth_of_group(
        self,
        kind: StepKind,
        group: Sequence[str],
        rounds: Sequence[Sequence[dict[str, Array]]],
        *,
        with_loss: bool,
    ) -> tuple[Any, list[Array]]:
        """Return the growth that some arrays have in all attempts of a round, and values that show it.

        It is `_EITHER` for a value that may follow the examples, or the denominator of the loss.

        Args:
            kind: the kind of the step.
            group: the names of the arrays.
            rounds: the arrays of all rows and of each half, by attempts.
            with_loss: whether an array may be weighted by the denominator of the loss.
        """
        # Gradients have the precision of their weights.
        half = self._tried.stays_half() or any(rounds[0][0][name].dtype.itemsize < 4 for name in group)
        values_by_growth: dict[Any, list[Array]] = {}
        either: list[tuple[list[Array], list[Array]]] = []
        for arrays in rounds:
            if all(name in each for name in group for each in arrays):
                values = [np.concatenate([each[name].ravel() for name in group]) for each in arrays]
                growth = self._tried.growth(values, _HALVES, half=half)
                if group[0] in names_like_loss(self._model, kind, arrays[0]):
                    with_loss = False
                if with_loss and growth in (MEAN, None) and all(DENSITY in each for each in arrays):
                    densities = [each[DENSITY] for each in arrays]
                    weighted = [value * density for value, density in zip(values, densities, strict=True)]
                    if self._tried.growth(weighted, _HALVES, half=half) == MEAN:
                        if growth == MEAN:
                            either.append((values, densities))
                            continue
                        growth = LIKE_LOSS
                values_by_growth.setdefault(growth, values)
        if either and values_by_growth.keys() <= {NOTHING}:
            is_mean = not self._has_denominators or _is_independent(either, group[0].startswith(LOGS))
            values_by_growth[MEAN if is_mean else _EITHER] = either[0][0]
        if len(values_by_growth) > 1:
            values_by_growth.pop(NOTHING, None)
        if len(values_by_growth) > 1:
            return None, values_by_growth.get(None, next(iter(values_by_growth.values())))
        return next(iter(values_by_growth.items()))

    def _counts_rows(self, name: str, owners: ArrayOwners, arrays: Sequence[Mapping[str, Array]]) -> bool:
        """Whether an array belongs to a metric that also counts rows, so that it is a mean over them.

        A count is a multiple of the number of rows, or of the sum of their weights. A large sum is not.

        Args:
            name: the name of the array.
            owners: the metrics, by the ids of their variables.
            arrays: the arrays of all rows and of each half, each divided by its share of the rows.
        """
        owner = owners.owner(name)
        others = [
            [float(each[other].item()) for each in arrays]
            for other, array in arrays[0].items()
            if other != name and array.size == 1 and owner is not None and owners.owner(other) is owner
        ]
        halves = self._tried.batch.halves
        sizes = [[float(halves[0].count)] * len(halves)]
        if (weights := halves[0].data[2]) is not None and keras.ops.is_tensor(weights):
            sums = [float(np.sum(keras.ops.convert_to_numpy(part.data[2]))) for part in halves]
            sizes.append(
                [total * halves[0].count / part.count for total, part in zip(sums, halves, strict=True)]
            )
        return any(
            size[0] > 0
            and (times := round(counts[0] / size[0])) > 0
            and np.allclose(counts, times * np.array(size))
            for counts in others
            for size in sizes
        )

    def _whole_figures(self) -> frozenset[str]:
        """Return the names in a partial of the figures that `compute_metrics` returns for the whole batch."""
        if "metrics" not in self._growths.whole:
            return frozenset()
        attempts = self._tried.results(["compute_metrics"], self._metrics.states)
        return frozenset(name for attempt in attempts for name in attempt if name.startswith(LOGS))

    def _attempts(self, kind: StepKind, summed: bool) -> list[list[list[dict[str, Array]]]]:
        """Return the `_rounds` of a step; also with thinned denominators, if its losses have their own.

        Rows without padding do not show which values depend on the denominator of the loss.
        """
        with observed_denominators() as differences:
            attempts = [self._rounds(kind, summed)]
        if any(differences):
            self._has_denominators = True
            with suppress(Exception, SystemExit), random_numbers(0), bounded():
                attempts.append(self._rounds(kind, summed, thinned=True))
        return attempts

    def _rounds(self, kind: StepKind, summed: bool, *, thinned: bool = False) -> list[list[dict[str, Array]]]:
        """Return the arrays of each round of a step, for some rows and for each half of them.

        Args:
            kind: the kind of the step.
            summed: whether the gradients of replicas are added up, as by `tf.distribute`.
            thinned: whether denominators of losses leave out elements of the first half.
        """
        model, growths = self._model, self._growths
        whole, *halves = self._tried.batch.halves
        totals: list[Any] = []
        rounds, row_bytes = [], 0.0
        with run_eagerly(model):
            program = self._backend.program(model, kind)
            state = program.present()

            updates: list[Updates] = []

            def compute(part: TriedRows, replicas: int) -> dict[str, Array]:
                set_growths(model, replace(growths, divisor=replicas if summed else 1))
                weight, start = part.count / whole.count, part.rows.start
                share = Share(0, part.count, weight, 0, lambda: part.batch, start)
                first, rows = (0, whole.count) if "loss" in growths.whole else (start, part.count)
                with (
                    self._tried.job.trying(replicas),
                    self._context(),
                    _unscaled(model),
                    unchanged(model),
                    self._tried.global_draws_named(),
                    thinned_denominators(first, halves[0].count, rows) if thinned else nullcontext(),
                    recorded_updates(model) as updates_of_part,
                ):
                    updates.append(updates_of_part)
                    arrays = program.parts(len(totals), program.compute(state, share, totals))
                # The next computation may use the memory again.
                return {name: np.array(self._backend.to_numpy(array)) for name, array in arrays.items()}

            while True:
                updates.clear()
                arrays = [compute(whole, 1), *(compute(part, 2) for part in halves)]
                if any(each.keys() != arrays[0].keys() for each in arrays):
                    raise _UnlikeStepsError
                row_bytes += sum(
                    array.nbytes / whole.count
                    for name, array in arrays[0].items()
                    if name.startswith(GATHERED)
                )
                # A step of each kind exchanges its own values.
                self.row_bytes = max(self.row_bytes, row_bytes)
                updates_of_halves = updates[1:3]
                if is_gather(arrays[0]):
                    self._gathers = True
                    # The two halves are the same rows.
                    totals.append(arrays[0])
                    continue
                if self._context is not nullcontext and not summed:
                    self._name_if_divided(arrays[1], compute(halves[0], 1), kind)
                weights = (1.0, *_HALVES)
                rounds.append([_unweighted(*pair) for pair in zip(arrays, weights, strict=True)])
                totals.append(arrays[0])
                if program.is_last(len(totals) - 1):
                    self._metrics.name_metrics_that_do_not_add(*updates_of_halves)
                    return rounds

    def _name_if_divided(
        self, of_two: Mapping[str, Array], of_one: Mapping[str, Array], kind: StepKind
    ) -> None:
        """Name a step whose gradients depend on the number of replicas that the script sees.

        It divides the mean of a replica by their number, which is correct only for replicas with equal
        numbers of examples.
        """
        if not all(np.allclose(of_two[name], of_one[name]) for name in of_two if name.startswith(GRADIENTS)):
            step = f"{kind}_step of {type(self._model).__name__}"
            self._tried.name(f"{step} where replicas have unequal shares")

    def _shows_loss(self, name: str, owners: ArrayOwners) -> bool:
        """Whether an array of a partial is zero for each batch only if the loss of the program is zero."""
        if name.startswith(GRADIENTS):
            return True
        # The program's own step may not track it.
        tracked = not any(has_own(self._model, step) for step in ("train_step", "test_step"))
        return tracked and (owner := owners.owner(name)) is not None and owner is loss_tracker(self._model)


class _UnlikeStepsError(Exception):
    """The update or the figures of half of the rows are unlike those of all rows."""


def _groups(arrays: Mapping[str, Array]) -> list[list[str]]:
    """Return the names of arrays that grow together: all gradients, and each other value by itself."""
    gradients = [name for name in arrays if name.startswith(GRADIENTS)]
    others = [[name] for name in arrays if name.startswith((METRICS, LOGS, *STATE_CHANGES))]
    return [gradients, *others] if gradients else others


def _is_independent(attempts: Sequence[tuple[Sequence[Array], Sequence[Array]]], is_figure: bool) -> bool:
    """Whether a value does not follow the loss, whose denominator trials have changed.

    A figure may be a mean over unmasked elements that the program computes itself. It counts as a mean over
    examples only if the rows have no padding.

    Args:
        attempts: the values, and the densities of the losses, of all rows and of each half.
        is_figure: whether the value is a figure.
    """
    if any(max(first, second) > 1.2 * min(first, second) for _, (_, first, second) in attempts) and all(
        np.array_equal(whole, part) for (whole, *parts), _ in attempts for part in parts
    ):
        return True
    values, densities = attempts[0]
    return not (is_figure and densities[1] != densities[2]) and any(
        others[1] != densities[1] and all(map(np.array_equal, values, changed))
        for changed, others in attempts[1:]
    )


def _unweighted(arrays: Mapping[str, Array], weight: float) -> dict[str, Array]:
    """Return the arrays of a replica's partial without its weight.

    Arrays that are proportional to a loss with its own denominator keep the density as a factor. So they are
    means over examples even if replicas have unequal densities.
    """
    return {name: array / weight for name, array in arrays.items() if name != PRESENT}


@contextmanager
def _unscaled(model: Any) -> Iterator[None]:
    """Within the block, optimizers do not scale losses, so gradients do not overflow for some rows only."""
    with ExitStack() as stack:
        for optimizer in optimizers_of(model):
            stack.enter_context(replaced(optimizer, "scale_loss", lambda loss: loss))
        yield
