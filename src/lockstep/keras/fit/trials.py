"""Tries how a program treats its examples: it computes some rows as a whole, and in two parts.

So a function of the program is never judged by its name. A value of the whole that follows from those of the
parts is a sum or a mean over examples, which replicas compute exactly (`lockstep.keras.backends.growth`).
Anything else compares examples: it is computed per replica, and named.

In a trial, BatchNormalization uses its averages, which are constants, and random operations draw equal
numbers for each row, because parts of a batch would draw other numbers than the whole. Nothing lasts.

Up to 16 rows of the first batch are computed as a whole and in two parts, before the first step of a
compiled model. A trial measures

* each compiled loss that is not one of Keras's means, from the model's outputs, and again from changed ones,
  because equal rows do not show whether a function compares them; one that assigns variables, such as a queue
  of embeddings, counts as one that compares;
* what each layer passes to `add_loss`, also its `activity_regularizer`. The same calls show which layers of
  the program and operations of functional models compare examples, also Keras's layers that hold a function
  of the program (`Lambda`, an activation) or work along the first axis;
* the metrics of the program and the figures of its own `compute_metrics`; whether the state of a metric is a
  sum (`lockstep.keras.fit.metric_states`);
* the gradients, metrics, figures and states of its own `train_step`, `test_step` or `compute_loss`, in the
  step's own function. The whole is computed as one replica, and the script sees `num_replicas_in_sync` = 1.

Workers compare the growths with each reduce. A part that has no effect in a trial may compare examples. So
labels that are all equal are varied, and rows are also tried with padding (`lockstep.keras.fit.tried_rows`).
Numbers that the program may change later get other values (`lockstep.keras.fit.other_values`), a loss that is
zero counts as not tried, and a program's own parts are tried again when a later call has sample weights for
the first time, or when the program has changed a boolean or a similar value
(`lockstep.keras.fit.introductions`).

A script that creates strategies with `--tf-distribute` has the rule of `tf.distribute` for its own
`train_step`: gradients are added up, and Keras's own losses are divided by R. A note names a step for which
this is not the gradient of one process.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from types import FunctionType
from typing import Any, TypeVar

import keras
import numpy as np
import numpy.typing as npt

from lockstep.data.batch import Share
from lockstep.errors import DataError, ModelError, PeerError
from lockstep.keras.assignments import reads_observed_by
from lockstep.keras.backends.common import has_own, without_summaries
from lockstep.keras.backends.contract import (
    GATHERED,
    GRADIENTS,
    LOGS,
    METRICS,
    STATES,
    Backend,
    StepKind,
    WholePart,
)
from lockstep.keras.backends.growth import (
    HALF_TOLERANCE,
    LIKE_LOSS,
    MEAN,
    TOLERANCE,
    declared_growths,
    growths_of,
    measured_growth,
    nearest_growth,
    observed_losses,
    set_growths,
)
from lockstep.keras.backends.logs import LogTemplate, recorded_results
from lockstep.keras.backends.losses import (
    names_like_loss,
    observed_denominators,
    thinned_denominators,
    weighted_means,
)
from lockstep.keras.backends.whole_batch import is_gather, may_compare_examples
from lockstep.keras.fit.exactness import different_denominators
from lockstep.keras.fit.metric_states import (
    Update,
    keeps_examples,
    metrics_of_program,
    recorded_updates,
    why_not_a_sum,
    why_not_summed,
)
from lockstep.keras.fit.other_values import Change, bounded, changed, other_values
from lockstep.keras.fit.plain_function import HALF_TYPES, single_precision
from lockstep.keras.fit.random_rows import equal_draws
from lockstep.keras.fit.tried_rows import TriedBatch, TriedRows
from lockstep.keras.private.common import (
    compiled_loss,
    flat_losses,
    kept_losses,
    layers_of,
    loss_tracker,
    modules_of,
    run_eagerly,
    wrapped_function,
)
from lockstep.keras.python_values import is_of_keras
from lockstep.keras.randomness import current_states, random_numbers
from lockstep.keras.reached_objects import unchanged
from lockstep.keras.variables import flat_metrics, optimizers_of
from lockstep.protocol.job_spec import LARGEST_EXCHANGE
from lockstep.worker.job import Job
from lockstep.worker.patch_registry import replaced

_OF_LOSSES = ("the loss ", "the sum of losses ", "compute_loss of ", "train_step of ", "test_step of ")
METRIC, FIGURE = "the metric ", "the figure "
"""The beginnings of the names of a metric, and of a figure that no metric has."""

_OF_METRICS = (METRIC, FIGURE)
"""The beginnings of the names of parts that may be exact if they are computed from the whole batch."""

DRAWS = "random numbers of "
"""The beginning of the name of a function, or of one of `LIBRARIES`, that draws numbers."""

_FEW = 8
"""The most numbers that get other values one by one after the program has failed with all of them."""

LIBRARIES = ("Python", "NumPy")
"""Libraries with a global generator, whose draws are not equal for all rows."""

Array = npt.NDArray[Any]
Nest = Any
Updates = Mapping[int, Sequence[Update]]
"""The updates of metrics, by the metrics' ids."""
Result = TypeVar("Result")


