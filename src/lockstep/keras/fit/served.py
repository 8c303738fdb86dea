"""The trainers of a job with parameter servers, which have the weights in `fit` and in scheduled functions.

Outside of these, all processes are workers of one view and have the same state, so they evaluate and predict
as `Mirrored` does. Within `fit`, each process is apart from the view, and runs `fit_on_servers` of
`keras/parameter_server/fit.py`.
"""

import inspect
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import keras

from lockstep.errors import ModelError, ScopeError
from lockstep.keras.backends.common import refuse_stateful_layers, refuse_synchronized_normalization
from lockstep.keras.backends.contract import StepKind
from lockstep.keras.fit.call_record import extent_of_fit, fit_facts
from lockstep.keras.fit.callbacks import writing_once
from lockstep.keras.fit.mirrored import Mirrored, replay_fit
from lockstep.keras.fit.one_replica import OneReplica, Outside
from lockstep.keras.fit.trainer import Original, TrainerParts, bind
from lockstep.keras.input.fit_inputs import GlobalInput
from lockstep.keras.input.loader_reading import is_loader
from lockstep.keras.numbered_calls import NumberedCall
from lockstep.keras.parameter_server.embedding_tables import EmbeddingTables, find_tables
from lockstep.keras.parameter_server.fit import fit_on_servers
from lockstep.keras.parameter_server.function_joining import FunctionJoining
from lockstep.keras.parameter_server.process import ServedCall, UsedIterators
from lockstep.keras.parameter_server.server_embedding import (
    meet_servers,
    only_chief_reads,
    refuse_apart,
    server_layers,
)
from lockstep.keras.parameter_server.server_tables import rows_read_together
from lockstep.keras.replica_run.merges import current_replica
from lockstep.keras.state.callback_states import attribute_hashes
from lockstep.keras.state.checkpoint_callback import checkpoint_in
from lockstep.keras.variables import NamedVariables
from lockstep.system.notes import note
from lockstep.worker.job import Job


class ScheduledFunctions:
    """The functions that strategies schedule, among the calls of a process: one call at a time.

    Args:
        parts: the common parts of the trainers.
    """

    def __init__(self, parts: TrainerParts) -> None:
        self._parts, self._job, self._resumable = parts, parts.job, parts.resumable
        self._joins: list[Callable[[], object]] = []
        self._ends: list[Callable[[], object]] = []

    def of_strategy(self, join: Callable[[], object], end: Callable[[], object]) -> None:
        """Note that a strategy schedules functions.

        Args:
            join: waits for the functions. It is called before all processes evaluate or predict together.
            end: ends the functions, for `end`.
        """
        self._joins.append(join)
        self._ends.append(end)

    def end(self) -> None:
        """End the functions of all strategies, because only one call at a time has an order of arrival."""
        for end in self._ends:
            end()

    def join(self) -> None:
        """Wait for the functions of all strategies."""
        for join in self._joins:
            join()

    def number(self) -> NumberedCall:
        """Number the functions that a `ClusterCoordinator` schedules from now on."""
        self._job.note_distribution()
        turns = self._parts.turns
        with turns.turn("functions", lambda: "functions"), self._resumable.call("functions") as call:
            if self._resumable.resume() is None:
                self._parts.record.begin_functions(call)
                # Other calls may begin and finish before the functions end.
                self._resumable.finish(None)
            return call

    def steps_taken(self) -> int:
        """Return the number of training steps in all calls that have ended."""
        return self._parts.record.steps

    def joining(self) -> FunctionJoining:
        """Return how workers join while the functions run that were numbered last."""
        return FunctionJoining(self._job, self._parts.snapshots, self._parts.calls)

    def changed(self, label: str, functions: int, variables: Mapping[str, Any]) -> None:
        """Record the variables after a call of a `ClusterCoordinator`.

        Args:
            label: names the call.
            functions: number of scheduled functions.
            variables: the variables that they train and change, by name.
        """
        trained = NamedVariables("functions", variables)
        self._parts.last.trains(trained)
        self._parts.record.state(label, trained, functions)

    def closed(self, name: str, functions: int) -> None:
        """Note that functions are complete, and that no more follow under this name."""
        self._parts.record.end_functions(name, functions)


