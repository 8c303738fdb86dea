"""The distributed calls of a script that may resume: each is replayed, skips its first steps, or is new.

A process that resumes from a checkpoint, or joins a job, runs the script from its beginning. Finished calls
return their earlier results. The call in progress skips completed steps, and then restores the state.

To skip steps, the call goes through Keras's loop without computing the steps and without calling callbacks.
So Keras itself creates the local variables of its loops (epochs, logs, iterators), and a position in the data
is a number of steps. The cost is one iteration of Keras's loop for each skipped step. A script with different
calls, or with a call that ends before the position, is refused, and so are its later calls.

The call in progress also rebuilds a model that finished calls had built. For this it inspects a stream
without starting a pass that the first process did not start.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import msgspec

from lockstep.checkpoint.checkpoint_files import Contents
from lockstep.checkpoint.values import unpack
from lockstep.collectives.contract import Communicator
from lockstep.errors import CheckpointError, DisagreementError, LockstepError
from lockstep.keras.call_turns import MADE_BY_THREADS, CallTurns, agreed_key
from lockstep.keras.host_report import compare_with_member
from lockstep.keras.numbered_calls import NumberedCall, NumberedCalls
from lockstep.keras.randomness import random_states, set_random_states
from lockstep.keras.state.journal import FinishedCall, Journal, failure_of
from lockstep.keras.verification import verifications_of
from lockstep.keras.worker_exchange import ADVICE_ON_CALLS, gather
from lockstep.observability.events import StepsSkipped
from lockstep.system.notes import note
from lockstep.topology import View
from lockstep.worker.job import Job

SKIPPING_EVERY = 5.0
"""Seconds after which a worker says how many steps it has skipped."""

_PARTS: Mapping[str, type] = {
    "journal": dict,
    "steps": int,
    "methods": dict,
    "inner": dict,
    "taken": int,
    "logs": dict,
    "callbacks": list,
    "random": dict,
}
"""The required entries of `training` in a checkpoint. Earlier versions of Lockstep lack the others."""


class CallFinishedElsewhere(Exception):
    """The members have finished the call in which this worker was about to join them."""


@dataclass(frozen=True)
class Resumption:
    """The position at which the script resumes.

    Attributes:
        contents: the contents of the checkpoint.
        entries: its parts of the state; see `lockstep.keras.state.snapshots`.
        journal: the finished calls.
        steps: number of completed steps of the call in progress; 0 if there was none.
        samples: number of sample batches of its data that were read before it began.
        passes: number of passes over its examples that had begun.
        states: the random states at the beginning of the last pass.
        call: the call that was in progress or had just finished; empty if unknown.
        joined: whether this worker is a member of the job, for which the other members wait.
        schedules: whether the script resumes between two entries of the log of a call.
        key: the key of the turn of the call in progress, if several threads make calls.
    """

    contents: Contents
    entries: Mapping[str, Any]
    journal: Journal
    steps: int
    samples: int
    passes: int
    states: Mapping[str, Any]
    call: str = ""
    joined: bool = False
    schedules: bool = False
    key: str = ""

    @classmethod
    def of(cls, contents: Contents, training: Mapping[str, Any], *, joined: bool = False) -> "Resumption":
        """Return the position in `contents`, given the unpacked part `training` of its manifest."""
        return cls(
            contents=contents,
            entries=training,
            journal=Journal.unpacked(training["journal"]),
            steps=training["steps"],
            samples=training.get("looks", 0),
            passes=training.get("passes", 0),
            states=training.get("states", {}),
            call=training.get("call", ""),
            joined=joined,
            schedules=training.get("schedules", False),
            key=training.get("turn", ""),
        )


class SkippedSteps:
    """Publishes every few seconds how much of a call was skipped, and its end if that took long.

    Args:
        publish: publishes the events.
        now: reads a clock, in seconds.
    """

    def __init__(
        self, publish: Callable[[StepsSkipped], None], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._publish = publish
        self._now = now
        self._of: tuple[str, str] | None = None
        self._due = 0.0
        self._told = False

    def note(self, call: str, skipped: int, of: int, unit: str = "steps") -> None:
        """Note that `call` has skipped `skipped` of its first `of` steps, or of another `unit`."""
        now = self._now()
        if (call, unit) != self._of:
            self._of, self._told, self._due = (call, unit), False, now + SKIPPING_EVERY
        if now >= self._due or (skipped >= of and self._told):
            self._told, self._due = True, now + SKIPPING_EVERY
            self._publish(StepsSkipped(call, skipped, of, unit))


class ResumableCalls:
    """The calls of one process, from the first of its script to the one in progress.

    Attributes:
        skipping: publishes how much of a call was skipped.
        turns: the turns of the script's threads, whose calls follow each other.
        begun_with: the results of trials of models (`growths`), the values with which their steps were
            compiled (`traces`), and the hashes of the program's files (`sources`), in the state with which
            this process began; empty without one.
    """

    def __init__(self, job: Job, calls: NumberedCalls) -> None:
        self._job = job
        self._calls = calls
        self._since: int | None = None
        self._journal = Journal()
        self._resumption: Resumption | None = None
        self._refusal: LockstepError | None = None
        self._again: BaseException | None = None
        self.skipping = SkippedSteps(job.events.publish)
        self.begun_with: Mapping[str, Any] = {}
        self.turns = CallTurns(
            self._next_key, self._has_recorded_keys, lambda: job.policy.timeout, self._note_threads
        )

    @property
    def journal(self) -> Journal:
        """The calls that have finished."""
        return self._journal

    @property
    def resumption(self) -> Resumption | None:
        """The position at which this process resumes, or None after the script has reached it."""
        return self._resumption

    @property
    def since(self) -> int | None:
        """The number of calls before the one in which the script requests checkpoints, if it does."""
        return self._since

    @property
    def behind(self) -> bool:
        """Whether the script has not yet reached the position at which training resumes."""
        return self._resumption is not None or self._job.joins

    @property
    def catches_up(self) -> bool:
        """Whether the other workers are ahead of this one, and do not take part in its calls."""
        return self._job.joins or (self._resumption is not None and self._resumption.joined)

    @property
    def at_its_end(self) -> bool:
        """Whether the call in progress is the last finished one, and training resumes after it."""
        resumption = self._resumption
        return (
            resumption is not None
            and resumption.steps == 0
            and not resumption.schedules
            and self._calls.outermost == len(resumption.journal)
        )

    @property
    def before_repeated_batch(self) -> bool:
        """Whether the call in progress is the last finished one, and a single-batch call is repeated next."""
        resumption = self._resumption
        return (
            resumption is not None
            and resumption.steps > 0
            and "on_batch" in resumption.call
            and self._calls.outermost == len(resumption.journal)
        )

    @property
    def before_repeated_prediction(self) -> bool:
        """Whether training resumes in a `predict`, a step of which is repeated."""
        resumption = self._resumption
        return resumption is not None and resumption.steps > 0 and resumption.call.startswith("predict ")

    @property
    def may_sample(self) -> bool:
        """Whether every process, not only one that resumes, reads a sample batch here in the current call.

        In a process that has skipped the calls that built a model, the model is not built yet. Such a process
        reads one more sample batch, which must not affect a stream.
        """
        return self._resumption is None or self._calls.current.samples < self._resumption.samples

    def next_call(self) -> FinishedCall | int:
        """Return how the current call runs, without effects.

        Returns:
            The result of a call that finished before this process began, to replay it. Otherwise the number
            of steps that were completed before that, to skip them: 0 for a new call.

        Raises:
            DisagreementError: the members of the job have not made this call.
            CheckpointError: another call was made at this position, or it ended with an error that cannot be
                raised again.
        """
        resumption = self._resumption
        if resumption is None or len(self._calls.stack) > 2:
            return 0
        if self._calls.outermost <= len(resumption.journal):
            return self._finished(resumption)
        if resumption.steps:
            self._refuse_another(resumption.call)
            self._refuse_another_key(resumption.key)
            return resumption.steps
        if self._job.joins:
            raise DisagreementError(
                f"{self._calls.current.name} of this worker, which is joining, is a call that the others "
                f"have not made; {ADVICE_ON_CALLS}"
            )
        return 0

    def request_checkpoints(self) -> None:
        """Note that the call in progress requests checkpoints."""
        self._since = self._calls.outermost - 1

    def withdraw_request(self) -> None:
        """Undo `request_checkpoints`."""
        self._since = None

    def begin(self, contents: Contents) -> None:
        """Resume from `contents` when the script reaches its position.

        Raises:
            CheckpointError: the checkpoint does not come from training, or its script requested checkpoints
                at another position.
        """
        training = unpack(contents.manifest.get("training"), contents.arrays)
        if not isinstance(training, dict):
            raise CheckpointError(f"the checkpoint of step {contents.step} was not saved by a training run")
        if training.get("since", self._since) != self._since:
            raise CheckpointError(
                f"the checkpoint of step {contents.step} was saved by {_origin(training['since'])}, and the "
                f"job resumes with {_origin(self._since)}, where other calls have finished: configure "
                "checkpoints as before, or start over in another folder"
            )
        if wrong := [
            name
            for name, expected_class in _PARTS.items()
            if not isinstance(training.get(name), expected_class)
        ]:
            raise CheckpointError(
                f"the checkpoint of step {contents.step} lacks state of the training, or has something else "
                f"in its place: {', '.join(wrong)}; remove it to resume from the previous one"
            )
        try:
            self._resumption = Resumption.of(contents, training)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"cannot read the finished calls in the checkpoint of step {contents.step}: {error!r}"
            ) from error
        self._note_beginning(training)

    @contextmanager
    def call(self, method: str) -> Iterator[NumberedCall]:
        """Number a call of `method`, and make it the current one for the block; note an error that ends it.

        Raises:
            LockstepError: an earlier call could not continue training, and the script caught that error.
        """
        if self._refusal is not None:
            raise self._refusal
        self._settle_held_state(method)
        aside = verifications_of(self._job).aside() if len(self._calls.stack) > 1 else nullcontext()
        with self._calls.enter(method) as call, self._job.timer.within(method), aside:
            try:
                yield call
            except BaseException as error:
                if len(self._calls.stack) == 2:
                    self._fail(call, error)
                raise

    def resume(self) -> FinishedCall | None:
        """Move the current call to the training's position, and return its result if it has finished.

        If it has not, its first steps are skipped. A joiner waits until the members send the position.

        Raises:
            DisagreementError: the members of the job have not made this call.
            CheckpointError: another call was made at this position, or it ended with an error that cannot be
                raised again.
            PeerLostError: the job is over.
        """
        if self._resumption is None and self._job.joins and len(self._calls.stack) == 2:
            self._follow(self._job.membership.position())
        following = self.next_call()
        if isinstance(following, FinishedCall):
            self._move_past(following)
            return following
        if following:
            self._calls.current.skipped = following
        return None

    def resume_validation(self, training: NumberedCall) -> None:
        """If the members wait for this worker in the validation that begins, skip its earlier steps.

        The members have begun to read its data with other random states, so this sets them.

        Args:
            training: the `fit` that validates.
        """
        resumption = self._resumption
        if resumption is not None and (position := resumption.entries.get("validation")):
            self._calls.current.skipped = position["steps"]
            set_random_states(position["states"], training.held_by_validation)

    def skip(self, steps: int) -> None:
        """Count steps of the current call that were taken elsewhere and are not repeated."""
        call = self._calls.current
        call.steps += steps
        self.skipping.note(call.name, call.steps, call.skipped)

    def outputs_of(self, step: int) -> Any:
        """Return the outputs of a skipped step of a `predict`."""
        assert self._resumption is not None
        return self._resumption.entries["outputs"][step - 1]

    def replay(self) -> FinishedCall:
        """Skip the call in progress, which has finished elsewhere, and return its result.

        Raises:
            CheckpointError: another call was made at this position, or it ended with an error that cannot be
                raised again.
        """
        assert self._resumption is not None
        finished = self._finished(self._resumption)
        self._move_past(finished)
        return finished

    def join(self) -> bool:
        """Become a member of the job, and return whether the members have finished the call in progress.

        If they have not, its steps up to the step of the received state are skipped.
        """
        return self._joined_in(self._job.join())

    def join_apart(self) -> bool:
        """Work like `join`, in a call in which the members do not wait for each other."""
        return self._joined_in(self._job.join_apart())

    def _joined_in(self, contents: Contents) -> bool:
        self._follow(contents, joined=True)
        assert self._resumption is not None
        if self._calls.outermost <= len(self._resumption.journal):
            return True
        self._calls.current.skipped = self._resumption.steps
        return False

    def arrive(self) -> None:
        """Note that the script has reached the position of training, and that the state is restored."""
        assert self._resumption is not None
        self._journal, self._resumption = self._resumption.journal, None

    def finish(self, result: Any) -> None:
        """Record that the top-level call in progress has returned `result`.

        Raises:
            CheckpointError: it did not reach the position at which training resumes.
        """
        call = self._calls.current
        if self._resumption is not None:
            raise CheckpointError(self._not_reached(call, f"it has ended after {call.steps}"))
        kept = result if call.result_of is None else call.result_of(call)
        held = call.held_by_inputs
        self._journal.add(kept, self._calls.methods, self._calls.taken, key=self.turns.key, held=held)
        if self._job.checkpoints.scheduler is not None:
            self._job.checkpoints.scheduler.end_call()

    def begin_pass(self) -> None:
        """Record the random states at the beginning of a pass over the examples of the call in progress.

        They determine the order of the examples. If training resumes within this pass, they are first set to
        the recorded ones, because a process that skips calls has drawn other random numbers until then.
        """
        call, resumption = self._calls.current, self._resumption
        call.passes += 1
        # In a validation, the next pass may have begun.
        skips = resumption is not None and (call.forwarding or "validation" in resumption.entries)
        if resumption is not None and skips and call.passes == resumption.passes:
            set_random_states(resumption.states, call.held_by_inputs)
        call.states = random_states(call.held_by_inputs)

    def _settle_held_state(self, method: str) -> None:
        """Copy the state that `hold_late` holds before a call of `method`, which may change it."""
        scheduler = self._job.checkpoints.scheduler
        if scheduler is not None and self._calls.current.number == 0:
            if method == "train_on_batch":
                scheduler.drop()
            else:
                scheduler.settle()

    def _finished(self, resumption: Resumption) -> FinishedCall:
        """Return the result of the call in progress, and raise an error if it is another call."""
        finished, methods = resumption.journal.finished(self._calls.outermost - 1), self._calls.methods
        others = (f"{name} {n}" for name, n in finished.methods.items() if methods.get(name) != n)
        self._refuse_another(next(others, ""))
        self._refuse_another_key(finished.key)
        return finished

    def _move_past(self, finished: FinishedCall) -> None:
        """Set all values that calls change to their values at the end of the call in progress."""
        self._again = finished.error
        if finished.states is not None:
            set_random_states(finished.states, self._calls.current.held_by_inputs)
        self._calls.move_to(finished.methods, finished.taken)

    def _follow(self, contents: Contents, *, joined: bool = False) -> None:
        """Resume from the members' state, regardless of where checkpoints were requested.

        Raises:
            DisagreementError: this host cannot compute the same bits as the members' hosts.
        """
        compare_with_member(self._job, contents.manifest["host"])
        training = unpack(contents.manifest["training"], contents.arrays)
        self._resumption = Resumption.of(contents, training, joined=joined)
        self._note_beginning(training)

    def _note_beginning(self, training: Mapping[str, Any]) -> None:
        kept = ("growths", "sources", "traces")
        self.begun_with = {name: training[name] for name in kept if name in training}

    def _fail(self, call: NumberedCall, error: BaseException) -> None:
        """Record the error that ends the call in progress: the script may catch it."""
        if self._resumption is None:
            if len(self._journal) < self._calls.outermost:
                kept = None if call.result_of is None else call.result_of(call)
                failure = failure_of(error, call.name)
                self._journal.add(
                    kept,
                    self._calls.methods,
                    self._calls.taken,
                    failure,
                    key=self.turns.key,
                    held=call.held_by_inputs,
                )
        elif self._calls.outermost > len(self._resumption.journal) or isinstance(error, Exception):
            if isinstance(error, LockstepError) and error is not self._again:
                self._refusal = error
            elif error is not self._again:
                self._refusal = CheckpointError(self._not_reached(call, f"it has ended with {error!r}"))

    def _not_reached(self, call: NumberedCall, how: str) -> str:
        assert self._resumption is not None
        return (
            f"training resumes after step {self._resumption.steps} of {call.name}, but in this script "
            f"{how}: the script or its data differs from when the checkpoint was saved; "
            "undo the change, or start over in another folder"
        )

    def _refuse_another(self, call: str) -> None:
        """Raise an error if the call in progress is known to differ from `call`."""
        name = self._calls.current.name
        if call and call != name:
            raise CheckpointError(
                f"call {self._calls.outermost} of this script is {name}, but was {call} when the checkpoint "
                "was saved: undo the change, or start over in another folder"
            )

    def _refuse_another_key(self, key: str) -> None:
        """Raise an error if another thread had the turn of the call in progress."""
        if key != self.turns.key:
            raise CheckpointError(
                f"call {self._calls.outermost} of this script is {self.turns.key or 'of the main thread'}, "
                f"but was {key or 'of the main thread'} before: make all calls that may be at the same time "
                "in threads, and give models the same order in each run"
            )

    def _has_recorded_keys(self) -> bool:
        resumption = self._resumption
        return resumption is not None and (resumption.journal.has_keys or bool(resumption.key))

    def _next_key(self, waiting: Callable[[], list[str]]) -> str:
        """Return the key of the next call among threads: the recorded one, or as the chief decides."""
        if self._resumption is None and self._job.joins:
            self._follow(self._job.membership.position())
        resumption = self._resumption
        if resumption is not None:
            if self._calls.outermost < len(resumption.journal):
                return resumption.journal.key(self._calls.outermost)
            if resumption.steps:
                return resumption.key
        if len(self._job.view.workers) == 1:
            return waiting()[0]

        def receive(_: View, communicator: Communicator) -> str:
            blob = msgspec.msgpack.encode(waiting())
            blobs = gather(self._job.worker, communicator, MADE_BY_THREADS, {}, blob)
            return agreed_key([msgspec.msgpack.decode(keys, type=list[str]) for keys in blobs])

        return self._job.exchange(receive)

    def _note_threads(self) -> None:
        if self._job.is_chief and not self.catches_up and self._job.view.replicas > 1:
            note("several threads of the script make calls: they take turns, in one order on all workers")


def _origin(since: int | None) -> str:
    if since is None:
        return "--checkpoint"
    return f"a lockstep.callbacks.Checkpoint in call {since + 1} of the script"