class Trial:
    """The trials of one model with the rows of one batch.

    Args:
        job: the job in which the model trains.
        backend: the backend of the model.
        model: the model, built and compiled.
        batch: the rows to try. They are read only if the program has parts to try.
        context: returns the context of the program's own `train_step`.
        tries: whether the model may be called. Otherwise, the parts to try are named.
        divides_training: whether the workers divide the batches of training.
        whole: the parts of a step that are computed from the whole batch.

    Attributes:
        names: the names of the parts of the program that compare examples, or could not be tried.
        exact: the names of parts that are computed from the whole batch.
        growths: the growths that the trial has measured.
    """

    def __init__(
        self,
        job: Job,
        backend: Backend,
        model: Any,
        batch: TriedBatch,
        context: Callable[[], AbstractContextManager[None]],
        *,
        tries: bool = True,
        divides_training: bool = True,
        whole: frozenset[WholePart] = frozenset(),
    ) -> None:
        self._tries, self._divides_training = tries, divides_training
        self._failed = False
        self._gathers = False
        self._has_denominators = False
        self._changes_values = False
        self._assigning: set[int] = set()
        self._job = job
        self._context = context
        self._backend = backend
        self._model = model
        self._batch = batch
        self.names: list[str] = []
        self.exact: list[str] = []
        self._row_bytes = 0.0
        # Rounding to half precision would hide how values grow.
        self._precision: Callable[[], AbstractContextManager[object]] = partial(single_precision, model)
        self._refused: dict[str, str] = {}
        # In a compiled step, Python runs once.
        self._runs_python = bool(model.run_eagerly) or keras.backend.backend() == "torch"
        self.growths = replace(growths_of(model), whole=whole)

    def measure(self, kinds: Sequence[StepKind]) -> None:
        """Measure the losses, layers, metrics, and some kinds of steps, of the program's own.

        What compares examples is computed from the whole batch, if trying it shows that this is exact.

        Raises:
            ModelError: the state of a metric is not a sum, and cannot be computed from the whole batch.
        """
        self._measure(kinds)
        tried = [self.growths.whole]
        while untried := [whole for whole in self._wholes() if whole not in tried]:
            whole = untried[0]
            tried.append(whole)
            trial = Trial(self._job, self._backend, self._model, self._batch, self._context, whole=whole)
            trial._measure(kinds)
            others = [name for name in trial.names if name not in self.names]
            if trial._failed or any(name.startswith(_OF_LOSSES) for name in others):
                continue
            # The trial of a step sees what that of a metric may not see.
            self.names += others
            exact = [name for name in self.names if name not in trial.names]
            if not exact:
                continue
            size = trial._row_bytes * self._batch.examples
            if size > LARGEST_EXCHANGE and _computes_in_half(self._model):
                # The rows of a training are smaller than those of a trial.
                sized = Trial(self._job, self._backend, self._model, self._batch, self._context, whole=whole)
                sized._precision = nullcontext
                sized._measure(kinds)
                size = (sized._row_bytes or trial._row_bytes) * self._batch.examples
            if size > LARGEST_EXCHANGE and not self._job.exact_batch:
                large = f"{_ROWS}{size / (1 << 20):.0f} MiB a step, are exchanged only with --exact-batch"
                self.names = [f"{name} ({large})" if name in exact else name for name in self.names]
                self._refused = {name: f"{why}; {large}" for name, why in self._refused.items()}
                break
            self.names, self.growths, self._refused = trial.names, trial.growths, trial._refused
            self.exact += [name.removesuffix(UNTRIED) for name in exact]
        if self._refused:
            raise ModelError(next(iter(self._refused.values())))
        if self._loss_can_wait():
            self.growths = replace(self.growths, whole=self.growths.whole | {"test_step"})
        set_growths(self._model, self.growths)

    @property
    def may_use_weights(self) -> bool:
        """Whether the program has losses, metrics or steps of its own, which may use sample weights."""
        model = self._model
        methods = ("train_step", "test_step", "compute_loss", "compute_metrics")
        return any(has_own(model, method) for method in methods) or any(
            map(may_compare_examples, [*flat_losses(model), *flat_metrics(model.metrics)])
        )

    def _loss_can_wait(self) -> bool:
        """Whether a step that evaluates may compute a loss of the whole batch with the metrics.

        Keras's own step uses the loss for nothing else. Each worker would draw numbers of its own.
        """
        overrides, whole = partial(has_own, self._model), self.growths.whole
        draws = any(name.startswith(DRAWS) for name in self.names)
        return "loss" in whole and not (
            draws or overrides("test_step") or (overrides("compute_metrics") and "metrics" not in whole)
        )

    def _wholes(self) -> list[frozenset[WholePart]]:
        """Return what may also be computed from the whole batch, so that fewer parts are named."""
        if not (self._tries and self._divides_training):
            return []
        loss, metrics = (
            any(name.startswith(beginnings) for name in self.names)
            for beginnings in (_OF_LOSSES, _OF_METRICS)
        )
        parts: list[frozenset[WholePart]] = [frozenset({"loss"})] if loss else []
        parts += [frozenset({"loss", "metrics"})] if loss and metrics else []
        parts += [frozenset({"metrics"})] if metrics else []
        overrides = any(has_own(self._model, name) for name in ("compute_loss", "compute_metrics"))
        parts += [part | {"inputs"} for part in parts if overrides]
        return [self.growths.whole | part for part in parts]

    def _measure(self, kinds: Sequence[StepKind]) -> None:
        others = {kind: steps for kind, steps in self.growths.steps.items() if kind not in kinds}
        self.growths = replace(declared_growths(self._model), steps=others, whole=self.growths.whole)
        set_growths(self._model, self.growths)
        self._losses()
        self._layers()
        set_growths(self._model, self.growths)
        self._metrics(kinds)
        set_growths(self._model, self.growths)
        for kind in kinds:
            self._step(kind)
        set_growths(self._model, self.growths)

    # Losses.

    def _losses(self) -> None:
        """Measure each compiled loss that may be something else than what it declares."""
        if "loss" in self.growths.whole:
            self.growths = replace(self.growths, losses={})
            return
        for name in different_denominators(self._model, self._batch) if self._tries else ():
            self._name(name)
        declared = dict(declared_growths(self._model).losses)
        losses = flat_losses(self._model)
        doubtful = [i for i, loss in enumerate(losses) if may_compare_examples(loss)]
        if doubtful:
            names = {i: f"the loss {getattr(losses[i], 'name', None) or losses[i]}" for i in doubtful}
            attempts = self._tried(list(names.values()), self._loss_values)
            for i in doubtful if attempts else ():
                measured = {growths.get(i) for growths in attempts} - {_NOTHING}
                if i in self._assigning:
                    measured.add(None)
                if len(measured) == 1 and None not in measured:
                    declared[i] = measured.pop()
                elif measured:
                    declared[i] = MEAN
                    self._name(names[i])
                else:
                    self._name(names[i], tried=False)
        self.growths = replace(self.growths, losses=declared)

    def _loss_values(self) -> list[dict[int, Any]]:
        """Return, for some attempts, the growth of each compiled loss, `_NOTHING` where all values are 0."""
        growths = []
        for outputs, weights in self._outputs():
            losses = self._each(partial(self._losses_of, outputs, weights))
            growths.append({i: self._growth([values[i] for values in losses]) for i in losses[0]})
        return growths

    def _losses_of(self, outputs: Nest, weights: Nest, part: TriedRows) -> dict[int, Array]:
        values: dict[int, Array] = {}

        def note(position: int, value: Any) -> None:
            values[position] = _numpy(value)
            if scope.assigned - metrics:
                self._assigning.add(position)
                scope.assigned.clear()

        metrics = {id(variable) for variable in self._model.metrics_variables}
        with _Assignments() as scope, observed_losses(self._model, note):
            compiled_loss(self._model)(part.data[1], _cut(outputs, part), _cut(weights, part))
        return values

    def _outputs(self) -> Iterator[tuple[Nest, Nest]]:
        """Yield the outputs of the model and the sample weights, then changed values.

        Equal rows, as those of a new model nearly are, would hide whether a function compares them.
        """
        x, _, weight = self._batch.whole.data
        with keras.StatelessScope():
            # The sum is a new tensor without a mask, which would change the examples in the mean.
            outputs = keras.tree.map_structure(lambda leaf: leaf + 0, self._model(x, training=False))
        yield outputs, weight
        generator = np.random.default_rng(0)
        changed = partial(_rescaled, generator=generator)
        yield keras.tree.map_structure(changed, outputs), keras.tree.map_structure(changed, weight)
        # Parts of many elements can be nearly alike, as the pixels of two halves of a batch are.
        yield keras.tree.map_structure(_graded, outputs), weight
        right = [_partly_right(*pair) for pair in _pairs(outputs, self._batch.whole.data[1])]
        if right and None not in right:
            yield keras.tree.pack_sequence_as(outputs, right), weight

    # Layers.

    def _layers(self) -> None:
        """Measure what layers add to the loss, and name layers and operations that compare examples."""
        layers = [
            layer
            for layer in layers_of(self._model)
            if _may_compare_rows(layer) or layer.activity_regularizer is not None
        ]
        layers += _operations_of(self._model)
        if not layers:
            return
        attempts = self._tried([], lambda: [self._calls(layers, x) for x in self._inputs()])
        if not attempts:
            for layer in layers:
                if _may_add_losses(layer):
                    self._name(self._addition(layer), tried=False)
            return
        measured: dict[int, int] = {}
        for layer in layers:
            records = [[call[id(layer)] for call in calls] for calls in attempts]
            if growth := self._growth_of_additions(layer, records):
                measured[id(layer)] = growth
        self.growths = replace(self.growths, layers=measured)
        self._name_comparing(layers, attempts)

    def _name_comparing(
        self, layers: Sequence[Any], attempts: Sequence[Sequence[dict[int, "LayerCalls"]]]
    ) -> None:
        """Name the innermost of some layers and operations whose outputs compare examples."""
        comparing: set[int] = set()
        # Inner layers, and then operations, come last: what is around one of them is not named again.
        for layer in reversed(layers):
            inner_ids = {id(inner) for inner in _within(layer)}
            compares = any(self._compares([call[id(layer)] for call in calls]) for calls in attempts)
            if compares and not inner_ids & comparing:
                if layer is self._model:
                    self._name(f"the call of {type(layer).__name__}")
                else:
                    kind = "layer" if isinstance(layer, keras.Layer) else "operation"
                    self._name(f"the {kind} {layer.name}")
            if compares:
                comparing.add(id(layer))

    def _inputs(self) -> Iterator[Nest]:
        """Yield the inputs of the rows, then changed ones, of which the rows differ more."""
        x = self._batch.whole.data[0]
        yield x
        factors = np.linspace(0.1, 3.0, self._batch.count)
        yield keras.tree.map_structure(lambda leaf: _multiplied(leaf, factors), x)

    def _calls(
        self, layers: Sequence[Any], x: Nest, *, training: bool = True
    ) -> list[dict[int, "LayerCalls"]]:
        """Return what some layers do with all rows of inputs, and with each part of them."""

        def calls(part: TriedRows) -> dict[int, LayerCalls]:
            records = {id(layer): LayerCalls() for layer in layers}
            with ExitStack() as stack:
                for layer in layers:
                    stack.enter_context(records[id(layer)].recording(layer))
                with keras.StatelessScope(collect_losses=True):
                    self._model(_cut(x, part), training=training)
            return records

        return self._each(calls)

    def _growth_of_additions(self, layer: Any, attempts: Sequence[Sequence["LayerCalls"]]) -> int:
        """Return the growth of the values that a layer adds to the loss, which is one for all of them."""
        growths: set[Any] = set()
        half = self._stays_half()
        for records in attempts:
            values = [record.added for record in records]
            if len({len(added) for added in values}) == 1:
                growths |= {self._growth(list(added), half=half) for added in zip(*values, strict=True)}
            else:
                growths.add(None)
        growths.discard(_NOTHING)
        if not growths:
            return MEAN
        if len(growths) == 1 and None not in growths:
            growth: int = growths.pop()
            return growth
        self._name(self._addition(layer))
        whole, *parts = (np.array([np.sum(value) for value in record.added]) for record in attempts[0])
        if len({len(added) for added in (whole, *parts)}) > 1:
            return MEAN
        if _may_add_losses(layer):
            return nearest_growth(whole, parts, self._weights)
        # Keras divides what the regularizer returns by the number of examples.
        of_parts = [value * part.count for value, part in zip(parts, self._batch.parts, strict=True)]
        return nearest_growth(whole * self._batch.whole.count, of_parts, self._weights) - 1

    @staticmethod
    def _addition(layer: Any) -> str:
        if _may_add_losses(layer):
            return f"add_loss of {type(layer).__name__}"
        return f"the activity_regularizer of {layer.name}"

    def _compares(self, records: Sequence["LayerCalls"]) -> bool:
        """Whether a row of a layer's outputs depends on other rows of its inputs."""
        whole, *parts = (record.calls for record in records)
        if not all(len(part) == len(whole) for part in parts):
            return False
        for i, (inputs, outputs) in enumerate(whole):
            of_parts = [part[i] for part in parts]
            inputs_of_parts, outputs_of_parts = zip(*of_parts, strict=True)
            if self._equal_rows(inputs, inputs_of_parts) and not self._equal_rows(outputs, outputs_of_parts):
                return True
        return False

    def _equal_rows(self, whole: Sequence[Array], parts: Sequence[Sequence[Array]]) -> bool:
        return rows_are_equal(
            [whole, *parts], [self._batch.count, *(part.count for part in self._batch.parts)]
        )

    # Predictions.

    def name_predictions(self) -> None:
        """Name what compares examples when the model predicts: layers, operations and its `predict_step`."""
        layers = [layer for layer in layers_of(self._model) if _may_compare_rows(layer)]
        layers += _operations_of(self._model)
        if layers:
            calls = partial(self._calls, layers, training=False)
            self._name_comparing(layers, self._tried([], lambda: [calls(x) for x in self._inputs()]))
        if has_own(self._model, "predict_step") and not self.names:
            name = f"predict_step of {type(self._model).__name__}"
            for whole, *parts in self._tried([name], self._predictions):
                if not self._equal_rows(whole, parts):
                    self._name(name)

    def _predictions(self) -> list[list[list[Array]]]:
        """Return, for one attempt, the outputs for all rows, and for each part of them."""
        with run_eagerly(self._model):
            program = self._backend.program(self._model, "predict")
            state = program.present()

            def outputs(part: TriedRows) -> list[Array]:
                share = Share(0, part.count, part.weight, 0, lambda: part.batch)
                program.compute(state, share, ())
                ((_, nest),) = program.outputs()
                return _arrays(nest)

            return [self._each(outputs)]

    # Metrics.

    def _metrics(self, kinds: Sequence[StepKind]) -> None:
        """Measure the metrics of the program's own, and what its own `compute_metrics` returns."""
        for metric in metrics_of_program(self._model):
            self._refuse(metric, why_not_summed(metric))
        if "metrics" in self.growths.whole:
            return
        model = self._model
        overrides = has_own(model, "compute_metrics")
        doubtful = [metric for metric in flat_metrics(model.metrics) if may_compare_examples(metric)]
        if not (overrides or doubtful):
            return
        functions = [metric for metric in doubtful if wrapped_function(metric)[0] is not None]
        names = [f"{METRIC}{metric.name}" for metric in doubtful]
        attempts = self._tried(names or ["compute_metrics"], self._metric_states)
        if not attempts:
            return
        growths_by_name: dict[str, Any] = {}
        owners = {id(v): metric for metric in flat_metrics(model.metrics) for v in metric.variables}
        for name in {name for attempt in attempts for name in attempt}:
            growths = {attempt[name] for attempt in attempts if name in attempt} - {_NOTHING}
            if len(growths) == 1 and None not in growths:
                growths_by_name[name] = growths.pop()
            elif growths:
                self._name_array(name, owners, "compute_metrics")
            else:
                growths_by_name[name] = _NOTHING
                if any(self._owner(name, owners) is metric for metric in functions):
                    self._name(f"{METRIC}{self._owner(name, owners).name}", tried=False)
        measured = {(0, name): growth for name, growth in self._to_set(growths_by_name, owners).items()}
        steps = {kind: measured for kind in kinds if measured}
        self.growths = replace(self.growths, steps={**self.growths.steps, **steps})

    def _metric_states(self) -> list[dict[str, Any]]:
        """Return, for some attempts, the growth of the metrics' variables and of other figures."""
        growths = []
        for outputs, weights in self._outputs():
            updates: list[Updates] = []
            arrays = self._each(partial(self._metric_arrays, outputs, weights, updates))
            half = any(_is_half(output) for output in keras.tree.flatten(outputs))
            growths.append({n: self._growth([each[n] for each in arrays], half=half) for n in arrays[0]})
            if "metrics" not in self.growths.whole:
                self._name_metrics_that_do_not_add(*updates[1:])
        return growths

    def _name_metrics_that_do_not_add(self, first: Updates, second: Updates) -> None:
        """Name the metrics whose state is not a sum over examples, as replicas have to refuse.

        With other values of numbers, sums may be so large that their rounding differs.
        """
        if self._changes_values:
            return
        for metric in metrics_of_program(self._model):
            updates = first.get(id(metric), ()), second.get(id(metric), ())
            with random_numbers(0), unchanged(self._model):
                self._refuse(metric, why_not_a_sum(metric, *updates))
                if self._runs_python and keeps_examples(metric, *updates):
                    self._name(f"{METRIC}{metric.name}")

    def _refuse(self, metric: Any, why: str | None) -> None:
        """Name a metric, and keep why the model is refused unless the whole batch updates it."""
        if why is not None:
            name = f"{METRIC}{metric.name}"
            self._refused.setdefault(name, why)
            self._name(name)

    def _metric_arrays(
        self, outputs: Nest, weights: Nest, updates: list[Updates], part: TriedRows
    ) -> dict[str, Array]:
        model = self._model
        variables = model.metrics_variables
        zeros = [(variable, keras.ops.zeros_like(variable.value)) for variable in variables]
        x, y, _ = part.data
        if "metrics" in self.growths.whole and "inputs" not in self.growths.whole:
            x = None
        with (
            keras.StatelessScope(state_mapping=zeros) as scope,
            weighted_means(part.weight),
            recorded_results(model) as results,
            recorded_updates(model) as updates_of_part,
        ):
            updates.append(updates_of_part)
            logs = model.compute_metrics(x, y, _cut(outputs, part), _cut(weights, part))
            figures = LogTemplate(model, logs, results).values
        arrays = {
            f"{METRICS}{i}": _numpy(scope.get_current_value(variable)) / part.weight
            for i, variable in enumerate(variables)
        }
        return arrays | {name: _numpy(value) for name, value in figures.items()}

    # Steps.

    def _step(self, kind: StepKind) -> None:
        """Measure the gradients, metrics and figures of a step of the program's own.

        Of a step of Keras's, these are only the metrics that layers update.
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
        whole = self.growths.whole
        if not (methods or of_layers or whole):
            return
        # As by `tf.distribute`, which divides Keras's losses by the number of replicas and adds gradients up.
        follows = self._context is not nullcontext and self._job.settings.tf_distribute
        summed = follows and "train_step" in methods
        names = [f"{name} of {type(model).__name__}" for name in methods]
        names = names or [f"{METRIC}{metric.name}" for metric in of_layers.values()] or [f"{kind}_step"]
        self._has_denominators = False
        attempts = self._tried(names, lambda: self._attempts(kind, summed))
        if attempts and "compute_loss" in methods:
            # All distances of the outputs may exceed a margin, so a comparison has no effect yet.
            with suppress(Exception, SystemExit), self._undisturbed(), _near_outputs(model), bounded():
                attempts.append(self._rounds(kind, summed))
        measured = dict(self.growths.steps.get(kind, {}))
        figures = self._whole_figures()
        owners = {id(v): metric for metric in flat_metrics(model.metrics) for v in metric.variables}
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
                if (
                    not is_state
                    and not (methods or whole)
                    and id(self._owner(group[0], owners)) not in of_layers
                ):
                    continue
                value, values = self._growth_of_group(
                    kind, group, rounds, with_loss=number == 0 and "loss" not in whole
                )
                if summed and group[0].startswith(GRADIENTS):
                    # The rule has made them what means are.
                    if value not in (MEAN, _NOTHING):
                        self._name(f"{names[0]}, whose gradients are added up as by tf.distribute")
                    continue
                if value is None:
                    self._name_array(group[0], owners, methods[0] if methods else f"{kind}_step")
                    # A step is rather a sum if it is nearly one.
                    counts = self._counts_rows(group[0], owners, rounds[0])
                    value = MEAN if counts else nearest_growth(values[0], values[1:], _HALVES)
                if value is _EITHER:
                    self._name_array(group[0], owners, methods[0] if methods else f"{kind}_step", tried=False)
                    value = MEAN
                if value is _NOTHING and methods and not self._gathers and self._shows_loss(group[0], owners):
                    self._name(f"{methods[-1]} of {type(model).__name__}", tried=False)
                growths_by_name |= dict.fromkeys(group, value)
            measured |= {
                (number, name): growth for name, growth in self._to_set(growths_by_name, owners).items()
            }
        self.growths = replace(
            self.growths,
            steps={**self.growths.steps, kind: measured},
            divisor=self._job.view.replicas if summed else self.growths.divisor,
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
        half = self._stays_half() or any(rounds[0][0][name].dtype.itemsize < 4 for name in group)
        values_by_growth: dict[Any, list[Array]] = {}
        either: list[tuple[list[Array], list[Array]]] = []
        for arrays in rounds:
            if all(name in each for name in group for each in arrays):
                values = [np.concatenate([each[name].ravel() for name in group]) for each in arrays]
                growth = self._growth(values, _HALVES, half=half)
                if group[0] in names_like_loss(self._model, kind, arrays[0]):
                    with_loss = False
                if with_loss and growth in (MEAN, None) and all("density" in each for each in arrays):
                    densities = [each["density"] for each in arrays]
                    weighted = [value * density for value, density in zip(values, densities, strict=True)]
                    if self._growth(weighted, _HALVES, half=half) == MEAN:
                        if growth == MEAN:
                            either.append((values, densities))
                            continue
                        growth = LIKE_LOSS
                values_by_growth.setdefault(growth, values)
        if either and values_by_growth.keys() <= {_NOTHING}:
            is_mean = not self._has_denominators or _is_independent(either, group[0].startswith(LOGS))
            values_by_growth[MEAN if is_mean else _EITHER] = either[0][0]
        if len(values_by_growth) > 1:
            values_by_growth.pop(_NOTHING, None)
        if len(values_by_growth) > 1:
            return None, values_by_growth.get(None, next(iter(values_by_growth.values())))
        return next(iter(values_by_growth.items()))

    def _to_set(self, growths_by_name: Mapping[str, Any], owners: Mapping[int, Any]) -> dict[str, int]:
        """Return the growths other than `MEAN`, by the names of the arrays of a partial.

        A sum of a metric that is zero in the trial, as its number of right answers may be, has the growth of
        the metric's other sums.
        """
        growths = dict(growths_by_name)
        for name, growth in growths_by_name.items():
            if growth is _NOTHING and (owner := self._owner(name, owners)) is not None:
                of_metric = {g for n, g in growths_by_name.items() if self._owner(n, owners) is owner}
                others = of_metric - {_NOTHING}
                growths[name] = others.pop() if len(others) == 1 else _NOTHING
        return {n: g for n, g in growths.items() if g is not _NOTHING and g != MEAN}

    def _counts_rows(
        self, name: str, owners: Mapping[int, Any], arrays: Sequence[Mapping[str, Array]]
    ) -> bool:
        """Whether an array belongs to a metric that also counts rows, so that it is a mean over them.

        A count is a multiple of the number of rows, or of the sum of their weights. A large sum is not.

        Args:
            name: the name of the array.
            owners: the metrics, by the ids of their variables.
            arrays: the arrays of all rows and of each half, each divided by its share of the rows.
        """
        owner = self._owner(name, owners)
        others = [
            [float(each[other].item()) for each in arrays]
            for other, array in arrays[0].items()
            if other != name and array.size == 1 and owner is not None and self._owner(other, owners) is owner
        ]
        halves = self._batch.halves
        sizes = [[float(halves[0].count)] * len(halves)]
        if (weights := halves[0].data[2]) is not None and keras.ops.is_tensor(weights):
            sums = [float(np.sum(_numpy(part.data[2]))) for part in halves]
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
        if "metrics" not in self.growths.whole:
            return frozenset()
        attempts = self._tried(["compute_metrics"], self._metric_states)
        return frozenset(name for attempt in attempts for name in attempt if name.startswith(LOGS))

    def _attempts(self, kind: StepKind, summed: bool) -> list[list[list[dict[str, Array]]]]:
        """Return the `_rounds` of a step; also with thinned denominators, if its losses have their own.

        Rows without padding do not show what depends on the denominator of the loss.
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
        model, growths = self._model, self.growths
        whole, *halves = self._batch.halves
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
                    self._job.trying(replicas),
                    self._context(),
                    _unscaled(model),
                    unchanged(model),
                    self._global_draws_named(),
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
                # A step of each kind exchanges its own.
                self._row_bytes = max(self._row_bytes, row_bytes)
                updates_of_halves = updates[1:3]
                if is_gather(arrays[0]):
                    self._gathers = True
                    # Those of the halves are the same rows.
                    totals.append(arrays[0])
                    continue
                if self._context is not nullcontext and not summed:
                    self._name_if_divided(arrays[1], compute(halves[0], 1), kind)
                weights = (1.0, *_HALVES)
                rounds.append([_unweighted(*pair) for pair in zip(arrays, weights, strict=True)])
                totals.append(arrays[0])
                if program.is_last(len(totals) - 1):
                    self._name_metrics_that_do_not_add(*updates_of_halves)
                    return rounds

    def _name_if_divided(
        self, of_two: Mapping[str, Array], of_one: Mapping[str, Array], kind: StepKind
    ) -> None:
        """Name a step whose gradients depend on the number of replicas that the script sees.

        It divides the mean of a replica by their number, which is right for replicas with equal numbers of
        examples only.
        """
        if not all(np.allclose(of_two[name], of_one[name]) for name in of_two if name.startswith(GRADIENTS)):
            self._name(f"{kind}_step of {type(self._model).__name__} where replicas have unequal shares")

    # What all trials share.

    @property
    def _weights(self) -> list[float]:
        return [part.weight for part in self._batch.parts]

    def _tried(self, names: Sequence[str], attempt: Callable[[], list[Any]]) -> list[Any]:
        """Return the result of a trial; if it fails, name the parts of the program that it was to measure."""
        try:
            if self._tries:
                # Reading may draw random numbers, which a trial would undo.
                if self._batch.count < 2:
                    return []
                try:
                    results, read = self._results(attempt)
                except (DataError, PeerError):
                    raise
                except Exception:
                    with self._precision() as layers:
                        if not layers:
                            raise
                    # A layer may have made constants in half precision, which others cannot be combined with.
                    precision, self._precision = self._precision, nullcontext
                    try:
                        results, read = self._results(attempt)
                    except BaseException:
                        self._precision = precision
                        raise
                return [*results, *self._padded(attempt), *self._repeated(attempt, read)]
        except (DataError, PeerError):  # Workers may read the batch together.
            raise
        except Exception:  # The program may call its parts in another way than the trial does.
            pass
        self._failed = True
        for name in names:
            self._name(name, tried=False)
        return []

    def _results(self, attempt: Callable[[], list[Any]]) -> tuple[list[Any], list[Any]]:
        """Return the results of a trial, and the variables of Keras that it has read."""
        read: dict[int, Any] = {}
        with self._undisturbed(), reads_observed_by(lambda v: read.setdefault(id(v), v)):
            return attempt(), list(read.values())

    def _padded(self, attempt: Callable[[], list[Any]]) -> list[Any]:
        """Return the results of a trial with rows of which some have padding.

        Rows without padding do not show a mean over the elements that a mask of the program's own keeps.
        """
        batch, padded = self._batch, self._batch.padded()
        if padded is not None:
            self._changes_values, self._batch = True, padded
            try:
                # The program may not be made for padding.
                with suppress(Exception, SystemExit), self._undisturbed(), bounded():
                    return attempt()
            finally:
                self._changes_values, self._batch = False, batch
        return []

    def _repeated(self, attempt: Callable[[], list[Any]], read: Sequence[Any]) -> list[Any]:
        """Return the results of a trial with other values of the numbers that the program may change.

        Args:
            attempt: the trial.
            read: the variables of Keras that it has read.
        """
        results: list[Any] = []

        def succeeds(changes: Sequence[Change]) -> bool:
            # The program may expect one of the values.
            with suppress(Exception, SystemExit), self._undisturbed(), changed(changes), bounded():
                results.extend(attempt())
                return True
            return False

        self._changes_values = True
        try:
            for changes in other_values(self._model, read, runs_python=self._runs_python):
                if not succeeds(changes) and 1 < len(changes) <= _FEW:
                    for change in changes:
                        succeeds([change])
        finally:
            self._changes_values = False
        return results

    def _stays_half(self) -> bool:
        """Whether layers compute in half precision also in a trial."""
        with self._precision():
            return _computes_in_half(self._model)

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        with random_numbers(0), neutral(self._model, self._name_draws), self._precision():
            yield

    def _each(self, compute: Callable[[TriedRows], Result]) -> list[Result]:
        """Return what is computed for all rows, and for each part, from equal random states."""
        results = []
        for part in (self._batch.whole, *self._batch.parts):
            with random_numbers(0), unchanged(self._model), self._global_draws_named():
                results.append(compute(part))
        return results

    def _name_draws(self, function: str) -> None:
        self._name(f"{DRAWS}{function}")

    @contextmanager
    def _global_draws_named(self) -> Iterator[None]:
        """Name the global generators of Python and NumPy if the block draws from them."""
        before = current_states()
        yield
        after = current_states()
        for library in LIBRARIES:
            if after[library.lower()] is not before[library.lower()]:
                self._name_draws(library)

    def _growth(self, values: Sequence[Array], weights: Sequence[float] = (), *, half: bool = False) -> Any:
        """Return the growth of a value from that of all rows and those of the parts.

        It is `_NOTHING` for zeros, and for a value that is not a number.

        Args:
            values: of all rows, then of each part.
            weights: of the parts.
            half: whether the value is computed in half precision, whatever its own type is.
        """
        whole, *parts = values
        if not any(np.any(value) for value in values) or not np.any(np.isfinite(whole)):
            return _NOTHING
        tolerance = HALF_TOLERANCE if half else _tolerance(whole)
        return measured_growth(whole, parts, weights or self._weights, tolerance)

    def _name(self, name: str, tried: bool = True) -> None:
        name = name if tried else f"{name}{UNTRIED}"
        if name not in self.names:
            self.names.append(name)

    def _name_array(self, name: str, owners: Mapping[int, Any], step: str, *, tried: bool = True) -> None:
        """Name the part of the program to which an array of a partial belongs."""
        kind, _, rest = name.partition("/")
        owner = self._owner(name, owners)
        if kind == "metric" and (owner is None or owner is not loss_tracker(self._model)):
            self._name(f"{METRIC}{owner.name if owner is not None else rest}", tried)
        elif kind == "log":
            figure = f"{FIGURE}{rest.replace('//', '/')} of"
            if f"{figure} compute_metrics" not in self.names:
                self._name(f"{figure} {step}", tried)
        else:
            self._name(f"{step} of {type(self._model).__name__}", tried)

    def _shows_loss(self, name: str, owners: Mapping[int, Any]) -> bool:
        """Whether an array of a partial is zero for each batch only if the loss of the program is zero."""
        if name.startswith(GRADIENTS):
            return True
        # A step of the program's own may not track it.
        tracked = not any(has_own(self._model, step) for step in ("train_step", "test_step"))
        return (
            tracked
            and (owner := self._owner(name, owners)) is not None
            and owner is loss_tracker(self._model)
        )

    def _owner(self, name: str, owners: Mapping[int, Any]) -> Any:
        """Return the metric to which an array of a partial belongs, or None if it belongs to none."""
        kind, _, rest = name.partition("/")
        return owners.get(id(self._model.metrics_variables[int(rest)])) if kind == "metric" else None


