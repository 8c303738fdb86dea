"""The methods of `keras.Model` on replicas: `compile`, `fit`, `evaluate`, `predict`, and on single batches.

A model that is compiled in a strategy's scope, or in a script without a strategy, is adopted: the job's
replicas compute its steps. Everything else in Keras's loops (callbacks, logs, epochs) stays Keras's own.

The chief decides whether training stops (`decide`): at the end of each epoch, and at the end of each batch
if one of the user's callbacks has a batch method. That is one small exchange; without such a callback a step
has none.
"""

import contextlib
import functools
import hashlib
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import keras

from lockstep.errors import ModelError, ScopeError
from lockstep.keras import assignments
from lockstep.keras.backends.common import (
    has_own,
    refuse_other_weights,
    refuse_stateful_layers,
    refuse_synchronized_normalization,
)
from lockstep.keras.backends.contract import Backend, StepKind
from lockstep.keras.backends.growth import forget_growths
from lockstep.keras.backends.traces import seed_traces
from lockstep.keras.call_turns import CallTurns, key_of
from lockstep.keras.fit.callbacks import (
    chief_files,
    has_batch_methods,
    note_different_paths,
    refuse_within_epoch,
    without_writers,
    writes,
    writing_once,
)
from lockstep.keras.fit.exactness import (
    introduction,
    kinds_per_replica,
    occurrences_note,
    per_replica_note,
    refuse_metrics_that_do_not_add,
    summed_occurrences,
    tried_parts,
)
from lockstep.keras.fit.global_step import GlobalStep, TrackedTrainFunction
from lockstep.keras.fit.trials import Trial
from lockstep.keras.fit.tried_rows import TriedBatch
from lockstep.keras.fit.witness import Witness
from lockstep.keras.input.distribution import explain_sharding
from lockstep.keras.input.fit_inputs import GlobalInput, global_input, split_validation
from lockstep.keras.input.held_state import generators_held
from lockstep.keras.input.readings import ReadingWorker, explain_reading
from lockstep.keras.input.stored_arrays import explain_memory
from lockstep.keras.input.visits import order_seed
from lockstep.keras.kept_saves import KeptSaves
from lockstep.keras.model_digest import LastModel
from lockstep.keras.numbered_calls import NumberedCall, NumberedCalls
from lockstep.keras.parameter_server.embedding_tables import EmbeddingTables, find_tables
from lockstep.keras.parameter_server.fit import fit_on_servers
from lockstep.keras.parameter_server.function_joining import FunctionJoining
from lockstep.keras.parameter_server.process import ServedCall, ServerOptions, UsedIterators
from lockstep.keras.parameter_server.server_embedding import (
    meet_servers,
    only_chief_reads,
    refuse_apart,
    server_layers,
)
from lockstep.keras.parameter_server.server_tables import rows_read_together
from lockstep.keras.private.common import CACHED_VALIDATION, layers_of
from lockstep.keras.python_replicas import python_facts
from lockstep.keras.python_state import unchanged
from lockstep.keras.replica_run.merges import current_replica
from lockstep.keras.replica_run.step_loop import StepLoops
from lockstep.keras.seeds import seed_of
from lockstep.keras.shared_saves import SharedSaves
from lockstep.keras.sidecar_evaluator import EvaluatorFit
from lockstep.keras.state.callback_states import (
    attribute_hashes,
    callback_states,
    listed,
    listeners,
    set_callback_states,
)
from lockstep.keras.state.checkpoint_callback import ScriptCheckpoints, asked_in, take_out
from lockstep.keras.state.journal import FinishedCall
from lockstep.keras.state.resumable_calls import CallFinishedElsewhere
from lockstep.keras.state.settings import settings_of_call, settings_of_model
from lockstep.keras.state.snapshots import Snapshots
from lockstep.keras.step_digests import recorder_of
from lockstep.keras.variables import NamedVariables, assign, model_state
from lockstep.keras.verification import verifications_of
from lockstep.keras.worker_exchange import (
    Facts,
    agree,
    chiefs_decision,
    chiefs_state,
    setting_facts,
    state_facts,
)
from lockstep.observability.events import CallEnded, CallStarted, ChiefWrites, MetricsRecorded, TrainingEnded
from lockstep.observability.step_recorder import finite_values
from lockstep.system.notes import note
from lockstep.worker.job import Job

Original = Callable[..., Any]
_KINDS: dict[str, StepKind] = {
    "train_on_batch": "train",
    "test_on_batch": "test",
    "predict_on_batch": "predict",
}
_ARGUMENTS = ("batch_size", "shuffle", "steps_per_epoch", "class_weight", "validation_split")
"""The arguments of `fit` that are recorded."""
_FUNCTIONS = {
    **dict.fromkeys(("evaluate", "test_on_batch"), "test_function"),
    **dict.fromkeys(("predict", "predict_on_batch"), "predict_function"),
}
"""The attributes with the functions that methods call for each batch, without those for training."""
_NOT_TRAINING = frozenset({"evaluate", "predict", "validation"})


class _ThreadByItself(threading.local):
    by_itself = False


