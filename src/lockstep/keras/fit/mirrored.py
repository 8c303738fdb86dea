"""The trainer of replicas: every worker computes its share of a call, and returns the results of all."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import partial
from typing import Any

import keras

from lockstep.data.batch import LocalGrouping
from lockstep.errors import ModelError
from lockstep.keras.backends.common import (
    refuse_other_weights,
    refuse_stateful_layers,
    refuse_synchronized_normalization,
)
from lockstep.keras.backends.contract import StepKind
from lockstep.keras.backends.growth import growths_of, runs_python
from lockstep.keras.backends.losses import refuse_vectors
from lockstep.keras.backends.traces import Traces, new_traces
from lockstep.keras.changed_values import ChangedValues, set_values
from lockstep.keras.fit.call_inputs import refuse_empty
from lockstep.keras.fit.call_record import extent_of_fit, fit_facts, model_facts
from lockstep.keras.fit.callbacks import (
    chief_files,
    has_batch_methods,
    note_different_paths,
    paths_of,
    without_writers,
    writes,
    writing_once,
)
from lockstep.keras.fit.global_step import CHECKED_STEPS, GlobalStep
from lockstep.keras.fit.introductions import Introductions
from lockstep.keras.fit.trainer import FUNCTIONS, KINDS, Original, TrainerParts, bind, method_of
from lockstep.keras.input.fit_inputs import ArrayInput, GlobalInput, PipelinesInput
from lockstep.keras.input.stored_arrays import explain_memory
from lockstep.keras.nests import has_weights
from lockstep.keras.numbered_calls import NumberedCall
from lockstep.keras.private.common import CACHED_VALIDATION, sample_weights
from lockstep.keras.randomness import random_states
from lockstep.keras.state.callback_states import attribute_hashes, listed, listeners, set_callback_states
from lockstep.keras.state.checkpoint_callback import checkpoint_in, without_checkpoint
from lockstep.keras.state.journal import FinishedCall
from lockstep.keras.state.resumable_calls import CallFinishedElsewhere
from lockstep.keras.verification import verifications_of
from lockstep.keras.worker_exchange import Facts
from lockstep.observability.events import ChiefWrites

_MOST_UNTAKEN = 10_000
"""The calls for single batches that take no step in a check before it ends the script: a loop may wait for a
loss that it never reaches."""


class Mirrored:
    """The `Trainer` of replicas. The trainers of one replica and of servers override differing methods.

    Args:
        parts: the parts of the trainer.

    Attributes:
        keeps_state: whether workers join and leave, and checkpoints are saved, after single batches.
        divides_training: whether the workers divide the batches of training.
    """

    keeps_state = True
    divides_training = True

    def __init__(self, parts: TrainerParts) -> None:
        self._parts, self._job = parts, parts.job
        self._models, self._resumable = parts.snapshots.models, parts.resumable
        self._introductions = Introductions(
            parts, self._new_step, self._tries, divides_training=self.divides_training
        )
        self._told_paths: set[str] = set()

    def call(self, method: str, original: Original, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Make a call in its turn. In a thread that reads a call's examples, let Keras make it."""
        parts = self._parts
        if parts.turns.is_within() and method in FUNCTIONS:
            with parts.functions.made_by_keras(model, FUNCTIONS[method]):
                return original(model, *args, **kwargs)
        with parts.turn(method, model, args, kwargs):
            return method_of(self, method)(original, model, *args, **kwargs)

    def fit(self, original: Original, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Train on global batches in the job's order."""
        parts = self._parts
        self._job.note_distribution()
        bound = bind(original, model, args, kwargs)
        arguments = bound.arguments
        parts.last.trains(model)
        checkpoint = checkpoint_in(arguments["callbacks"])
        callbacks = without_checkpoint(checkpoint, arguments["callbacks"])
        if self._job.settings.checks:
            callbacks = without_writers(callbacks)
        with self._resumable.call("fit") as call:
            if checkpoint is not None:
                parts.checkpoints.begin(checkpoint)
            parts.inputs.note_held(call, model, arguments["x"], arguments["validation_data"])
            if finished := self._resumable.resume():
                finished = self._replay(
                    model, "train", finished, lambda: parts.inputs.of_training(arguments)[0].peek()
                )
                return replay_fit(model, callbacks, finished)
            training, validation = self._inputs_of_fit(model, arguments)
            self._group(training, arguments)
            inputs = [data for data in (training, validation) if isinstance(data, GlobalInput)]
            explain_memory(self._job, sum(data.held for data in inputs))
            call.extent = extent_of_fit(arguments, training)
            self._begin(
                call,
                model,
                "train",
                training,
                lambda: fit_facts(model, arguments, training, validation),
                lambda: parts.record.settings_of_fit(model, arguments),
            )
            if isinstance(validation, ArrayInput):
                self._introduce(
                    call, model, "test", validation.batch_to_try, weighs=lambda: validation.weighs
                )
            elif isinstance(validation, GlobalInput):
                # No other input is read before training, because both may share a generator.
                with self._introductions.compared(call, model, "test", validation.batch_to_try):
                    pass
            if len(self._job.view.workers) > 1 and not self._resumable.catches_up:
                note_different_paths(self._job, callbacks, call.name, self._told_paths)
            verifications_of(self._job).note_files(paths_of(callbacks).values())
            arguments.update(x=training, y=None, sample_weight=None, class_weight=None)
            arguments.update(validation_data=validation, validation_split=0.0)
            call.callbacks = writing_once(callbacks, arguments["verbose"], resumes=call.forwarding)
            if len(self._job.view.hosts) > 1 and (files := chief_files(call.callbacks)):
                self._job.events.publish(ChiefWrites(files))
            parts.snapshots.note_settings(model)
            call.callback_hashes = [attribute_hashes(call.callbacks)]
            if self.keeps_state and len(parts.calls.stack) == 2:
                call.values = ChangedValues(
                    model,
                    listed(call.callbacks),
                    compiled=not runs_python(model),
                    alone=self._job.view.replicas == 1,
                )
            call.model, call.by_batch = model, has_batch_methods(call.callbacks)
            arguments.update(callbacks=call.callbacks)
            try:
                result = original(*bound.args, **bound.kwargs)
            except CallFinishedElsewhere:
                finished = self._resumable.replay()
                return replay_fit(model, callbacks, finished)
            parts.record.state(f"the end of {call.name}", model)
            parts.record.compare_states(f"the end of {call.name}", model)
            parts.record.finish(result)
            if writes(callbacks):
                self._job.exchange(lambda _, exchange: exchange.barrier(what=f"the end of {call.name}"))
            return result

    def evaluate(self, original: Original, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate on global batches. Every worker returns the global figures."""
        parts = self._parts
        self._job.note_distribution()
        if kwargs.get(CACHED_VALIDATION):
            if (training := parts.calls.current).forwarding:
                return {}
            if training.model is not None:
                self.steps_ended(training)
            with self._resumable.call("validation") as call:
                weighs = growths_of(model).unweighted and not self._resumable.catches_up
                if weighs and isinstance(data := kwargs["x"], GlobalInput):
                    # The first sample weights may be those of validation data. `fit` has compared a step.
                    self._introductions.measure(call, model, "test", data.batch_to_try, lambda: data.weighs)
                parts.record.begin(call, model, dict)
                if verifications_of(self._job).plan.verification.every:
                    call.metrics = parts.snapshots.metrics_of(model)
                    call.states = random_states(training.held_by_validation)
                    self._resumable.resume_validation(training)
                return original(model, *args, **kwargs)
        return self._without_training("evaluate", original, model, args, kwargs)

    def predict(self, original: Original, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Predict on global batches. Every worker returns all rows, in their order."""
        self._job.note_distribution()
        return self._without_training("predict", original, model, args, kwargs)

    def _without_training(self, method: str, original: Original, model: Any, args: Any, kwargs: Any) -> Any:
        """Make a call of `evaluate` or `predict` of the script."""
        parts = self._parts
        bound = bind(original, model, args, kwargs)
        arguments = bound.arguments
        with self._resumable.call(method) as call:
            parts.inputs.note_held(call, model, arguments["x"])
            options = {"batch_size": arguments["batch_size"], "steps": arguments["steps"]}
            labels = [arguments[name] for name in ("y", "sample_weight") if name in arguments]

            def read() -> GlobalInput:
                return parts.inputs.of_call(arguments["x"], *labels, **options, in_order=method == "predict")

            if finished := self._resumable.resume():
                kind: StepKind = "predict" if method == "predict" else "test"
                return self._replay(model, kind, finished, lambda: read().peek()).result
            if not self._prepares(model):
                return parts.record.finish(original(model, *args, **kwargs))
            data = read()
            refuse_empty(data)
            explain_memory(self._job, data.held)
            if method == "predict":
                parts.inputs.build_to_predict(data, model)
                self._introduce(call, model, "predict", data.batch_to_try)
                parts.record.begin(call, model, data.facts)
            else:
                self._begin(call, model, "test", data, data.facts)
                arguments.update(y=None, sample_weight=None)
            call.callbacks = keras.tree.flatten(listed(arguments["callbacks"] or ()))
            if call.callbacks and verifications_of(self._job).plan.verification.every:
                call.callback_hashes = [attribute_hashes(call.callbacks)]
                call.values = ChangedValues(model, call.callbacks, compiled=not runs_python(model))
            arguments.update(x=data, verbose=arguments["verbose"] if self._job.is_chief else 0)
            with self._reading():
                return parts.record.finish(original(*bound.args, **bound.kwargs))

    def on_batch(self, method: str, original: Original, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Split a batch that all workers pass. In the first call, check that they have the same model."""
        kind, parts = KINDS[method], self._parts
        self._job.note_distribution()
        if kind == "train":
            parts.last.trains(model)
        batch = partial(_batch_of, original, model, args, kwargs)
        with self._resumable.call(method) as call:
            call.at_end = True
            compared = parts.models.compilation(model).compared
            if finished := self._resumable.resume():
                if finished.error is None and not self._models.has_built(model, kind):
                    # Training may resume after a call of another model. No later call builds this one.
                    self._models.build(model, kind, batch)
                    finished = self._resumable.replay()
                compared.add(kind)
                take = partial(original, model, *args, **kwargs)
                return self._replay_batch(call, model, kind, finished, batch, take)
            if kind not in compared:
                self._begin_batches(call, model, kind, batch)
            elif kind != "predict" and self._is_to_try(model, kind, batch):
                self._introduce_batch(call, model, kind, batch)
            results: list[Any] = []
            if self._job.settings.checks and kind != "predict":
                returns_dict = bool(bind(original, model, args, kwargs).arguments["return_dict"])
                results = parts.models.compilation(model).batches.setdefault((method, returns_dict), results)
                if len(results) >= CHECKED_STEPS + _MOST_UNTAKEN:
                    self._job.end_check(f"the script calls {method} more than {_MOST_UNTAKEN:,} times")
                if len(results) >= CHECKED_STEPS:
                    results.append(None)
                    return copy(results[CHECKED_STEPS - 1])
            try:
                result = parts.record.finish(original(model, *args, **kwargs))
            except CallFinishedElsewhere:
                return self._result_elsewhere(model, self._resumable.replay())
            results.append(result)
            if kind == "train":
                parts.record.note_batch(model)
                if self.keeps_state:
                    parts.snapshots.end_step(lambda whole: parts.snapshots.take(whole, model, None))
                    parts.snapshots.hold_late(lambda: parts.snapshots.take(True, model, None))
            return result

    def make_function(self, kind: StepKind, original: Original, model: Any, force: bool) -> Any:
        """Make the function that takes a step of all replicas, if the model has none."""
        attribute, compilation = f"{kind}_function", self._parts.models.compilation(model)
        if kind == "train" and getattr(model, attribute) is not None:
            trained = model.trainable_variables if compilation.trained is None else compilation.trained
            refuse_other_weights(model, trained)
        if getattr(model, attribute) is None or force:
            refuse_synchronized_normalization(model)
            refuse_stateful_layers(model)
            compilation.trained = model.trainable_variables
            step = self._new_step(model, kind, new_traces(model, kind))
            setattr(model, attribute, self._parts.backend.function(model, step.take, kind))
        return getattr(model, attribute)

    def saves(self, model: Any) -> bool:
        """Whether this process saves a model: all of them do, and share the work."""
        return True

    def step_ended(self, call: NumberedCall) -> None:
        """Do nothing: a step counts itself."""

    def steps_ended(self, call: NumberedCall) -> None:
        """Hold the state, whose digest the last step has recorded."""
        self._parts.hold(call)

    def _inputs_of_fit(self, model: Any, arguments: dict[str, Any]) -> tuple[GlobalInput, Any]:
        training, validation = self._parts.inputs.of_training(arguments)
        training.before_pass = self._resumable.begin_pass
        return training, None if validation is None else self._validation(model, arguments, validation)

    def _group(self, training: GlobalInput, arguments: dict[str, Any]) -> None:
        """Let Keras's loop take outer steps, if the job takes local steps."""
        local, replicas = self._job.local_steps, self._job.view.replicas
        if local is None or self._job.settings.checks or replicas == 1:
            return
        if isinstance(training, PipelinesInput):
            raise ModelError(
                "local steps: replicas with their own datasets are not supported; give fit one dataset of "
                "global batches"
            )
        epoch = arguments["steps_per_epoch"]
        training.grouping = LocalGrouping(local.steps, epoch, replicas)
        if epoch is not None:
            arguments["steps_per_epoch"] = training.grouping.count(epoch)

    def _validation(self, model: Any, arguments: dict[str, Any], validation: Any) -> Any:
        """Return the validation data as Keras's loop gets it.

        Raises:
            ModelError: the step of the validation, which comes after an epoch, refuses a loss.
        """
        refuse_vectors(model, "test")
        return self._parts.inputs.of_validation(arguments, validation)

    def _begin(
        self,
        call: NumberedCall,
        model: Any,
        kind: StepKind,
        data: GlobalInput,
        facts: Callable[[], Facts],
        settings: Callable[[], Facts] = dict,
    ) -> None:
        """Build the model with the first batch, refuse what replicas cannot compute, and begin the call."""
        self._models.build(model, kind, lambda: self._sample(data, model, kind))
        self._introduce(call, model, kind, data.batch_to_try, weighs=lambda: data.weighs)
        self._parts.record.begin(call, model, facts, settings)

    def _begin_batches(
        self, call: NumberedCall, model: Any, kind: StepKind, batch: Callable[[], Any]
    ) -> None:
        """Prepare for single-batch calls of a kind, once: build the model, and check it."""
        if kind != "predict" and self._prepares(model):
            self._models.build(model, kind, batch)
            self._introduce_batch(call, model, kind, batch)
        self._models.load_waiting(model)
        if kind == "predict" and self._models.is_built(model):
            self._introduce_batch(call, model, kind, batch)
        if self._models.is_built(model):
            record = self._parts.record
            record.begin(call, model, lambda: model_facts(model), lambda: record.settings_of_call(model))
            self._parts.models.compilation(model).compared.add(kind)

    @staticmethod
    def _is_to_try(model: Any, kind: StepKind, batch: Callable[[], Any]) -> bool:
        """Whether a model still has to be tried, although an earlier call has compared a kind of step.

        This process may have skipped that call, the batch may have the first sample weights, or the program
        may have added a layer.
        """
        growths = growths_of(model)
        return not growths.has_tried(model, kind) or (growths.unweighted and has_weights(batch()))

    def _introduce_batch(
        self, call: NumberedCall, model: Any, kind: StepKind, batch: Callable[[], Any]
    ) -> None:
        self._introduce(call, model, kind, batch, weighs=lambda: has_weights(batch()))

    def _replay(
        self, model: Any, kind: StepKind, finished: FinishedCall, sample: Callable[[], Any]
    ) -> FinishedCall:
        """Return a finished call. If a single-batch call follows, and is repeated, give models their values.

        Args:
            model: the model of the call.
            kind: the kind of its steps.
            finished: the call.
            sample: returns a batch to build the model with.
        """
        is_built = self._models.is_built(model)
        if self._resumable.before_repeated_prediction:
            # No later call builds the metrics, which are a part of the state.
            is_built = self._models.has_built(model, kind)
        if finished.error is None and not is_built:
            # Training may resume in a call of another model. No later call builds this one.
            self._models.build(model, kind, sample)
            finished = self._resumable.replay()
        if self._resumable.before_repeated_batch:
            if self._job.joins:
                self._resumable.join()
                finished = self._resumable.replay()
            self._result_elsewhere(model, finished)
        return finished

    def _replay_batch(
        self,
        call: NumberedCall,
        model: Any,
        kind: StepKind,
        finished: FinishedCall,
        batch: Callable[[], Any],
        take: Callable[[], object],
    ) -> Any:
        """Return the result of a finished single-batch call. Resume after it, if it was the last one.

        Args:
            call: the call.
            model: its model.
            kind: the kind of the step.
            finished: the result.
            batch: returns the batch.
            take: takes the step.
        """
        if self._resumable.at_its_end or self._resumable.before_repeated_batch:
            if kind != "predict":
                self._introduce_batch(call, model, kind, batch)
            if self._job.joins:
                # Compile the step before others wait for this worker. Its results are overwritten.
                take()
                self._resumable.join()
                finished = self._resumable.replay()
        return self._result_elsewhere(model, finished)

    def _result_elsewhere(self, model: Any, finished: FinishedCall) -> Any:
        """Return the result of a finished single-batch call, after which training may resume."""
        if self._resumable.at_its_end:
            self._parts.snapshots.restore(model)
        elif self._resumable.before_repeated_batch:
            self._parts.snapshots.load_models()
        return finished.result

    def _prepares(self, model: Any) -> bool:
        """Whether a call reads its first batch before Keras's own method does."""
        return True

    def _introduce(
        self,
        call: NumberedCall,
        model: Any,
        kind: StepKind,
        read: Callable[[], Any],
        *,
        weighs: Callable[[], bool] = lambda: False,
    ) -> None:
        """Try a model on its first batch."""
        self._introductions.introduce(call, model, kind, read, weighs)

    def _new_step(self, model: Any, kind: StepKind, traces: Traces | None = None) -> GlobalStep:
        parts = self._parts
        context = parts.models.step_context(model) if kind == "train" else nullcontext
        return GlobalStep(
            job=self._job,
            backend=parts.backend,
            model=model,
            kind=kind,
            calls=parts.calls,
            snapshots=parts.snapshots,
            context=context,
            traces=traces or Traces(model, kind),
            follow=self._introductions.follow,
        )

    def _sample(self, data: GlobalInput, model: Any, kind: StepKind) -> Any:
        """Return a batch to build a model with."""
        return self._parts.inputs.sample(data, model, kind)

    def _tries(self, model: Any) -> bool:
        """Whether a trial may call a model any number of times."""
        return True

    def _reading(self) -> AbstractContextManager[None]:
        """Return a context in which all workers compute the batches of a call."""
        return nullcontext()


def replay_fit(model: Any, callbacks: Any, finished: FinishedCall) -> Any:
    """Return the result of a `fit` that finished before this process began; restore what it changed.

    If it raised an error, raise it again. `finished.kept` is None if its callbacks had not begun.

    Args:
        model: the model.
        callbacks: the callbacks that the script passes.
        finished: the call.
    """
    if (kept := finished.kept) is not None:
        # A call of an earlier version has only the states of callbacks.
        kept = kept if isinstance(kept, dict) else {"callbacks": kept, "values": {}}
        model.history = keras.callbacks.History()
        model.history.set_model(model)
        listening = writing_once(callbacks, 0, resumes=True)
        set_callback_states(listeners(listening, model), kept["callbacks"])
        set_values(model, listed(listening), kept["values"])
    finished.raise_error()
    return model.history


def _batch_of(original: Original, model: Any, args: Any, kwargs: Any) -> Any:
    """Return the (x, y, sample_weight) of a call for a single batch, which may have weights by class."""
    arguments = bind(original, model, args, kwargs).arguments
    x, y, weights = arguments["x"], arguments.get("y"), arguments.get("sample_weight")
    if weights is None and arguments.get("class_weight") is not None:
        weights = sample_weights(y, arguments["class_weight"])
    return x, y, weights