_HALVES = (0.5, 0.5)
"""The weights of the parts in the trial of a step: programs may divide by the number of equal replicas."""

UNTRIED = " (possibly: it could not be tested)"
"""The end of the name of a part that a trial did not show."""

_ROWS = "its rows, "
"""The beginning of the reason why a part is not computed from the whole batch."""

_NOTHING = object()
"""Represents the growth of a value that is zero for all rows and for each part, or not a number."""

_EITHER = object()
"""Represents the growth of a value that trials do not show: it may be `MEAN` or `LIKE_LOSS`."""


def without_remarks(name: str) -> str:
    """Return the name of a part without what notes add to it in brackets."""
    return name.partition(f" ({_ROWS}")[0].removesuffix(UNTRIED)


class LayerCalls:
    """The calls of a layer in one trial.

    Attributes:
        calls: the arrays of its inputs and of its outputs in each call.
        added: the values that it added to the loss.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[list[Array], list[Array]]] = []
        self.added: list[Array] = []

    @contextmanager
    def recording(self, layer: Any, note: Callable[[Any], object] = lambda layer: None) -> Iterator[None]:
        """Within the block, record the calls of a layer; `note` gets it after each call."""
        call, add = layer.call, getattr(layer, "add_loss", None)

        @functools.wraps(call)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            outputs = call(*args, **kwargs)
            note(layer)
            self.calls.append((_arrays((args, kwargs)), _arrays(outputs)))
            return outputs

        def added(loss: Any) -> None:
            # Keras adds up the elements.
            self.added.extend(np.sum(array, keepdims=True) for array in _arrays(loss))
            assert add is not None
            add(loss)

        adding = nullcontext() if add is None else replaced(layer, "add_loss", added)
        with replaced(layer, "call", recorded), adding:
            yield


@contextmanager
def neutral(model: Any, note: Callable[[str], object], *, constant: bool = False) -> Iterator[None]:
    """Within the block, a row of a batch does not depend on the others by random numbers or statistics.

    Args:
        model: the model whose layers compute in the block.
        note: gets the name of each function of the program that draws random numbers.
        constant: whether all draws are equal, also those of several replicas.
    """
    with (
        equal_draws(note, constant=constant),
        constant_statistics(model),
        without_summaries(),
        # A failed step leaves the losses that layers have added, which the next step would add up, too.
        kept_losses(layers_of(model)),
    ):
        yield


def rows_are_equal(parts: Sequence[Sequence[Array]], counts: Sequence[int]) -> bool:
    """Whether arrays of a whole batch have, up to rounding, the rows of the same arrays of its parts.

    Args:
        parts: the arrays of the whole batch, then those of each part.
        counts: the numbers of rows of the whole batch and of each part; an array with another number of rows
            is not compared.
    """
    for leaf, *pieces in zip(*parts, strict=True):
        shapes = [piece.shape for piece in (leaf, *pieces)]
        if not all(shape[:1] == (count,) for shape, count in zip(shapes, counts, strict=True)):
            continue
        if len({shape[1:] for shape in shapes}) > 1:
            return False
        joined = np.concatenate(pieces)
        if joined.shape != leaf.shape:
            return False
        if leaf.dtype.kind != "f":
            if not np.array_equal(leaf, joined):
                return False
        elif not np.allclose(leaf, joined, 0, 10 * _tolerance(leaf) * _largest(leaf), equal_nan=True):
            return False
    return True


@contextmanager
def constant_statistics(model: Any) -> Iterator[None]:
    """Within the block, BatchNormalization uses its averages, also in training.

    Modules of PyTorch, which have state of their own, have that from before afterwards.
    """
    modules = [module for layer in layers_of(model) for module in modules_of(layer)]
    with ExitStack() as stack:
        if modules:
            from lockstep.keras.fit.torch_modules import constant_modules

            stack.enter_context(constant_modules(modules))
        for layer in layers_of(model):
            if isinstance(layer, keras.layers.BatchNormalization):
                stack.enter_context(replaced(layer, "call", _without_statistics(layer.call)))
        yield


def _without_statistics(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def constant(inputs: Any, training: Any = None, mask: Any = None) -> Any:
        return call(inputs, training=False, mask=mask)

    return constant


class _UnlikeStepsError(Exception):
    """A step has made another update, or other figures, of a half of the rows than of all."""


STATE_CHANGES = (STATES, "layer/")
"""The beginnings of the names of changes of layers' states in a partial, by the backends."""