class OutsideServed(Outside):
    """The `Trainer` of models that the job has not adopted. Each process reads rows at a different moment."""

    def call(self, method: str, original: Original, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Call Keras's own method."""
        if method in ("evaluate", "predict"):
            refuse_apart(self._job, model, method)
        return super().call(method, original, model, *args, **kwargs)

    def saves(self, model: Any) -> bool:
        """Whether this process saves a model: see `_saves`."""
        return _saves(self._job, model)


class WithinServed(OneReplica):
    """The `Trainer` of a process within `fit`, where it is apart from the others."""

    def fit(self, original: Original, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Raise ModelError."""
        _refuse_unserved(self._parts, model)
        raise ModelError("fit within a callback is not supported with parameter servers")

    def on_batch(self, method: str, original: Original, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Pass a batch to Keras's own method, unless it trains."""
        _refuse_training(method)
        return super().on_batch(method, original, model, *args, **kwargs)

    def saves(self, model: Any) -> bool:
        """Whether this process saves a model: see `_saves`."""
        return _saves(self._job, model)


class Served(Mirrored):
    """The `Trainer` of a job with parameter servers, outside of `fit`.

    Args:
        parts: the parts of the trainer.
        functions: the functions that the script schedules.
    """

    divides_training = False

    def __init__(self, parts: TrainerParts, functions: ScheduledFunctions) -> None:
        super().__init__(parts)
        self._functions = functions
        parts.record.meet = partial(meet_servers, parts.job)
        self._built_with: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._iterators = UsedIterators()

    def fit(self, original: Original, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Train asynchronously on the workers."""
        self._job.note_distribution()
        bound = bind(original, model, args, kwargs)
        self._refuse_within_function("fit")
        self._functions.end()
        _refuse_unserved(self._parts, model)
        refuse_callbacks(bound.arguments["callbacks"])
        refuse_stateful_layers(model)
        refuse_synchronized_normalization(model)
        self._iterators.refuse_again(bound.arguments["x"])
        self._parts.last.trains(model)
        with self._resumable.call("fit") as call:
            arguments = bound.arguments
            self._parts.inputs.note_held(call, model, arguments["x"], arguments["validation_data"])
            if finished := self._resumable.resume():
                return replay_fit(model, arguments["callbacks"], finished)
            return self._fit(call, original, model, bound)

    def _fit(self, call: NumberedCall, original: Original, model: Any, bound: inspect.BoundArguments) -> Any:
        parts, arguments = self._parts, bound.arguments
        training, arguments["validation_data"] = parts.inputs.of_training(arguments)
        call.extent = extent_of_fit(arguments, training)
        self._begin(
            call,
            model,
            "train",
            training,
            lambda: fit_facts(model, arguments, training),
            lambda: parts.record.settings_of_fit(model, arguments),
        )
        tables, joins = self._tables(call, model, training), None
        if self._resumable.behind:
            if self._job.joins and self._resumable.join_apart():
                return replay_fit(model, arguments["callbacks"], self._resumable.replay())
            joins = parts.snapshots.join_apart(call.name, model)
            if is_loader(arguments["x"]):
                # The pass that began to build the model drew its order from other states.
                training, _ = parts.inputs.of_training(arguments)
        served = ServedCall(
            job=self._job,
            backend=parts.backend,
            call=call,
            model=model,
            options=parts.models.options(model),
            tables=tables,
            trained=parts.calls.taken,
            install=lambda step: setattr(
                model, "train_function", parts.backend.function(model, step, "train")
            ),
            take_snapshot=partial(parts.snapshots.take_apart, model=model),
            joins=joins,
        )
        plain_steps = parts.record.plain_steps
        # Functions from outside of the call are not valid in it, and vice versa.
        model.train_function = model.test_function = model.predict_function = None
        if self._job.is_chief:
            call.model = model
        callbacks = writing_once(arguments["callbacks"], arguments["verbose"], resumes=False)
        call.callbacks, call.callback_hashes = callbacks, [attribute_hashes(callbacks)]
        with rows_read_together(self._job):
            history = fit_on_servers(served, original, bound, training, callbacks)
        model.train_function = model.test_function = model.predict_function = None
        parts.record.plain_steps = plain_steps
        parts.calls.taken += call.steps
        parts.record.state(f"the end of {call.name}", model)
        return parts.record.finish(history)

    def evaluate(self, original: Original, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as replicas do, when no function is running."""
        self._refuse_within_function("evaluate")
        self._functions.join()
        return super().evaluate(original, model, *args, **kwargs)

    def predict(self, original: Original, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Predict as replicas do, when no function is running."""
        self._refuse_within_function("predict")
        self._functions.join()
        return super().predict(original, model, *args, **kwargs)

    def on_batch(self, method: str, original: Original, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Split a batch as replicas do, unless it is for training."""
        self._refuse_within_function(method)
        _refuse_training(method)
        return super().on_batch(method, original, model, *args, **kwargs)

    def saves(self, model: Any) -> bool:
        """Whether this process saves a model: see `_saves`."""
        return _saves(self._job, model)

    def _tables(self, call: NumberedCall, model: Any, training: GlobalInput) -> EmbeddingTables:
        """Return the embedding tables whose rows workers read; print the model's other tables."""
        inputs = self._built_with.get(model)
        # Reading another batch may draw random numbers.
        tables, others = find_tables(
            model,
            lambda: _inputs_of(training.peek()) if inputs is None else inputs,
            self._parts.backend.to_numpy,
        )
        for layer in server_layers(model):
            if (reason := others.get(layer.path)) or all(
                layer is not other for other in tables.layers.values()
            ):
                raise ModelError(
                    f"layer {layer.path!r} is a ServerEmbedding, of which workers read rows only, but "
                    f"{reason or 'it is not trainable, or the model does not call it'}; use "
                    "keras.layers.Embedding"
                )
        if self._job.is_chief:
            for path, reason in others.items():
                note(f"{call.name}: workers read the whole table of layer {path!r}: {reason}")
        return tables

    def _sample(self, data: GlobalInput, model: Any, kind: StepKind) -> Any:
        """Return a batch to build a model with, and note the form of its inputs."""
        batch = super()._sample(data, model, kind)
        if self._parts.models.options(model) is not None:
            self._built_with[model] = keras.tree.map_structure(lambda leaf: leaf[:1], _inputs_of(batch))
        return batch

    def _tries(self, model: Any) -> bool:
        """Whether a trial may call a model: all processes must read tables of servers equally often."""
        return not server_layers(model)

    def _reading(self) -> AbstractContextManager[None]:
        """Return a context in which all processes read rows."""
        return rows_read_together(self._job)

    def _refuse_within_function(self, method: str) -> None:
        """In a function that a `ClusterCoordinator` has scheduled, raise ModelError."""
        if current_replica() is not None:
            raise ModelError(
                f"{method} within a scheduled function is not supported: call the model, or call {method} in "
                "the script, after join"
            )


def _saves(job: Job, model: Any) -> bool:
    """Whether a process saves a model.

    While scheduled functions train tables on the servers, only the chief saves. It does not wait for the
    others, which would read rows at a different moment.
    """
    return job.is_chief or not only_chief_reads(job, model)


def _refuse_unserved(parts: TrainerParts, model: Any) -> None:
    """Raise ScopeError for a model outside of a strategy with parameter servers."""
    if parts.models.options(model) is None:
        raise ScopeError(
            f"fit of model {model.name!r} in a job with parameter servers (--ps): compile it in the "
            "scope of a lockstep.ParameterServerStrategy, or start the job without --ps"
        )


def refuse_callbacks(callbacks: Any) -> None:
    """Raise ModelError for callbacks that save within an epoch, or checkpoints of Lockstep."""
    if checkpoint_in(callbacks) is not None:
        raise ModelError(
            "lockstep.callbacks.Checkpoint is not supported with parameter servers: use "
            "keras.callbacks.BackupAndRestore or ModelCheckpoint"
        )
    for callback in keras.tree.flatten(callbacks or []):
        name = type(callback).__name__
        if isinstance(getattr(callback, "save_freq", "epoch"), int):
            raise ModelError(
                f"{name} has save_freq={callback.save_freq}: with parameter servers, the chief has the "
                "current weights only at the end of each epoch; use save_freq='epoch', and shorter epochs "
                "with steps_per_epoch"
            )


def _refuse_training(method: str) -> None:
    """Raise ModelError for a single batch that trains."""
    if method == "train_on_batch":
        raise ModelError(
            "train_on_batch is not supported with parameter servers: use fit, or start the job without --ps"
        )


def _inputs_of(batch: Any) -> Any:
    return keras.utils.unpack_x_y_sample_weight(batch)[0]
