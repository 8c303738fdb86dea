"""The trainers that compute the calls on a model: of one replica, of several, or with parameter servers.

    ModelMethods            Keras's methods on models; chooses the trainer of a call, only in `_trainer`
      `-- Trainer
            Outside         the model is not the job's: Keras's own methods
            Mirrored        replicas: every worker returns the results on global batches
            Checkpointed    one replica, whose calls a process can resume: Keras's own steps, counted
            OneReplica      one replica without checkpoints: Keras's own methods, but `fit` is recorded
            Served          a job with parameter servers; within `fit`: WithinServed

`Served` is `Mirrored`, except for `fit`. Outside of `fit`, all processes have the same state and share the
work. Within it, each process is separate from the view, and acts as a job with one replica.

Whether a job has parameter servers is fixed, so `ModelMethods` asks once, when it creates the trainers. Three
other facts decide for each call: whether the model is adopted, how many replicas the view has now, and
whether the job saves or resumes. The last one changes when a `fit` of the script asks for checkpoints.

`TrainerParts` has the common parts of all trainers: the adopted models (`adoption.py`), the calls of the
process and their positions (`keras/numbered_calls.py`, `keras/state`), their inputs (`call_inputs.py`), and
their records and comparisons (`call_record.py`). `introductions.py` tries which parts are per replica.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from lockstep.keras.backends.contract import Backend, StepKind
from lockstep.keras.call_turns import CallTurns, key_of
from lockstep.keras.fit.adoption import AdoptedModels
from lockstep.keras.fit.call_inputs import CallInputs
from lockstep.keras.fit.call_record import CallRecord
from lockstep.keras.model_digest import LastModel
from lockstep.keras.numbered_calls import NumberedCall, NumberedCalls
from lockstep.keras.state.checkpoint_callback import ScriptCheckpoints
from lockstep.keras.state.resumable_calls import ResumableCalls
from lockstep.keras.state.snapshots import Snapshots
from lockstep.system.thread_value import ThreadValue
from lockstep.worker.job import Job

Original = Callable[..., Any]
"""Keras's own method."""

KINDS: Mapping[str, StepKind] = {
    "train_on_batch": "train",
    "test_on_batch": "test",
    "predict_on_batch": "predict",
}
"""The kinds of the steps of methods for single batches."""

FUNCTIONS: Mapping[str, str] = {
    **dict.fromkeys(("evaluate", "test_on_batch"), "test_function"),
    **dict.fromkeys(("predict", "predict_on_batch"), "predict_function"),
}
"""The attributes with the functions that methods call for each batch, without those for training."""


class Trainer(Protocol):
    """Computes the calls on models, in one process of a job."""

    def call(self, method: str, original: Original, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Make a call of `fit`, `evaluate`, `predict` or a method for single batches, in its turn."""

    def make_function(self, kind: StepKind, original: Original, model: Any, force: bool) -> Any:
        """Set the function of a model that Keras's loop calls for each step, and return it."""

    def saves(self, model: Any) -> bool:
        """Whether this process saves a model, alone or with the others."""

    def step_ended(self, call: NumberedCall) -> None:
        """Note that callbacks have processed the end of one execution of steps of a `fit`."""

    def steps_ended(self, call: NumberedCall) -> None:
        """Record and hold the state after the last step of an epoch, which may be the last of all."""


class KerasFunctions:
    """Lets Keras make the functions of adopted models, for a call that is not the job's."""

    def __init__(self) -> None:
        self._one_at_a_time = threading.Lock()
        self._by_itself = ThreadValue(False)

    @property
    def makes(self) -> bool:
        """Whether Keras makes the functions that this thread asks for."""
        return self._by_itself.value

    @contextmanager
    def made_by_keras(self, model: Any, attribute: str) -> Iterator[None]:
        """Within the block, a function of a model, such as its `test_function`, is Keras's own."""
        with self._one_at_a_time:
            function = getattr(model, attribute)
            setattr(model, attribute, None)
            try:
                with self._by_itself.within(True):
                    yield
            finally:
                setattr(model, attribute, function)


@dataclass(frozen=True)
class TrainerParts:
    """The common parts of all trainers of a process.

    Attributes:
        job: the job of the process.
        backend: the backend of Keras.
        calls: the calls of the process.
        snapshots: the state of the process.
        checkpoints: the checkpoints that the script requests.
        models: the adopted models.
        inputs: makes the inputs of calls.
        record: the record of the calls.
        last: the model that was trained last.
        functions: lets Keras make functions by itself.
    """

    job: Job
    backend: Backend
    calls: NumberedCalls
    snapshots: Snapshots
    checkpoints: ScriptCheckpoints
    models: AdoptedModels
    inputs: CallInputs
    record: CallRecord
    last: LastModel
    functions: KerasFunctions

    @property
    def resumable(self) -> ResumableCalls:
        """The finished calls of the script and the one in progress."""
        return self.snapshots.resumable

    @property
    def turns(self) -> CallTurns:
        """The turns of the script's threads."""
        return self.resumable.turns

    def turn(self, method: str, model: Any, args: Any, kwargs: Any) -> AbstractContextManager[None]:
        """Return a context in which this thread makes a call, when it has its turn."""
        return self.turns.turn(method, lambda: key_of(method, self.models.subject(model), args, kwargs))

    def hold(self, call: NumberedCall) -> None:
        """Hold the state at the end of the last step of an epoch of a `fit`."""
        if call.steps > call.skipped and len(self.calls.stack) == 2:
            held = self.backend.training_state(call.model)
            self.snapshots.hold(
                lambda: self.snapshots.take(True, call.model, call.logs, held, callbacks_done=True)
            )


def method_of(trainer: Any, method: str) -> Callable[..., Any]:
    """Return the trainer's method for a call of a method of models."""
    return functools.partial(trainer.on_batch, method) if method in KINDS else getattr(trainer, method)


def bind(original: Original, model: Any, args: Any, kwargs: Any) -> inspect.BoundArguments:
    """Bind the arguments of a call to the parameters of Keras's method, with defaults."""
    bound = inspect.signature(original).bind(model, *args, **kwargs)
    bound.apply_defaults()
    return bound
