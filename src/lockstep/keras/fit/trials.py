"""Tries how a program treats its examples: it computes some rows as a whole, and in two parts.

So a function of the program is never judged by its name. If the value for all rows follows from the values
for the parts, it is a sum or a mean over examples, which replicas compute exactly
(`lockstep.keras.backends.growth`). Any other value compares examples: it is computed per replica, and named.

In a trial, BatchNormalization uses its averages, which are constants, and random operations draw equal
numbers for each row, because parts of a batch would draw different numbers from the whole. A trial leaves no
changes.

Up to 16 rows of the first batch are computed as a whole and in two parts, before the first step of a
compiled model (`lockstep.keras.fit.tried_model`). A trial measures, each in a file of its own (`loss_trial`,
`layer_trial`, `metric_trial`, `step_trial`),

* each compiled loss that is not one of Keras's means, from the model's outputs, and again from changed
  outputs, because equal rows do not show whether a function compares them. A loss that assigns variables,
  such as a queue of embeddings, counts as one that compares;
* the values that each layer passes to `add_loss`, and its `activity_regularizer`. The same calls show which
  layers of the program and operations of functional models compare examples. This includes Keras's layers
  that hold a function of the program (`Lambda`, an activation) or work along the first axis;
* the metrics of the program and the figures of its own `compute_metrics`; whether the state of a metric is a
  sum (`lockstep.keras.fit.metric_states`);
* the gradients, metrics, figures and states of its own `train_step`, `test_step` or `compute_loss`, in the
  step's own function. The whole is computed as one replica, and the script sees `num_replicas_in_sync` = 1.

Workers compare the growths with each reduce. A part that has no effect in a trial may compare examples. So
labels that are all equal are varied, and rows are also tried with padding (`lockstep.keras.fit.tried_rows`).
Numbers that the program may change later get other values (`lockstep.keras.fit.other_values`). A loss that is
zero counts as not tried. A program's own parts are tried again when a later call has sample weights for the
first time, or when the program has changed a boolean or a similar value (`lockstep.keras.fit.introductions`).

With `--tf-distribute`, a script that creates strategies follows the rule of `tf.distribute` in its own
`train_step`: gradients are added up, and Keras's own losses are divided by R. A note names a step for which
this is not the gradient of one process.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from lockstep.errors import ModelError
from lockstep.keras.backends.common import has_own
from lockstep.keras.backends.contract import Backend, StepKind, WholePart
from lockstep.keras.backends.growth import declared_growths, growths_of, set_growths
from lockstep.keras.backends.whole_batch import may_compare_examples
from lockstep.keras.fit.layer_trial import LayerTrial
from lockstep.keras.fit.loss_trial import LossTrial
from lockstep.keras.fit.metric_trial import MetricTrial
from lockstep.keras.fit.part_names import DRAWS, OF_LOSSES, OF_METRICS, SIZE_OF_ROWS, UNTRIED
from lockstep.keras.fit.plain_function import computes_in_half
from lockstep.keras.fit.step_trial import StepTrial
from lockstep.keras.fit.tried_model import TriedModel
from lockstep.keras.fit.tried_rows import TriedBatch
from lockstep.keras.private.common import flat_losses
from lockstep.keras.variables import flat_metrics
from lockstep.protocol.job_spec import LARGEST_EXCHANGE
from lockstep.worker.job import Job


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
        self._job = job
        self._backend = backend
        self._model = model
        self._batch = batch
        self._context = context
        self._tries, self._divides_training = tries, divides_training
        self._tried = TriedModel(job, backend, model, batch, tries=tries)
        self._metric_trial = MetricTrial(self._tried, whole)
        self._step_trial = StepTrial(self._tried, self._metric_trial, context)
        self.exact: list[str] = []
        self.growths = replace(growths_of(model), whole=whole)

    def measure(self, kinds: Sequence[StepKind]) -> None:
        """Measure the program's own losses, layers and metrics, and some kinds of steps.

        Parts that compare examples are computed from the whole batch, if a trial shows that this is exact.

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
            if trial._tried.failed or any(name.startswith(OF_LOSSES) for name in others):
                continue
            # The trial of a step sees what that of a metric may not see.
            self._tried.names += others
            exact = [name for name in self.names if name not in trial.names]
            if not exact:
                continue
            size = trial._step_trial.row_bytes * self._batch.examples
            if size > LARGEST_EXCHANGE and computes_in_half(self._model):
                # The rows of training are smaller than those of a trial.
                sized = Trial(self._job, self._backend, self._model, self._batch, self._context, whole=whole)
                sized._tried.precision = nullcontext
                sized._measure(kinds)
                size = (sized._step_trial.row_bytes or trial._step_trial.row_bytes) * self._batch.examples
            if size > LARGEST_EXCHANGE and not self._job.exact_batch:
                mebibytes = f"{size / (1 << 20):.0f} MiB"
                large = f"{SIZE_OF_ROWS}{mebibytes} a step, are exchanged only with --exact-batch"
                self._tried.names = [f"{name} ({large})" if name in exact else name for name in self.names]
                refused = self._metric_trial.refused
                self._metric_trial.refused = {name: f"{why}; {large}" for name, why in refused.items()}
                break
            self._tried, self._metric_trial, self.growths = trial._tried, trial._metric_trial, trial.growths
            self.exact += [name.removesuffix(UNTRIED) for name in exact]
        if self._metric_trial.refused:
            raise ModelError(next(iter(self._metric_trial.refused.values())))
        if self._loss_can_wait():
            self.growths = replace(self.growths, whole=self.growths.whole | {"test_step"})
        set_growths(self._model, self.growths)

    def name_predictions(self) -> None:
        """Name the parts that compare examples in predictions: layers, operations and the `predict_step`."""
        LayerTrial(self._tried).name_predictions()

    @property
    def names(self) -> list[str]:
        """The names of the parts of the program that compare examples, or could not be tried."""
        return self._tried.names

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

        Keras's own step does not use the loss for anything else. Each worker would draw numbers of its own.
        """
        overrides, whole = partial(has_own, self._model), self.growths.whole
        draws = any(name.startswith(DRAWS) for name in self.names)
        return "loss" in whole and not (
            draws or overrides("test_step") or (overrides("compute_metrics") and "metrics" not in whole)
        )

    def _wholes(self) -> list[frozenset[WholePart]]:
        """Return the parts that may also be computed from the whole batch, so that fewer parts are named."""
        if not (self._tries and self._divides_training):
            return []
        loss, metrics = (
            any(name.startswith(beginnings) for name in self.names) for beginnings in (OF_LOSSES, OF_METRICS)
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
        losses = {} if "loss" in self.growths.whole else LossTrial(self._tried).measure()
        self.growths = replace(self.growths, losses=losses, layers=LayerTrial(self._tried).measure())
        set_growths(self._model, self.growths)
        if measured := self._metric_trial.measure():
            steps = {**self.growths.steps, **dict.fromkeys(kinds, measured)}
            self.growths = replace(self.growths, steps=steps)
        set_growths(self._model, self.growths)
        for kind in kinds:
            self.growths = self._step_trial.measure(kind, self.growths)
        set_growths(self._model, self.growths)