class _Assignments(keras.StatelessScope):  # type: ignore[misc]
    """Notes the ids of the floating-point variables that are assigned, such as a queue of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.assigned: set[int] = set()

    def add_update(self, update: Any) -> None:
        """Note a new value of a variable."""
        if keras.backend.is_float_dtype(update[0].dtype):
            self.assigned.add(id(update[0]))
        super().add_update(update)


def _groups(arrays: Mapping[str, Array]) -> list[list[str]]:
    """Return the names of arrays that have one growth: the gradients together, other values one by one."""
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

    What is proportional to a loss with its own denominator keeps the density as a factor. So it is a mean
    over examples, also where replicas have unequal densities.
    """
    return {name: array / weight for name, array in arrays.items() if name != "present"}


def _arrays(nest: Any) -> list[Array]:
    return [_numpy(leaf) for leaf in keras.tree.flatten(nest) if keras.ops.is_tensor(leaf)]


def _numpy(value: Any) -> Array:
    array: Array = keras.ops.convert_to_numpy(value)
    return array


def _cut(nest: Nest, part: TriedRows) -> Nest:
    """Return the rows of a part of a nest of values that have a row for each example."""
    return keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[part.rows], nest)


def _multiplied(leaf: Any, factors: Array) -> Any:
    """Return a tensor of floating point with its rows, or its elements, multiplied by factors."""
    dtype = None if leaf is None else keras.backend.standardize_dtype(leaf.dtype)
    if dtype is None or not keras.backend.is_float_dtype(dtype):
        return leaf
    factors = factors.reshape(factors.shape + (1,) * (len(leaf.shape) - factors.ndim))
    return leaf * keras.ops.convert_to_tensor(factors, dtype)


