"""The methods of `keras.Model` in a job: `compile`, `fit`, `evaluate`, `predict`, and on single batches.

A model that is compiled in a strategy's scope, or in a script without a strategy, is adopted: the job
computes its calls. `_trainer` chooses the trainer that computes them; see `trainer.py`. Everything else in
Keras's loops (callbacks, logs, epochs) stays Keras's own.

The chief decides whether training stops (`decide`): at the end of each epoch, and at the end of each batch if
one of the user's callbacks has a batch method. This takes one small exchange. Without such a callback, a step
makes no such exchange.
"""

from contextlib import AbstractContextManager
from typing import Any

from lockstep.keras.backends.contract import Backend, StepKind
from lockstep.keras.backends.growth import forget_growths
from lockstep.keras.call_turns import CallTurns
from lockstep.keras.fit.adoption import AdoptedModels, Entered
from lockstep.keras.fit.call_inputs import CallInputs
from lockstep.keras.fit.call_record import CallRecord
from lockstep.keras.fit.mirrored import Mirrored
from lockstep.keras.fit.one_replica import Checkpointed, OneReplica, Outside
from lockstep.keras.fit.served import OutsideServed, ScheduledFunctions, Served, WithinServed
from lockstep.keras.fit.trainer import KerasFunctions, Original, Trainer, TrainerParts
from lockstep.keras.input.fit_inputs import GlobalInput
from lockstep.keras.kept_saves import KeptSaves
from lockstep.keras.model_digest import LastModel
from lockstep.keras.numbered_calls import NumberedCall, NumberedCalls
from lockstep.keras.replica_run.step_loop import StepLoops
from lockstep.keras.shared_saves import SharedSaves
from lockstep.keras.state.callback_states import attribute_hashes, callback_states, listeners
from lockstep.keras.state.checkpoint_callback import ScriptCheckpoints
from lockstep.keras.state.snapshots import Snapshots
from lockstep.keras.variables import forget_momentum
from lockstep.observability.events import TrainingEnded
from lockstep.observability.measurements import MetricsRecorded
from lockstep.observability.step_recorder import finite_values
from lockstep.worker.job import Job

_NOT_TRAINING = frozenset({"evaluate", "predict", "validation"})