class ModelMethods:
    """Replaces methods of `keras.Model` in one process; each replacement gets Keras's own as `original`.

    Attributes:
        step_loops: drives custom loops.
    """

    def __init__(self, job: Job, backend: Backend) -> None:
        self._job = job
        self._backend = backend
        self._saves = SharedSaves(job, backend, self._occasion)
        self._kept_saves = KeptSaves.of(job)
        # Before the recorder, which publishes at the end what it has recorded.
        job.at_exit(self._record_last)
        self._adopted: weakref.WeakSet[Any] = weakref.WeakSet()
        self._subjects: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._compiled = 0
        self._one_by_itself = threading.Lock()
        self._thread = _ThreadByItself()
        self._compared: weakref.WeakKeyDictionary[Any, set[StepKind]] = weakref.WeakKeyDictionary()
        self._trained: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
        self._served: weakref.WeakKeyDictionary[Any, ServerOptions] = weakref.WeakKeyDictionary()
        self._built_with: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._scopes: list[tuple[Callable[[], AbstractContextManager[Any]], ServerOptions | None]] = []
        self._iterators = UsedIterators()
        # With one replica, Keras's own methods evaluate and predict; these calls never count, whether or not
        # checkpoints are saved.
        self._calls = NumberedCalls(
            job.settings.seed, unnumbered=_NOT_TRAINING if self._has_one_replica else frozenset()
        )
        self._snapshots = Snapshots(job, backend, self._calls)
        self._models, self._resumable = self._snapshots.models, self._snapshots.resumable
        self._checkpoints = ScriptCheckpoints(job, self._calls, self._snapshots)
        self._evaluator_fit = EvaluatorFit()
        self._last = LastModel(job)
        self.step_loops = StepLoops(job, backend, self._calls, self._snapshots, self._checkpoints, self._last)
        self._joins_functions: list[Callable[[], object]] = []
        self._ends_functions: list[Callable[[], object]] = []
        self._adopts_all = False
        self._measured: weakref.WeakKeyDictionary[Any, set[StepKind]] = weakref.WeakKeyDictionary()
        self._entered: weakref.WeakKeyDictionary[Any, Callable[[], AbstractContextManager[Any]]] = (
            weakref.WeakKeyDictionary()
        )
        self._introduced = False
        self._told_parts: set[str] = set()
        self._named: weakref.WeakKeyDictionary[Any, list[str]] = weakref.WeakKeyDictionary()
        self._witnessed: weakref.WeakKeyDictionary[Any, set[StepKind]] = weakref.WeakKeyDictionary()
        self._compared_steps: tuple[Any, dict[StepKind, GlobalStep]] = (None, {})
        self._witness = Witness(job, backend, self._compared_step, self._by_itself, self._step_context)
        self._plain_steps = 0
        self._trained_by_batch: tuple[Any, int] | None = None
        self._told_paths: set[str] = set()
        self._digests = recorder_of(job, backend.to_numpy)
        job.at_completion(self._compare_last_batch)
        job.at_end(lambda: job.events.publish(self.trained()))
        job.at_completion(self.turns.wait)
        if job.checkpoints.resumed is not None:
            self._resumable.begin(job.checkpoints.resumed)

    @property
    def turns(self) -> CallTurns:
        """The turns of the script's threads."""
        return self._resumable.turns

    def in_turn(self, method: str, original: Original, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the replacement of a method when this thread has its turn.

        With one replica, and nothing to save, Keras's own methods evaluate and predict, at any time. So they
        do in a thread that reads the examples of a call, for which that call waits.
        """
        act = functools.partial(self.on_batch, method) if method in _KINDS else getattr(self, method)
        if model in self._adopted and self.turns.is_within() and (self._plain or method in _FUNCTIONS):
            with nullcontext() if self._plain else self._by_itself(model, _FUNCTIONS[method]):
                return original(model, *args, **kwargs)
        if model not in self._adopted or (self._plain and method in ("evaluate", "predict")):
            return act(original, model, *args, **kwargs)
        with self.turns.turn(method, lambda: key_of(method, self._subjects[model], args, kwargs)):
            return act(original, model, *args, **kwargs)

    @contextmanager
    def _by_itself(self, model: Any, attribute: str) -> Iterator[None]:
        """Within the block, a function of a model, such as its `test_function`, is Keras's own."""
        with self._one_by_itself:
            function = getattr(model, attribute)
            setattr(model, attribute, None)
            self._thread.by_itself = True
            try:
                yield
            finally:
                self._thread.by_itself = False
                setattr(model, attribute, function)

    @property
    def is_chief(self) -> bool:
        """Whether this worker is the chief."""
        return self._job.is_chief

    def release_models(self) -> None:
        """Let Keras make the functions of all models again, in a process that has left the job."""
        for model in self._adopted:
            model.train_function = model.test_function = model.predict_function = None

    def _note_subject(self, model: Any) -> None:
        """Note what identifies a model on all workers, in the calls of threads."""
        if model in self._subjects:
            return
        if threading.current_thread() is threading.main_thread():
            self._compiled += 1
            self._subjects[model] = f"model {self._compiled} ({model.name})"
        else:
            # Threads on other workers may compile, and so number and name, their models in another order.
            text = repr({**settings_of_call(model, (), first=True), **settings_of_model(model)})
            self._subjects[model] = (
                f"a {type(model).__name__} #{hashlib.sha256(text.encode()).hexdigest()[:8]}"
            )

    @property
    def forwarding(self) -> bool:
        """Whether the current call is skipping steps that were taken before this process began."""
        return self._calls.current.steps < self._calls.current.skipped

    @property
    def step_end_processed(self) -> bool:
        """Whether callbacks processed the end of the last step in the process that saved the state."""
        return self._calls.current.processed == self._calls.current.steps

    @property
    def behind(self) -> bool:
        """Whether the script has not yet reached the position at which the training resumes."""
        return self._resumable.behind

    def saves(self, model: Any) -> bool:
        """Whether this process may save a model.

        While the script catches up, the file exists already, and the model does not have its state yet. While
        functions are scheduled that train tables on parameter servers, only the chief saves: it does not wait
        for others, which would read rows of another moment.
        """
        return not self.behind and (self._job.is_chief or not only_chief_reads(self._job, model))

    def save(self, original: Original, model: Any, *args: Any, **kwargs: Any) -> None:
        """Save a model once for all workers, if this process may save it."""
        if self._kept_saves is not None:
            self._kept_saves.save(original, model, *args, **kwargs)
        elif self.saves(model):
            self._saves.save(original, model, *args, **kwargs)

    def _occasion(self) -> str:
        """Name the current position in the program, where all workers have equal states."""
        return f"call {self._calls.outermost}, step {self._calls.current.steps} of {self._calls.taken}"

    def next_seed(self) -> int:
        """Return a new seed for the current position in the program; see `NumberedCalls.next_seed`."""
        return self._calls.next_seed()

    def call_number(self) -> int:
        """Return the number of the call in progress, equal on workers that have skipped earlier calls."""
        return self._calls.current.number

    def has_functions(self, join: Callable[[], object], end: Callable[[], object]) -> None:
        """Let a strategy schedule functions.

        Args:
            join: waits for them; called before all processes evaluate or predict together.
            end: ends them, with `end_functions`.
        """
        self._joins_functions.append(join)
        self._ends_functions.append(end)

    def end_functions(self) -> None:
        """End the functions of all strategies: one call of the servers at a time has an order of arrival."""
        for end in self._ends_functions:
            end()

    def _join_functions(self) -> None:
        for join in self._joins_functions:
            join()

    def number_functions(self) -> NumberedCall:
        """Number the functions that a `ClusterCoordinator` schedules from now on."""
        self._job.note_distribution()
        with self.turns.turn("functions", lambda: "functions"), self._resumable.call("functions") as call:
            if self._resumable.resume() is None:
                self._job.events.publish(CallStarted(call.name))
                seeds = {"the seeds of the script": f"{call.seed:x}"}
                self._digests.begin_call(call.name, self._steps, seeds)
                # Other calls may begin and finish before the functions end.
                self._resumable.finish(None)
            return call

    def steps_taken(self) -> int:
        """Return the number of training steps in all calls that have ended."""
        return self._steps

    def joining_in_functions(self) -> FunctionJoining:
        """Return how workers join in the functions that were numbered last."""
        return FunctionJoining(self._job, self._snapshots, self._calls)

    def functions_changed(self, what: str, functions: int, variables: Mapping[str, Any]) -> None:
        """Record the variables after a call of a `ClusterCoordinator`.

        Args:
            what: names the call.
            functions: number of scheduled functions.
            variables: that they train and change, by name.
        """
        trained = NamedVariables("functions", variables)
        self._last.trains(trained)
        self._digests.record_state_now(self._steps + functions, what, trained)

    def functions_closed(self, name: str, functions: int) -> None:
        """Note that functions are complete, and that no more follow under this name."""
        self._calls.taken += functions
        self._digests.end_call()
        self._job.timer.stop()
        if not self._resumable.catches_up:
            self._job.events.publish(CallEnded(name))

    @contextmanager
    def scope(
        self, entered: Callable[[], AbstractContextManager[Any]], servers: ServerOptions | None = None
    ) -> Iterator[None]:
        """Adopt models that are compiled within the block, the scope of a strategy.

        Args:
            entered: returns a context in which the strategy, its value, is the current one.
            servers: the options of a strategy with parameter servers; None for other strategies.
        """
        self._scopes.append((entered, servers))
        try:
            yield
        finally:
            self._scopes.pop()

    def strategy_of(self, model: Any) -> Any:
        """Return the strategy in whose scope a model was compiled, or is now; None if there is none."""
        active: Callable[[], AbstractContextManager[Any]] = (
            self._scopes[-1][0] if self._scopes else nullcontext
        )
        with self._entered.get(model, active)() as strategy:
            return strategy

    def adopt_all(self) -> None:
        """Also adopt models outside of all scopes: the script has no strategy."""
        self._adopts_all = True

    def adopt_in_scopes(self) -> None:
        """Adopt models only in scopes: the script has a strategy."""
        self._adopts_all = False

    def compile(self, original: Original, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Adopt a model that is compiled in a strategy's scope, or in a script without a strategy."""
        self._last.compiles(model)
        result = original(model, *args, **kwargs)
        self._compared.pop(model, None)
        self._measured.pop(model, None)
        self._witnessed.pop(model, None)
        self._named.pop(model, None)
        forget_growths(model)
        self.adopt(model)
        return result

    def adopt(self, model: Any) -> None:
        """Adopt a model that was just compiled, if it is in a strategy's scope, or the script has none."""
        if self._scopes or self._adopts_all:
            self._adopted.add(model)
            self._note_subject(model)
            seed_traces(model, self._subjects[model])
            self._snapshots.adopt(model)
            self._entered[model], options = self._scopes[-1] if self._scopes else (nullcontext, None)
            self._served.pop(model, None)
            if options is not None:
                self._served[model] = options

    def fit(self, original: Original, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Train on global batches in the job's order; in an evaluator, evaluate what others train."""
        if model not in self._adopted:
            self._refuse_outsider(model)
            return original(model, *args, **kwargs)
        self._job.note_distribution()
        bound = bind(original, model, args, kwargs)
        given = bound.arguments
        if self._job.evaluates:
            return self._evaluator_fit.fit(model, given)
        if self._job.context.tasks is not None:
            self._refuse_within_function("fit")
            self.end_functions()
            return self._fit_on_servers(original, model, bound)
        self._last.trains(model)
        asked = asked_in(given["callbacks"])
        callbacks = take_out(asked, given["callbacks"])
        if self._job.settings.checks:
            callbacks = without_writers(callbacks)
        with self._resumable.call("fit") as call:
            if asked is not None:
                self._checkpoints.begin(asked)
            if finished := self._resumable.resume():
                return replay_fit(model, callbacks, finished)
            training, validation = self._fit_inputs(given)
            inputs = [data for data in (training, validation) if isinstance(data, GlobalInput)]
            explain_memory(self._job, sum(data.held for data in inputs))
            call.extent = _extent(given, training)
            epochs: Facts = {"call epochs": f"{given['initial_epoch']} to {given['epochs']}"}
            self._begin(
                call,
                model,
                "train",
                training,
                lambda: {**epochs, **_all_facts(training, validation), **_setting_facts(model)},
                lambda: self._recorded_settings(model, given),
            )
            if isinstance(validation, GlobalInput):
                with self._checked(call, model, "test", validation.peek):
                    pass
            if len(self._job.view.workers) > 1 and not self._resumable.catches_up:
                note_different_paths(self._job, callbacks, call.name, self._told_paths)
            given.update(x=training, y=None, sample_weight=None, class_weight=None)
            given.update(validation_data=validation, validation_split=0.0)
            call.callbacks = writing_once(callbacks, given["verbose"], resumes=self.forwarding)
            if len(self._job.view.hosts) > 1 and (files := chief_files(call.callbacks)):
                self._job.events.publish(ChiefWrites(files))
            if self._has_one_replica:
                self._digests.begin_call(call.name, self._steps, self._recorded_settings(model, given))
                self._record_now(f"the beginning of {call.name}", model)
            self._snapshots.note_settings(model)
            call.callback_hashes = [attribute_hashes(call.callbacks)]
            call.model, call.by_batch = model, has_batch_methods(call.callbacks)
            given.update(callbacks=call.callbacks)
            try:
                result = original(*bound.args, **bound.kwargs)
            except CallFinishedElsewhere:
                return replay_fit(model, callbacks, self._resumable.replay())
            self._record_now(f"the end of {call.name}", model)
            self._compare_states(f"the end of {call.name}", model)
            self._finish(result)
            if writes(callbacks):
                self._job.exchange(lambda _, exchange: exchange.barrier(what=f"the end of {call.name}"))
            return result

    def _fit_on_servers(self, original: Original, model: Any, bound: inspect.BoundArguments) -> Any:
        """Train asynchronously on the workers of a job with parameter servers."""
        given = bound.arguments
        self._refuse_unserved(model, "fit")
        if self._has_one_replica:
            raise ModelError("fit within a callback is not supported with parameter servers")
        refuse_within_epoch(given["callbacks"])
        refuse_stateful_layers(model)
        refuse_synchronized_normalization(model)
        self._iterators.refuse_again(given["x"])
        self._last.trains(model)
        with self._resumable.call("fit") as call:
            if finished := self._resumable.resume():
                return replay_fit(model, given["callbacks"], finished)
            x, y, weight = given["x"], given["y"], given["sample_weight"]
            if given["validation_data"] is None and given["validation_split"]:
                (x, y, weight), given["validation_data"] = split_validation(
                    x, y, weight, given["validation_split"]
                )
            training = self._training_input(given, x, y, weight)
            call.extent = _extent(given, training)
            epochs: Facts = {"call epochs": f"{given['initial_epoch']} to {given['epochs']}"}
            self._begin(
                call,
                model,
                "train",
                training,
                lambda: {**epochs, **_all_facts(training, None), **_setting_facts(model)},
                lambda: self._recorded_settings(model, given),
            )
            tables, joins = self._tables(call, model, training), None
            if self._resumable.behind:
                if self._job.joins and self._resumable.join_apart():
                    return replay_fit(model, given["callbacks"], self._resumable.replay())
                joins = self._snapshots.join_on_servers(model)
            served = ServedCall(
                job=self._job,
                backend=self._backend,
                call=call,
                model=model,
                options=self._served[model],
                tables=tables,
                generators=generators_held(("x", given["x"])),
                trained=self._calls.taken,
                install=lambda step: setattr(
                    model, "train_function", self._backend.function(model, step, "train")
                ),
                take=lambda whole, steps, known: self._snapshots.take_from_servers(
                    whole, model, steps, known
                ),
                joins=joins,
            )
            plain_steps = self._plain_steps
            # Functions that were made outside of the call do not fit within it, nor the other way round.
            model.train_function = model.test_function = model.predict_function = None
            if self._job.is_chief:
                call.model = model
            callbacks = writing_once(given["callbacks"], given["verbose"], resumes=False)
            call.callbacks, call.callback_hashes = callbacks, [attribute_hashes(callbacks)]
            with rows_read_together(self._job):
                history = fit_on_servers(served, original, bound, training, callbacks)
            model.train_function = model.test_function = model.predict_function = None
            self._plain_steps = plain_steps
            self._calls.taken += call.steps
            self._record_now(f"the end of {call.name}", model)
            return self._finish(history)

    def _tables(self, call: NumberedCall, model: Any, training: GlobalInput) -> EmbeddingTables:
        """Return the embedding tables of a model of which workers read rows; say which others it has."""
        known = self._built_with.get(model)
        # Reading another batch may draw random numbers.
        tables, others = find_tables(
            model, lambda: _inputs_of(training.peek()) if known is None else known, self._backend.to_numpy
        )
        for layer in server_layers(model):
            if (reason := others.get(layer.path)) or all(layer is not one.layer for one in tables.tables):
                raise ModelError(
                    f"layer {layer.path!r} is a ServerEmbedding, of which workers read rows only, but "
                    f"{reason or 'it is not trainable, or the model does not call it'}; use "
                    "keras.layers.Embedding"
                )
        if self._job.is_chief:
            for path, reason in others.items():
                note(f"{call.name}: workers read the whole table of layer {path!r}: {reason}")
        return tables

    def _refuse_within_function(self, what: str) -> None:
        """In a function that a `ClusterCoordinator` has scheduled, raise ModelError."""
        if self._job.context.tasks is not None and current_replica() is not None:
            raise ModelError(
                f"{what} within a scheduled function is not supported: call the model, or call {what} in the "
                "script, after join"
            )

    def _refuse_unserved(self, model: Any, what: str) -> None:
        """In a job with parameter servers, raise ScopeError for a model outside of their strategy."""
        if self._job.context.tasks is not None and model not in self._served:
            raise ScopeError(
                f"{what} of model {model.name!r} in a job with parameter servers (--ps): compile it in the "
                "scope of a lockstep.ParameterServerStrategy, or start the job without --ps"
            )

    def epoch_ended(self, epoch: int, logs: Any = None) -> None:
        """Record the metrics of an epoch, from 0, on the chief."""
        call = self._calls.current
        if call.model is None or self._resumable.catches_up or self.forwarding:
            return
        recorded = MetricsRecorded(
            call=call.name,
            epoch=epoch + 1,
            trained=self._steps,
            values=finite_values({**(logs or {}), **_reported(call.model, epoch)}),
        )
        self._job.as_chief(lambda: self._job.events.publish(recorded))

    def train_begun(self, logs: Any = None) -> None:
        """Note that the callbacks of a `fit` have processed `on_train_begin`."""
        call = self._calls.current
        if call.callback_hashes:
            call.callback_hashes.append(attribute_hashes(call.callbacks))
            call.result_of = _callbacks_of

    def trained(self) -> TrainingEnded:
        """Return the number of training steps, and the name and digest of the model that was trained last."""
        return TrainingEnded(self._steps, **self._last.facts())

    def steps_ended(self) -> None:
        """Hold the state at the end of the last step of an epoch: it may be the last step of the training."""
        call = self._calls.current
        if self._has_one_replica and call.model is not None:
            self._record_now(f"the end of an epoch of {call.name}", call.model)
        if call.model is not None and call.steps > call.skipped and len(self._calls.stack) == 2:
            held = self._backend.training_state(call.model)
            self._snapshots.hold(
                lambda: self._snapshots.take(True, call.model, call.logs, held, callbacks_done=True)
            )

    def decide(self, event: str, *_: Any, **__: Any) -> None:
        """Let the chief decide whether the training stops, after callbacks have processed `event`."""
        self._job.timer.lap("other")
        call = self._calls.current
        if self._plain and call.model is not None and event == "on_train_batch_end":
            self._plain_steps += call.model.steps_per_execution
        if (
            call.model is None
            or self._resumable.catches_up
            or self.forwarding
            or len(self._job.view.workers) == 1
        ):
            return
        if event == "on_epoch_end" or call.by_batch:
            what = f"the decision to stop after step {call.steps} of {call.name}"
            call.model.stop_training = chiefs_decision(self._job, what, bool(call.model.stop_training))

    def evaluate(self, original: Original, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate on global batches; every worker returns the global figures."""
        if model not in self._adopted or self._plain:
            refuse_apart(self._job, model, "evaluate")
            with self._job.timer.within("validation" if kwargs.get(CACHED_VALIDATION) else "evaluate"):
                return original(model, *args, **kwargs)
        self._refuse_within_function("evaluate")
        self._join_functions()
        self._job.note_distribution()
        if kwargs.get(CACHED_VALIDATION):
            if self.forwarding:
                return {}
            self.steps_ended()
            with self._resumable.call("validation") as call:
                self._compare(call, model, dict)
                return original(model, *args, **kwargs)
        bound = bind(original, model, args, kwargs)
        given = bound.arguments
        with self._resumable.call("evaluate") as call:
            if finished := self._resumable.resume():
                return finished.result
            if self._has_one_replica and not self._models.awaits(model):
                return self._finish(original(model, *args, **kwargs))
            options = {"batch_size": given["batch_size"], "steps": given["steps"]}
            data = self._input(given["x"], given["y"], given["sample_weight"], **options)
            explain_memory(self._job, data.held)
            self._begin(call, model, "test", data, data.facts)
            given.update(x=data, y=None, sample_weight=None, verbose=self._verbose(given["verbose"]))
            with rows_read_together(self._job):
                return self._finish(original(*bound.args, **bound.kwargs))

    def predict(self, original: Original, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Predict on global batches; every worker returns all rows, in their order."""
        if model not in self._adopted or self._plain:
            refuse_apart(self._job, model, "predict")
            with self._job.timer.within("predict"):
                return original(model, *args, **kwargs)
        self._refuse_within_function("predict")
        self._join_functions()
        self._job.note_distribution()
        bound = bind(original, model, args, kwargs)
        given = bound.arguments
        with self._resumable.call("predict") as call:
            if finished := self._resumable.resume():
                return finished.result
            if self._has_one_replica and not self._models.awaits(model):
                return self._finish(original(model, *args, **kwargs))
            options = {"batch_size": given["batch_size"], "steps": given["steps"], "in_order": True}
            data = self._input(given["x"], **options)
            explain_memory(self._job, data.held)
            samples = keras.backend.backend() == "jax"
            self._models.build(
                model, "predict", lambda: self._sample(data, model, "predict") if samples else data.peek()
            )
            if keras.backend.backend() == "jax":
                # While some layer is not built, Keras first calls the model on a batch of its own.
                data.plain_first = not all(layer.built for layer in layers_of(model))
            if not self._has_one_replica:
                with self._checked(call, model, "predict", data.peek):
                    self._introduce(call, model, "predict", data.peek)
            self._compare(call, model, data.facts)
            given.update(x=data, verbose=self._verbose(given["verbose"]))
            with rows_read_together(self._job):
                return self._finish(original(*bound.args, **bound.kwargs))

    def on_batch(self, method: str, original: Original, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Split a batch that all workers pass; in the first call, check that they have the same model."""
        if model not in self._adopted:
            if method == "train_on_batch":
                self._refuse_outsider(model)
            return original(model, *args, **kwargs)
        self._refuse_within_function(method)
        self._job.note_distribution()
        kind = _KINDS[method]
        if kind == "train" and self._job.context.tasks is not None:
            raise ModelError(
                "train_on_batch is not supported with parameter servers: use fit, or start the job without "
                "--ps"
            )
        if kind == "train":
            self._last.trains(model)
            self._plain_steps += self._plain
        with self._resumable.call(method) as call:
            call.at_end = True
            if finished := self._resumable.resume():
                self._compared.setdefault(model, set()).add(kind)
                return self._replay_batch(kind, finished, original, model, *args, **kwargs)
            if kind not in self._compared.setdefault(model, set()):
                self._begin_batches(call, model, kind, lambda: _batch_of(original, model, args, kwargs))
            result = self._finish(original(model, *args, **kwargs))
            if method == "train_on_batch" and len(self._job.view.workers) > 1:
                assignments.install()
                self._trained_by_batch = model, assignments.count()
            if method == "train_on_batch" and not self._plain:
                self._snapshots.end_step(lambda whole: self._snapshots.take(whole, model, None))
                self._snapshots.hold_late(lambda: self._snapshots.take(True, model, None))
            return result

    def _begin_batches(
        self, call: NumberedCall, model: Any, kind: StepKind, batch: Callable[[], Any]
    ) -> None:
        """Prepare for single-batch calls of a kind, once: build the model, and check it."""
        if kind != "predict" and (not self._has_one_replica or self._models.awaits(model)):
            self._models.build(model, kind, batch)
            if not self._has_one_replica:
                with self._checked(call, model, kind, batch):
                    self._introduce(call, model, kind, batch)
        self._models.load_waiting(model)
        if kind == "predict" and not self._has_one_replica and self._models.is_built(model):
            with self._checked(call, model, kind, batch):
                self._introduce(call, model, kind, batch)
        if self._models.is_built(model):
            first = self._calls.outermost == 1
            self._compare(
                call,
                model,
                lambda: _setting_facts(model),
                lambda: setting_facts(settings_of_call(model, (), first=first)),
            )
            self._compared[model].add(kind)

    def _replay_batch(
        self,
        kind: StepKind,
        finished: FinishedCall,
        original: Original,
        model: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Return the result of a finished single-batch call; resume after it, if it was the last one."""
        if self._resumable.at_its_end:
            self._models.build(model, kind, lambda: _batch_of(original, model, args, kwargs))
            if self._job.joins:
                # Compile the step before others wait for this worker; its results are overwritten.
                original(model, *args, **kwargs)
                self._resumable.join()
                finished = self._resumable.replay()
            if self._resumable.at_its_end:
                self._snapshots.restore(model)
        return finished.result

    def make_function(self, kind: StepKind, original: Original, model: Any, force: bool = False) -> Any:
        """Set the function of an adopted model that Keras's loop calls for each step, and return it."""
        attribute = f"{kind}_function"
        if model not in self._adopted or self._plain or self._thread.by_itself:
            return original(model, force)
        if self._has_one_replica:
            original(model, force)
            if kind == "train" and not isinstance(model.train_function, TrackedTrainFunction):
                model.train_function = TrackedTrainFunction(
                    model.train_function, self._backend, model, self._calls, self._snapshots
                )
            return getattr(model, attribute)
        if kind == "train" and getattr(model, attribute) is not None:
            refuse_other_weights(model, self._trained.get(model, model.trainable_variables))
        if getattr(model, attribute) is None or force:
            refuse_synchronized_normalization(model)
            refuse_stateful_layers(model)
            self._trained[model] = model.trainable_variables
            step = self._new_step(model, kind)
            setattr(model, attribute, self._backend.function(model, step.take, kind))
        return getattr(model, attribute)

    def symbolic_build(
        self, original: Original, model: Any, iterator: Any = None, data_batch: Any = None
    ) -> None:
        """Give Keras a plain batch to build from, without beginning a pass."""
        source = getattr(iterator, "data_adapter", None)
        if isinstance(source, GlobalInput):
            iterator = self._first_of(source, model)
        original(model, iterator=iterator, data_batch=data_batch)

    @property
    def _has_one_replica(self) -> bool:
        """Whether there is only one replica, so that Keras's own step is the whole step."""
        return self._job.view.replicas == 1

    @property
    def _plain(self) -> bool:
        """Whether Keras's own methods do everything: one replica, nothing to save or to resume from."""
        return (
            self._has_one_replica and self._job.checkpoints.scheduler is None and not self._resumable.behind
        )

    @property
    def _steps(self) -> int:
        """The number of training steps so far."""
        return self._calls.taken + self._plain_steps

    def _record_now(self, what: str, model: Any) -> None:
        """Record the state of a model, which is in its variables, outside of any step."""
        named = isinstance(model, NamedVariables)
        state: Any = model if named else self._backend.training_state(model)
        self._digests.record_state_now(self._steps, what, state)

    def _record_last(self) -> None:
        """Record, at the end of the script, the state of the model that was trained last."""
        if self._last.model is not None:
            # As for its digest, a failed step may have taken its memory.
            with contextlib.suppress(Exception):
                self._record_now("the end of the script", self._last.model)

    def _compare_states(self, what: str, model: Any) -> None:
        """Check that all workers have equal states of a model, which is in its variables.

        Raises:
            DisagreementError: states differ; raised on every worker.
        """
        if len(self._job.view.workers) == 1 or self._resumable.behind:
            return
        arrays = model_state(model)
        if not self._job.settings.allow_unlike:
            facts = state_facts(self._backend.to_numpy, arrays)
            agree(self._job, what, {**facts, **python_facts(model)})
        elif given := chiefs_state(self._job, what, self._backend.to_numpy, arrays):
            assign(model, given)

    def _compare_last_batch(self) -> None:
        """At the end of the script, compare the states after the last `train_on_batch`.

        Here no worker waits for another, which may still have long work of its own. If the program has
        changed variables since, perhaps on one worker only, there is nothing to compare.
        """
        if self._trained_by_batch is not None and self._trained_by_batch[1] == assignments.count():
            self._saves.compare("the end of the script", self._trained_by_batch[0])

    def _fit_inputs(self, given: dict[str, Any]) -> tuple[GlobalInput, Any]:
        x, y, weight = given["x"], given["y"], given["sample_weight"]
        validation = given["validation_data"]
        if validation is None and given["validation_split"]:
            (x, y, weight), validation = split_validation(x, y, weight, given["validation_split"])
        training = self._training_input(given, x, y, weight)
        training.before_pass = self._resumable.begin_pass
        if validation is None or self._has_one_replica:
            return training, validation
        x, y, weight = keras.utils.unpack_x_y_sample_weight(validation)
        batch_size = given["validation_batch_size"] or given["batch_size"]
        # A joiner begins none of the validations before it joins, so it could not number passes over shards.
        options = {"batch_size": batch_size, "steps": given["validation_steps"], "in_order": True}
        return training, self._input(x, y, weight, **options)

    def _training_input(self, given: Mapping[str, Any], x: Any, y: Any, weight: Any) -> GlobalInput:
        return self._input(
            x,
            y,
            weight,
            batch_size=given["batch_size"],
            steps=given["steps_per_epoch"],
            shuffle=given["shuffle"],
            class_weight=given["class_weight"],
        )

    def _input(self, x: Any, y: Any = None, sample_weight: Any = None, **options: Any) -> GlobalInput:
        if not self._has_one_replica:
            explain_sharding(self._job, x)
        call = self._calls.current
        order = order_seed(self._job.settings.seed, call.number)
        reader = ReadingWorker(
            self._job,
            seed_of(call.seed, call.number),
            joint=self._job.settings.joint_input,
            call=self.call_number,
        )
        options.setdefault("shuffle", False)
        data = global_input(
            x, y, sample_weight, **options, seed=order, unsplit=self._has_one_replica, reader=reader
        )
        if not self._has_one_replica:
            explain_reading(self._job, data.way)
        return data

    def _begin(
        self,
        call: NumberedCall,
        model: Any,
        kind: StepKind,
        data: GlobalInput,
        facts: Callable[[], Facts],
        settings: Callable[[], Facts] = dict,
    ) -> None:
        """Build what needs the first batch, and refuse what replicas cannot compute; see `_compare`."""
        if self._has_one_replica:
            if len(self._calls.stack) == 2 and not self._resumable.catches_up:
                self._job.events.publish(CallStarted(call.name, *call.extent))
            if not (self._resumable.behind or self._models.awaits(model)):
                return
        self._models.build(model, kind, lambda: self._noted(model, self._sample(data, model, kind)))
        if self._has_one_replica:
            return
        with self._checked(call, model, kind, data.peek):
            self._introduce(call, model, kind, data.peek)
        self._compare(call, model, facts, settings)

    def _checked(
        self, call: NumberedCall, model: Any, kind: StepKind, read: Callable[[], Any]
    ) -> AbstractContextManager[None]:
        """Return a context in which to try a model; a job that checks the script compares a step there."""
        checks = self._job.settings.checks
        witnessed = self._witnessed.setdefault(model, set())
        if not checks or (checks != "every-fit" and kind in witnessed):
            return nullcontext()
        witnessed.add(kind)
        return self._witness.compared(call.name, model, kind, read(), lambda: self._named.get(model, ()))

    def _compared_step(self, model: Any, kind: StepKind) -> GlobalStep:
        """Return the step of a model to compare, which lasts as long as the step of Keras's loops.

        The two differ, because the compared one draws constants. Both may have learned in an earlier call
        what is wrong in this one.
        """
        compared, steps = self._compared_steps
        if compared is not model:
            _, steps = self._compared_steps = (model, {})
        if kind not in steps or getattr(model, f"{kind}_function") is None:
            steps[kind] = self._new_step(model, kind)
        return steps[kind]

    def _new_step(self, model: Any, kind: StepKind) -> GlobalStep:
        context = self._step_context(model) if kind == "train" else nullcontext
        return GlobalStep(
            job=self._job,
            backend=self._backend,
            model=model,
            kind=kind,
            calls=self._calls,
            snapshots=self._snapshots,
            context=context,
        )

    def _introduce(self, call: NumberedCall, model: Any, kind: StepKind, read: Callable[[], Any]) -> None:
        """Measure how replicas combine what a step of a model computes; name each part that is per replica.

        This is done once for a compiled model. The first note says that a script without a strategy is
        distributed.

        Raises:
            ModelError: a metric does not add up over replicas.
        """
        batch = TriedBatch(read)
        with unchanged(model):
            if kind != "predict":
                refuse_metrics_that_do_not_add(model, batch)
            measured = self._measured.setdefault(model, set())
            if kind in measured:
                return
            # All processes read the tables of servers together, and as often.
            tries = not server_layers(model)
            trial = Trial(self._job, self._backend, model, batch, self._step_context(model), tries=tries)
            if kind == "predict":
                # A trial of training has tried the same layers.
                if not measured or has_own(model, "predict_step"):
                    trial.name_predictions()
                kinds, parts = [], trial.names
            else:
                trial.measure(["train", "test"] if kind == "train" else [kind])
                kinds = kinds_per_replica(model) if self._adopts_all else []
                parts = [*(tried_parts(model, batch) if self._adopts_all else ()), *trial.names]
            measured.update(["train", "test"] if kind == "train" else [kind])
            occurrences = summed_occurrences(model) if kind == "train" else []
        self._tell_of_parts(call, model, kinds, parts, introduces=kind != "predict")
        self._named[model] += occurrences
        if (new := [part for part in occurrences if part not in self._told_parts]) and self._notes_here:
            note(occurrences_note(new))
        self._told_parts.update(occurrences)

    @property
    def _notes_here(self) -> bool:
        """Whether this worker shows the notes of the current position."""
        return self._job.is_chief and not self._resumable.catches_up

    def _tell_of_parts(
        self, call: NumberedCall, model: Any, kinds: list[str], parts: list[str], *, introduces: bool
    ) -> None:
        """Note which parts of a model are per replica, kinds of layers once, others once for models alike.

        Args:
            call: in progress.
            model: of the call.
            kinds: of layers.
            parts: of this model.
            introduces: whether the first note says that a script without a strategy is distributed.
        """
        alike = repr({**settings_of_call(model, (), first=True), **settings_of_model(model)}) if parts else ""
        named = [*((kind, kind) for kind in kinds), *((f"{alike}{part}", part) for part in parts)]
        self._named[model] = list(dict.fromkeys([*self._named.get(model, ()), *parts]))
        text = ""
        if introduces and self._adopts_all and not self._introduced:
            self._introduced = True
            text = introduction(call.name.partition(" ")[0], self._job.view, [part for _, part in named])
        elif new := [part for key, part in named if key not in self._told_parts]:
            text = f"model {model.name!r}: {per_replica_note(new)}"
        self._told_parts |= {key for key, _ in named}
        if text and self._notes_here:
            note(text)

    def _step_context(self, model: Any) -> Callable[[], AbstractContextManager[Any]]:
        """Return what returns the context of the program's own `train_step`: its strategy is the current one.

        Keras's own step must not see a strategy, by whose number of replicas it would divide losses.
        """
        return self._entered[model] if has_own(model, "train_step") else nullcontext

    def _noted(self, model: Any, batch: Any) -> Any:
        """Note the form of the inputs that a model of a strategy with parameter servers is built with."""
        if model in self._served:
            self._built_with[model] = keras.tree.map_structure(lambda leaf: leaf[:1], _inputs_of(batch))
        return batch

    def _sample(self, data: GlobalInput, model: Any, kind: StepKind) -> Any:
        """Return a batch to build a model with, read from the data as Keras reads one.

        Reading draws random numbers, so it is only done where each process does it.
        """
        known = self._models.awaits(model) or self._models.was_built(model, kind)
        if keras.backend.backend() == "tensorflow" or known or not self._resumable.may_sample:
            return data.peek()
        self._calls.current.samples += 1
        data.on_epoch_begin()
        return data.first()

    def _first_of(self, data: GlobalInput, model: Any) -> Iterator[tuple[int, int, list[Any]]]:
        """Yield the first batch in the form of Keras's epoch iterators; read it only when asked for it."""
        yield 0, 0, [self._sample(data, model, "train")]

    def _recorded_settings(self, model: Any, given: Mapping[str, Any]) -> Facts:
        """Return settings of a `fit` that may differ between runs, but not between workers."""
        callbacks = listed(given["callbacks"] or ())
        arguments = {name: given[name] for name in _ARGUMENTS}
        return {
            **{f"call {name.replace('_', ' ')}": str(value) for name, value in arguments.items()},
            **setting_facts(settings_of_call(model, callbacks, first=self._calls.outermost == 1)),
        }

    def _compare(
        self,
        call: NumberedCall,
        model: Any,
        facts: Callable[[], Facts],
        settings: Callable[[], Facts] = dict,
    ) -> None:
        """Check that all workers begin the same call with the same model; publish that it begins.

        Args:
            call: that begins.
            model: of the call.
            facts: returns what must be equal on all workers.
            settings: returns what is recorded of the call besides.
        """
        if self._resumable.catches_up:
            return
        self._job.events.publish(CallStarted(call.name, *call.extent))
        meet_servers(self._job, model, call.name)
        several = len(self._job.view.workers) > 1
        found = facts() if several or self._digests.active else {}
        seeds = {"the seeds of the script": f"{call.seed:x}"}
        recorded = settings() if self._digests.active else {}
        self._digests.begin_call(call.name, self._calls.taken, {**seeds, **found, **recorded})
        if several:
            arrays = model_state(model)
            if self._job.settings.allow_unlike:
                if given := chiefs_state(self._job, call.name, self._backend.to_numpy, arrays):
                    assign(model, given)
                arrays = {}
            state = state_facts(self._backend.to_numpy, arrays)
            agree(self._job, call.name, {"call": call.name} | seeds | dict(found) | state)

    def _finish(self, result: Any) -> Any:
        """Record the result of a top-level call."""
        call = self._calls.current
        if len(self._calls.stack) == 2:
            self._resumable.finish(result)
            if not call.at_end:
                verifications_of(self._job).end_call()
                self._digests.end_call()
                self._job.timer.end_call()
                self._job.events.publish(CallEnded(call.name))
        return result

    def _verbose(self, verbose: Any) -> Any:
        return verbose if self._job.is_chief else 0

    def _refuse_outsider(self, model: Any) -> None:
        if not self._has_one_replica:
            raise ScopeError(
                f"model {model.name!r} was not compiled in the strategy's scope, so each of the "
                f"{self._job.view.replicas} replicas would train its own model; build and compile it, "
                "or load it with keras.models.load_model, under `with strategy.scope():`"
            )


def replay_fit(model: Any, callbacks: Any, finished: FinishedCall) -> Any:
    """Return the result of a `fit` that finished before this process began; restore its callbacks.

    If it raised an error, raise that. `finished.kept` is None if its callbacks had not begun.
    """
    if finished.kept is not None:
        model.history = keras.callbacks.History()
        model.history.set_model(model)
        set_callback_states(listeners(writing_once(callbacks, 0, resumes=True), model), finished.kept)
    finished.raise_error()
    return model.history


def _reported(model: Any, epoch: int) -> dict[str, Any]:
    """Return what the `History` of a `fit` has for an epoch: callbacks may have added to Keras's logs."""
    history = getattr(model, "history", None)
    if history is None or history.epoch[-1:] != [epoch]:
        return {}
    whole = len(history.epoch)
    return {name: values[-1] for name, values in history.history.items() if len(values) == whole}


def _callbacks_of(call: NumberedCall) -> Any:
    return callback_states(listeners(call.callbacks, call.model), call.callback_hashes)


def bind(original: Original, model: Any, args: Any, kwargs: Any) -> inspect.BoundArguments:
    """Bind the arguments of a call to the parameters of Keras's method, with defaults."""
    bound = inspect.signature(original).bind(model, *args, **kwargs)
    bound.apply_defaults()
    return bound


def _setting_facts(model: Any) -> Facts:
    return setting_facts({**settings_of_call(model, (), first=False), **settings_of_model(model)})


def _extent(given: Mapping[str, Any], training: GlobalInput) -> tuple[int, int, int | None]:
    """Return the first epoch of a `fit` from 0, the last one from 1, and the steps of an epoch if known."""
    steps = given["steps_per_epoch"] or training.known_batches
    return int(given["initial_epoch"]), int(given["epochs"]), int(steps) if steps else None


def _all_facts(training: GlobalInput, validation: GlobalInput | None) -> Facts:
    checked = validation.facts() if validation is not None else {}
    return dict(training.facts()) | {f"validation {name}": fact for name, fact in checked.items()}


def _batch_of(original: Original, model: Any, args: Any, kwargs: Any) -> Any:
    """Return the (x, y, sample_weight) that was passed to a single-batch method."""
    given = bind(original, model, args, kwargs).arguments
    return given["x"], given.get("y"), given.get("sample_weight")


def _inputs_of(batch: Any) -> Any:
    return keras.utils.unpack_x_y_sample_weight(batch)[0]
