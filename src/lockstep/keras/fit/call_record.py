"""The record of the calls on models that a process publishes, and the comparisons of workers in them."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from lockstep.keras import assignments
from lockstep.keras.backends.contract import Backend
from lockstep.keras.input.fit_inputs import GlobalInput
from lockstep.keras.model_digest import LastModel
from lockstep.keras.numbered_calls import NumberedCall, NumberedCalls
from lockstep.keras.python_replicas import python_facts
from lockstep.keras.shared_saves import SharedSaves
from lockstep.keras.state.callback_states import listed
from lockstep.keras.state.resumable_calls import ResumableCalls
from lockstep.keras.state.settings import settings_of_call, settings_of_model
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
from lockstep.observability.events import CallEnded, CallStarted
from lockstep.worker.job import Job

_ARGUMENTS = ("batch_size", "shuffle", "steps_per_epoch", "class_weight", "validation_split")
"""The arguments of `fit` that are recorded."""


class CallRecord:
    """The record of a process's calls.

    Args:
        job: the job of the process.
        backend: the backend of Keras.
        calls: the calls of the process.
        resumable: the positions of the calls.
        saves: compares states without waiting.
        last: the model that was trained last.

    Attributes:
        plain_steps: number of steps that Keras's own training functions took and no call counts.
        meet: is called by all workers at the beginning of a call, with its model and its name.
    """

    def __init__(
        self,
        job: Job,
        backend: Backend,
        calls: NumberedCalls,
        resumable: ResumableCalls,
        saves: SharedSaves,
        last: LastModel,
    ) -> None:
        self._job = job
        self._backend = backend
        self._calls = calls
        self._resumable = resumable
        self._saves = saves
        self._last = last
        self._digests = recorder_of(job, backend.to_numpy)
        self._trained_by_batch: tuple[Any, int] | None = None
        self.plain_steps = 0
        self.meet: Callable[[Any, str], None] = lambda model, label: None

    @property
    def steps(self) -> int:
        """The number of training steps so far."""
        return self._calls.taken + self.plain_steps

    def begin(
        self,
        call: NumberedCall,
        model: Any,
        facts: Callable[[], Facts],
        settings: Callable[[], Facts] = dict,
    ) -> None:
        """Check that all workers begin the same call with the same model; publish that it begins.

        Args:
            call: the call.
            model: the model of the call.
            facts: returns facts that must be equal on all workers.
            settings: returns further settings of the call, which are only recorded.
        """
        if self._resumable.catches_up:
            return
        self._job.events.publish(CallStarted(call.name, *call.extent))
        self.meet(model, call.name)
        several = len(self._job.view.workers) > 1
        compared_facts = dict(facts()) if several or self._digests.active else {}
        if compared_facts and self._job.local_steps is not None:
            compared_facts["local steps"] = self._job.local_steps.text
        seeds = {"the seeds of the script": f"{call.seed:x}"}
        recorded = settings() if self._digests.active else {}
        self._digests.begin_call(call.name, self._calls.taken, {**seeds, **compared_facts, **recorded})
        if several:
            arrays = model_state(model)
            if self._job.settings.allow_unlike:
                if chiefs := chiefs_state(self._job, call.name, self._backend.to_numpy, arrays):
                    assign(model, chiefs)
                arrays = {}
            state = state_facts(self._backend.to_numpy, arrays)
            called = {"call": call.name} | seeds | dict(compared_facts)
            verifications = verifications_of(self._job)
            if verifications.plan.verification.every:
                agree(self._job, call.name, called)
                verifications.agree(call.name, state, self._calls.taken, [model])
            else:
                agree(self._job, call.name, called | state)

    def begin_plain(self, call: NumberedCall, model: Any, settings: Facts) -> None:
        """Record the beginning of a `fit` whose steps are Keras's own."""
        self._digests.begin_call(call.name, self.steps, settings)
        self.state(f"the beginning of {call.name}", model)

    def begin_functions(self, call: NumberedCall) -> None:
        """Record and publish that functions begin. Other calls may follow before they end."""
        self._job.events.publish(CallStarted(call.name))
        seeds = {"the seeds of the script": f"{call.seed:x}"}
        self._digests.begin_call(call.name, self.steps, seeds)

    def end_functions(self, name: str, functions: int) -> None:
        """Record and publish that functions are complete."""
        self._calls.taken += functions
        self._digests.end_call()
        self._job.timer.stop()
        if not self._resumable.catches_up:
            self._job.events.publish(CallEnded(name))

    def finish(self, result: Any) -> Any:
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

    def state(self, label: str, model: Any, more: int = 0) -> None:
        """Record the state of a model, which is in its variables, outside of any step.

        Args:
            label: names the position in the script.
            model: the model, or variables by name.
            more: number of steps that are not counted yet.
        """
        named = isinstance(model, NamedVariables)
        state: Any = model if named else self._backend.training_state(model)
        self._digests.record_state_now(self.steps + more, label, state)

    def state_at_exit(self) -> None:
        """Record, at the end of the script, the state of the model that was trained last."""
        if self._last.model is not None:
            # As with the model's digest, a failed step may have freed the state's memory.
            with contextlib.suppress(Exception):
                self.state("the end of the script", self._last.model)

    def compare_states(self, label: str, model: Any) -> None:
        """Check that all workers have equal states of a model, which is in its variables.

        Raises:
            DisagreementError: states differ. Every worker raises it.
        """
        if len(self._job.view.workers) == 1 or self._resumable.behind:
            return
        arrays = model_state(model)
        if not self._job.settings.allow_unlike:
            facts = {**state_facts(self._backend.to_numpy, arrays), **python_facts(model)}
            verifications_of(self._job).agree(label, facts, self._calls.taken, [model], whole=True)
        elif chiefs := chiefs_state(self._job, label, self._backend.to_numpy, arrays):
            assign(model, chiefs)

    def note_batch(self, model: Any) -> None:
        """Note that a model was trained on a single batch."""
        if len(self._job.view.workers) > 1:
            assignments.install()
            self._trained_by_batch = model, assignments.count()

    def compare_last_batch(self) -> None:
        """At the end of the script, compare the states after the last `train_on_batch`.

        Workers do not wait for each other here, because one may still be busy for long. If the program has
        changed variables since then, perhaps on only one worker, nothing is compared.
        """
        if self._trained_by_batch is not None and self._trained_by_batch[1] == assignments.count():
            self._saves.compare("the end of the script", self._trained_by_batch[0])

    def decide(self, call: NumberedCall, event: str) -> None:
        """Let the chief decide whether a `fit` stops, after callbacks have processed `event`."""
        if self._resumable.catches_up or call.forwarding or len(self._job.view.workers) == 1:
            return
        if event == "on_epoch_end" or call.by_batch:
            label = f"the decision to stop after step {call.steps} of {call.name}"
            call.model.stop_training = chiefs_decision(self._job, label, bool(call.model.stop_training))

    def settings_of_fit(self, model: Any, arguments: Mapping[str, Any]) -> Facts:
        """Return settings of a `fit` that may differ between runs, but not between workers."""
        callbacks = listed(arguments["callbacks"] or ())
        recorded = {name: arguments[name] for name in _ARGUMENTS}
        return {
            **{f"call {name.replace('_', ' ')}": str(value) for name, value in recorded.items()},
            **self.settings_of_call(model, callbacks),
        }

    def settings_of_call(self, model: Any, callbacks: Any = ()) -> Facts:
        """Return the settings of a call that are recorded."""
        return setting_facts(settings_of_call(model, callbacks, first=self._calls.outermost == 1))


def model_facts(model: Any) -> Facts:
    """Return the settings of a model that must be equal on all workers."""
    return setting_facts({**settings_of_call(model, (), first=False), **settings_of_model(model)})


def extent_of_fit(arguments: Mapping[str, Any], training: GlobalInput) -> tuple[int, int, int | None]:
    """Return the first epoch of a `fit`, from 0, its last one, from 1, and an epoch's steps if known."""
    steps = arguments["steps_per_epoch"] or training.known_batches
    return int(arguments["initial_epoch"]), int(arguments["epochs"]), int(steps) if steps else None


def fit_facts(
    model: Any, arguments: Mapping[str, Any], training: GlobalInput, validation: Any = None
) -> Facts:
    """Return facts that must be equal on all workers that begin a `fit`."""
    checked = validation.facts() if isinstance(validation, GlobalInput) else {}
    return {
        "call epochs": f"{arguments['initial_epoch']} to {arguments['epochs']}",
        **training.facts(),
        **{f"validation {name}": fact for name, fact in checked.items()},
        **model_facts(model),
    }