def _rescaled(leaf: Any, generator: np.random.Generator) -> Any:
    """Return a tensor with each element multiplied by a number; small logits and the like become larger."""
    if leaf is None:
        return None
    factors = generator.uniform(0.3, 1.0, tuple(leaf.shape))
    array = _numpy(leaf)
    if array.dtype.kind == "f" and not np.any(array):
        return keras.ops.convert_to_tensor(factors, leaf.dtype)
    if array.dtype.kind == "f" and np.any(array < 0):
        factors /= min(1.0, _largest(array))
    return _multiplied(leaf, factors)


def _graded(leaf: Any) -> Any:
    """Return outputs whose level rises from row to row: that of logits and the like, or of probabilities."""
    if leaf is None:
        return None
    array = _numpy(leaf)
    if array.dtype.kind != "f" or not np.any(array < 0):
        return _multiplied(leaf, np.linspace(0.05, 1.0, len(array)))
    levels = 2 * max(1.0, _largest(array)) * np.linspace(-1.0, 1.0, len(array))
    graded = array + levels.reshape((-1,) + (1,) * (array.ndim - 1))
    return keras.ops.convert_to_tensor(graded, leaf.dtype)


def _pairs(outputs: Nest, labels: Nest) -> list[tuple[Any, Any]]:
    """Return the outputs with their labels, or an empty list where they do not belong together one by one."""
    leaves, targets = keras.tree.flatten(outputs), keras.tree.flatten(labels)
    return list(zip(leaves, targets, strict=True)) if len(leaves) == len(targets) else []