class ModelMethods:
    """Replaces methods of `keras.Model` in one process. Each replacement gets Keras's method as `original`.

    Attributes:
        step_loops: drives custom loops.
        turns: the turns of the script's threads.
        functions: the functions that the script schedules.
    """

    def __init__(self, job: Job, backend: Backend) -> None:
        self._job = job
        saves = SharedSaves(job, backend, self._occasion)
        self._saves, self._kept_saves = saves, KeptSaves.of(job)
        # This runs before the recorder's own function for the exit, which publishes the records.
        job.at_exit(lambda: self._record.state_at_exit())
        # With one replica, Keras's own methods evaluate and predict. These calls never count, whether or not
        # checkpoints are saved.
        unnumbered = _NOT_TRAINING if job.view.replicas == 1 else frozenset()
        self._calls = calls = NumberedCalls(job.settings.seed, unnumbered=unnumbered)
        self._snapshots = snapshots = Snapshots(job, backend, calls)
        self._resumable = snapshots.resumable
        checkpoints, self._last = ScriptCheckpoints(job, calls, snapshots), LastModel(job)
        self.step_loops = StepLoops(job, backend, calls, snapshots, checkpoints, self._last)
        self.turns: CallTurns = self._resumable.turns
        self._models = AdoptedModels()
        self._record = CallRecord(job, backend, calls, self._resumable, saves, self._last)
        self._keras_functions = KerasFunctions()
        parts = TrainerParts(
            job=job,
            backend=backend,
            calls=calls,
            snapshots=snapshots,
            checkpoints=checkpoints,
            models=self._models,
            inputs=CallInputs(job, calls, snapshots),
            record=self._record,
            last=self._last,
            functions=self._keras_functions,
        )
        self._inputs = parts.inputs
        self.functions = ScheduledFunctions(parts)
        self._outside: Trainer
        self._one_replica: Trainer
        self._together: Trainer
        if not job.context.has_servers:
            self._outside = outside = Outside(parts)
            self._one_replica, self._together = OneReplica(parts, outside), Mirrored(parts)
        else:
            self._outside = outside = OutsideServed(parts)
            self._one_replica, self._together = WithinServed(parts, outside), Served(parts, self.functions)
        self._checkpointed: Trainer = Checkpointed(parts)
        job.at_completion(self._record.compare_last_batch)
        job.at_end(lambda: job.events.publish(self.trained()))
        job.at_completion(self.turns.wait)
        if job.checkpoints.resumed is not None:
            self._resumable.begin(job.checkpoints.resumed)

    def _trainer(self, model: Any) -> Trainer:
        """Return the trainer that computes the calls on a model; see `trainer.py`."""
        if model not in self._models:
            return self._outside
        if self._job.view.replicas > 1:
            return self._together
        resumable = self._job.checkpoints.scheduler is not None or self._resumable.behind
        return self._checkpointed if resumable else self._one_replica

    def call(self, method: str, original: Original, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Make a call of `fit`, `evaluate`, `predict`, or of a method for single batches."""
        return self._trainer(model).call(method, original, model, *args, **kwargs)

    def make_function(self, kind: StepKind, original: Original, model: Any, force: bool = False) -> Any:
        """Set the function of a model that Keras's loop calls for each step, and return it."""
        trainer = self._outside if self._keras_functions.makes else self._trainer(model)
        return trainer.make_function(kind, original, model, force)

    def symbolic_build(
        self, original: Original, model: Any, iterator: Any = None, data_batch: Any = None
    ) -> None:
        """Give Keras a plain batch to build from, without beginning a pass."""
        source = getattr(iterator, "data_adapter", None)
        if isinstance(source, GlobalInput):
            iterator = self._inputs.first_of(source, model)
        original(model, iterator=iterator, data_batch=data_batch)
        if model in self._models:
            self._snapshots.models.was_built_by_keras(model)

    def compile(self, original: Original, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Adopt a model that is compiled in a strategy's scope, or in a script without a strategy."""
        self._last.compiles(model)
        result = original(model, *args, **kwargs)
        forget_growths(model)
        forget_momentum(model)
        self.adopt(model)
        return result

    def adopt(self, model: Any) -> None:
        """Adopt a model that was just compiled, if it is in a strategy's scope, or the script has none."""
        if self._models.compiled(model):
            self._snapshots.adopt(model)

    def scope(self, entered: Entered, options: Any = None) -> AbstractContextManager[None]:
        """Adopt models that are compiled within the block; see `AdoptedModels.scope`."""
        return self._models.scope(entered, options)

    def strategy_of(self, model: Any) -> Any:
        """Return the strategy in whose scope a model was compiled, or is now, or None if there is none."""
        return self._models.strategy(model)

    def adopt_all(self) -> None:
        """Also adopt models outside of all scopes: the script has no strategy."""
        self._models.adopts_all = True

    def adopt_in_scopes(self) -> None:
        """Adopt models only in scopes: the script has a strategy."""
        self._models.adopts_all = False

    def release_models(self) -> None:
        """Let Keras make the functions of all models again, in a process that has left the job."""
        for model in self._models:
            model.train_function = model.test_function = model.predict_function = None

    @property
    def is_chief(self) -> bool:
        """Whether this worker is the chief."""
        return self._job.is_chief

    @property
    def forwarding(self) -> bool:
        """Whether the current call is skipping steps that were taken before this process began."""
        return self._calls.current.forwarding

    @property
    def step_end_processed(self) -> bool:
        """Whether callbacks processed the end of the last step in the process that saved the state."""
        return self._calls.current.processed == self._calls.current.steps

    @property
    def behind(self) -> bool:
        """Whether the script has not yet reached the position at which it resumes."""
        return self._resumable.behind

    def save(self, original: Original, model: Any, *args: Any, **kwargs: Any) -> None:
        """Save a model once for all workers.

        While the script catches up, the file already exists, and the model does not yet have its state.
        """
        if self._kept_saves is not None:
            self._kept_saves.save(original, model, *args, **kwargs)
        elif not self.behind and self._trainer(model).saves(model):
            self._saves.save(original, model, *args, **kwargs)

    def next_seed(self) -> int:
        """Return a new seed for the current position in the program; see `NumberedCalls.next_seed`."""
        return self._calls.next_seed()

    def next_run_seed(self) -> int:
        """Return the seed of the next `strategy.run`; see `NumberedCalls.next_run_seed`."""
        return self._calls.next_run_seed()

    def call_number(self) -> int:
        """Return the number of the call in progress, equal on workers that have skipped earlier calls."""
        return self._calls.current.number

    def trained(self) -> TrainingEnded:
        """Return the number of training steps, and the name and digest of the model that was trained last."""
        return TrainingEnded(self._record.steps, **self._last.summary())

    def train_begun(self, logs: Any = None) -> None:
        """Note that the callbacks of a `fit` have processed `on_train_begin`."""
        call = self._calls.current
        if call.callback_hashes:
            call.callback_hashes.append(attribute_hashes(call.callbacks))
            if call.values is not None:
                call.values.note_beginning()
            call.result_of = _changed_by

    def steps_ended(self) -> None:
        """Record and hold the state at the end of the last step of an epoch."""
        call = self._calls.current
        if call.model is not None:
            self._trainer(call.model).steps_ended(call)

    def epoch_ended(self, epoch: int, logs: Any = None) -> None:
        """Record the metrics of an epoch, from 0, on the chief."""
        call = self._calls.current
        if call.model is None or self._resumable.catches_up or self.forwarding:
            return
        recorded = MetricsRecorded(
            call=call.name,
            epoch=epoch + 1,
            trained=self._record.steps,
            values=finite_values({**(logs or {}), **_reported(call.model, epoch)}),
        )
        self._job.as_chief(lambda: self._job.events.publish(recorded))

    def decide(self, event: str, *_: Any, **__: Any) -> None:
        """Let the chief decide whether training stops, after callbacks have processed `event`."""
        self._job.timer.lap("other")
        call = self._calls.current
        if call.model is None:
            return
        if event == "on_train_batch_end":
            self._trainer(call.model).step_ended(call)
        self._record.decide(call, event)

    def _occasion(self) -> str:
        """Name the current position in the program, where all workers have equal states."""
        return f"call {self._calls.outermost}, step {self._calls.current.steps} of {self._calls.taken}"


def _reported(model: Any, epoch: int) -> dict[str, Any]:
    """Return the values in the `History` of a `fit` for an epoch, to which callbacks may have added some."""
    history = getattr(model, "history", None)
    if history is None or history.epoch[-1:] != [epoch]:
        return {}
    whole = len(history.epoch)
    return {name: values[-1] for name, values in history.history.items() if len(values) == whole}


def _changed_by(call: NumberedCall) -> Any:
    callbacks = callback_states(listeners(call.callbacks, call.model), call.callback_hashes)
    return {"callbacks": callbacks, "values": {} if call.values is None else call.values.packed()}
