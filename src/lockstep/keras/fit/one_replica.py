"""The trainers of one replica: Keras's own methods and steps.

They do not divide, try or compare anything. A `fit` is still numbered and recorded, as in any other job. If
checkpoints are saved, a wrapper of Keras's train function counts its steps.
"""

from collections.abc import Callable
from typing import Any

from lockstep.errors import CheckpointError, ScopeError
from lockstep.keras.backends.contract import Backend, StepKind, TrainFunctionCall
from lockstep.keras.fit.mirrored import Mirrored
from lockstep.keras.fit.trainer import Original, TrainerParts, bind, method_of
from lockstep.keras.input.fit_inputs import GlobalInput
from lockstep.keras.numbered_calls import NumberedCall, NumberedCalls
from lockstep.keras.private.common import CACHED_VALIDATION
from lockstep.keras.sidecar_evaluator import EvaluatorFit
from lockstep.keras.state.snapshots import Snapshots
from lockstep.keras.worker_exchange import Facts
from lockstep.observability.events import CallStarted


class Outside:
    """The `Trainer` of models that the job has not adopted.

    Args:
        parts: the parts of the trainer.
    """

    def __init__(self, parts: TrainerParts) -> None:
        self._job = parts.job

    def call(self, method: str, original: Original, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Call Keras's own method; refuse training, because each replica would have its own result."""
        if method in ("fit", "train_on_batch") and self._job.view.replicas > 1:
            raise ScopeError(
                f"model {model.name!r} was not compiled in the strategy's scope, so each of the "
                f"{self._job.view.replicas} replicas would train its own model; build and compile it, "
                "or load it with keras.models.load_model, under `with strategy.scope():`"
            )
        if method not in ("evaluate", "predict"):
            return original(model, *args, **kwargs)
        with self._job.timer.within("validation" if kwargs.get(CACHED_VALIDATION) else method):
            return original(model, *args, **kwargs)

    def make_function(self, kind: StepKind, original: Original, model: Any, force: bool) -> Any:
        """Let Keras make the function."""
        return original(model, force)

    def saves(self, model: Any) -> bool:
        """Whether this process saves a model: all of them do."""
        return True

    def step_ended(self, call: NumberedCall) -> None:
        """Do nothing."""

    def steps_ended(self, call: NumberedCall) -> None:
        """Do nothing."""


class Checkpointed(Mirrored):
    """The `Trainer` of one replica whose calls can be resumed: they are numbered, and steps are counted."""

    def make_function(self, kind: StepKind, original: Original, model: Any, force: bool) -> Any:
        """Let Keras make the function; count the steps of the one that trains."""
        original(model, force)
        if kind == "train" and not isinstance(model.train_function, TrackedTrainFunction):
            parts = self._parts
            model.train_function = TrackedTrainFunction(
                model.train_function, parts.backend, model, parts.calls, parts.snapshots
            )
        return getattr(model, f"{kind}_function")

    def steps_ended(self, call: NumberedCall) -> None:
        """Record the state, for which no step has a digest, and hold it."""
        self._parts.record.state(f"the end of an epoch of {call.name}", call.model)
        super().steps_ended(call)

    def _begin(
        self,
        call: NumberedCall,
        model: Any,
        kind: StepKind,
        data: GlobalInput,
        facts: Callable[[], Facts],
        settings: Callable[[], Facts] = dict,
    ) -> None:
        """Build a model that gets another process's state; Keras builds other models itself."""
        if len(self._parts.calls.stack) == 2 and not self._resumable.catches_up:
            self._job.events.publish(CallStarted(call.name, *call.extent))
        if self._resumable.behind or self._models.awaits(model):
            self._models.build(model, kind, lambda: self._sample(data, model, kind))
        if kind == "train":
            self._parts.record.begin_plain(call, model, settings())

    def _validation(self, model: Any, arguments: dict[str, Any], validation: Any) -> Any:
        """Return the validation data as Keras reads it."""
        return validation

    def _prepares(self, model: Any) -> bool:
        """Whether a model gets the state of another process."""
        return self._models.awaits(model)

    def _introduce(
        self,
        call: NumberedCall,
        model: Any,
        kind: StepKind,
        read: Callable[[], Any],
        *,
        weighs: Callable[[], bool] = lambda: False,
    ) -> None:
        """Do nothing: one replica computes like one process."""


class OneReplica(Checkpointed):
    """The `Trainer` of one replica without checkpoints. Keras's own methods evaluate and predict anywhere.

    Args:
        parts: the parts of the trainer.
        outside: makes the calls that are Keras's own.
    """

    keeps_state = False

    def __init__(self, parts: TrainerParts, outside: Outside) -> None:
        super().__init__(parts)
        self._outside = outside
        self._evaluator_fit = EvaluatorFit()

    def call(self, method: str, original: Original, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Make a call. Only calls that train have turns."""
        parts = self._parts
        if parts.turns.is_within():
            # This thread reads the examples of a call, and that call waits for it.
            return original(model, *args, **kwargs)
        if method in ("evaluate", "predict"):
            return self._outside.call(method, original, model, *args, **kwargs)
        with parts.turn(method, model, args, kwargs):
            return method_of(self, method)(original, model, *args, **kwargs)

    def fit(self, original: Original, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Train on whole batches. In an evaluator, evaluate the model that others train."""
        if self._job.evaluates:
            self._job.note_distribution()
            return self._evaluator_fit.fit(model, bind(original, model, args, kwargs).arguments)
        return super().fit(original, model, *args, **kwargs)

    def on_batch(self, method: str, original: Original, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Pass a batch to Keras's own method."""
        if method == "train_on_batch":
            self._parts.record.plain_steps += 1
        return super().on_batch(method, original, model, *args, **kwargs)

    def make_function(self, kind: StepKind, original: Original, model: Any, force: bool) -> Any:
        """Let Keras make the function."""
        return original(model, force)

    def step_ended(self, call: NumberedCall) -> None:
        """Count the steps, which Keras's own training function does not."""
        self._parts.record.plain_steps += call.model.steps_per_execution


class TrackedTrainFunction:
    """Wraps Keras's own train function: counts its steps, skips steps taken elsewhere, and saves checkpoints.

    Nothing else refers to Keras's function, so it ends with this object. If it survived `compile`, JAX would
    use it in place of the new function, because both compile the same method of the model. So the model would
    train with its old loss.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        backend: Backend,
        model: Any,
        calls: NumberedCalls,
        snapshots: Snapshots,
    ) -> None:
        steps = _TrackedSteps(backend, model, calls, snapshots)
        self._call = backend.intercepted(model, function, steps.execute)

    def __call__(self, *args: Any) -> Any:
        """Call the train function."""
        return self._call(*args)


class _TrackedSteps:
    """The actions of a train function besides training.

    A call of the loop counts as `steps_per_execution` steps, even if fewer are left in the data.
    """

    def __init__(self, backend: Backend, model: Any, calls: NumberedCalls, snapshots: Snapshots) -> None:
        self._model = model
        self._calls = calls
        self._snapshots = snapshots
        self._held = backend.training_state(model)

    def execute(self, execution: TrainFunctionCall) -> tuple[Any, Any]:
        """Make a call of the function; return (logs, the state after it)."""
        call, model = self._calls.current, self._model
        steps = 1 if call.at_end else model.steps_per_execution
        if call.steps < call.skipped:
            execution.skip()
            self._snapshots.resumable.skip(steps)
            return self._skipped(execution.state)
        logs, state = execution.run()
        call.steps += steps
        call.logs = logs
        self._calls.taken += steps
        if not call.at_end:
            self._snapshots.end_step(
                lambda whole: self._snapshots.take(whole, model, logs, self._held, state)
            )
        return logs, state

    def _skipped(self, state: Any) -> tuple[Any, Any]:
        call = self._calls.current
        if call.steps < call.skipped:
            return {}, state
        if call.steps > call.skipped:
            raise CheckpointError(
                f"the checkpoint is of step {call.skipped} of {call.name}, where a model with "
                f"steps_per_execution={self._model.steps_per_execution} does not stop: compile it with "
                "the steps_per_execution that it had, or start over in another folder"
            )
        return self._snapshots.restore(self._model, self._held, state)