def _partly_right(output: Any, label: Any) -> Any:
    """Return an output that is the label, or its class, for every second example, or None if it cannot be."""
    array, target = _numpy(output), None if label is None else _numpy(label)
    if target is None or array.dtype.kind != "f" or target.dtype.kind not in "biuf":
        return None
    if target.shape != array.shape:
        classes = array.shape[-1]
        if target.size != array.size // classes or not np.all((target >= 0) & (target < classes)):
            return None
        target = 0.05 + 0.9 * np.eye(classes)[target.astype("int64").reshape(array.shape[:-1])]
    even = (np.arange(len(array)) % 2 == 0).reshape((-1,) + (1,) * (array.ndim - 1))
    return keras.ops.convert_to_tensor(np.where(even, target, array), output.dtype)


@contextmanager
def _near_outputs(model: Any) -> Iterator[None]:
    """Within the block, the program's own `compute_loss` gets outputs that are near to each other."""
    original = model.compute_loss
    # The program may give the outputs another name.
    name = (*inspect.signature(original).parameters, "", "", "")[2]

    def near(output: Any) -> Any:
        if output is None or not keras.backend.is_float_dtype(output.dtype):
            return output
        return output * 0.01

    @functools.wraps(original)
    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        if len(args) > 2:
            args = (*args[:2], keras.tree.map_structure(near, args[2]), *args[3:])
        else:
            name_here = name if name in kwargs else "y_pred"
            kwargs[name_here] = keras.tree.map_structure(near, kwargs[name_here])
        return original(*args, **kwargs)

    with replaced(model, "compute_loss", compute_loss):
        yield


def _is_half(tensor: Any) -> bool:
    return tensor is not None and keras.backend.standardize_dtype(tensor.dtype) in HALF_TYPES


def _computes_in_half(model: Any) -> bool:
    return any(layer.compute_dtype in HALF_TYPES for layer in layers_of(model))


@contextmanager
def _unscaled(model: Any) -> Iterator[None]:
    """Within the block, optimizers do not scale losses, whose gradients could overflow for some rows only."""
    with ExitStack() as stack:
        for optimizer in optimizers_of(model):
            stack.enter_context(replaced(optimizer, "scale_loss", lambda loss: loss))
        yield


def _tolerance(array: Array) -> float:
    return HALF_TOLERANCE if array.dtype.itemsize < 4 else TOLERANCE


def _largest(array: Array) -> float:
    return float(np.max(np.abs(array), where=np.isfinite(array), initial=0))


def _is_own(layer: Any) -> bool:
    """Whether a method of a layer is not one of Keras's, or it wraps a module of PyTorch."""
    module = getattr(type(layer).call, "__module__", "")
    return not is_of_keras(module) or _may_add_losses(layer) or bool(modules_of(layer))


def _may_compare_rows(layer: Any) -> bool:
    """Whether a layer is the program's own, holds a function of the program, or works along the examples."""
    if _is_own(layer) or isinstance(layer, keras.layers.Lambda):
        return True
    axis = getattr(layer, "axis", None)
    return 0 in (axis if isinstance(axis, list | tuple) else (axis,)) or any(
        isinstance(value, FunctionType) and not value.__module__.startswith("keras.")
        for value in vars(layer).values()
    )


def _operations_of(model: Any) -> list[Any]:
    """Return the operations of functional models that are not layers."""
    functions = [layer for layer in layers_of(model) if isinstance(layer, keras.Function)]
    operations = [operation for function in functions for operation in function.operations]
    return [operation for operation in operations if not isinstance(operation, keras.Layer)]


def _within(layer: Any) -> list[Any]:
    """Return the layers and operations within a layer."""
    if not isinstance(layer, keras.Layer):
        return []
    return [*layers_of(layer, include_self=False), *_operations_of(layer)]


def _may_add_losses(layer: Any) -> bool:
    """Whether a method of a layer's own class calls `add_loss`."""
    classes = [each for each in type(layer).__mro__ if not each.__module__.startswith(("keras.", "builtins"))]
    codes = [getattr(member, "__code__", None) for each in classes for member in vars(each).values()]
    return any(code is not None and "add_loss" in code.co_names for code in codes)
