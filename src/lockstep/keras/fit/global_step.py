"""A step of Keras's loops: replicas compute, rounds make totals, and every worker applies them.

It is the same for every backend, whose program computes and applies. A replica's computation in a round is in
`step_round.py`. With one replica, Keras's own train function takes the step; see `one_replica.py`.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import keras
import msgspec

from lockstep.checkpoint.values import packable
from lockstep.collectives.contract import Communicator
from lockstep.data.batch import Batch, LocalBatches, Share
from lockstep.keras.backends.contract import Backend, StepKind, Total
from lockstep.keras.backends.growth import refuse_other_trace
from lockstep.keras.backends.traces import Traces
from lockstep.keras.backends.whole_batch import is_gather
from lockstep.keras.fit.divided_update import DividedUpdate
from lockstep.keras.fit.outputs import OutputTrials, ReplicaOutputs, joined, leaves_by_path
from lockstep.keras.fit.step_round import StepPrograms, StepRound, repeated_share
from lockstep.keras.input.readings import read_batch
from lockstep.keras.numbered_calls import NumberedCall, NumberedCalls
from lockstep.keras.python_replicas import python_facts
from lockstep.keras.round_verification import Verifier
from lockstep.keras.state.resumable_calls import CallFinishedElsewhere
from lockstep.keras.state.settings import settings_of_parts
from lockstep.keras.state.snapshots import Snapshots
from lockstep.keras.state_verification import StateBefore, StateVerifier
from lockstep.keras.step_digests import RecordedStep, recorder_of, variable_names
from lockstep.keras.verification import StepWithdrawn, verifications_of
from lockstep.keras.worker_exchange import (
    CHECK_EVERY,
    Facts,
    chiefs_state,
    gather,
    pack,
    setting_facts,
    state_facts,
)
from lockstep.system.memory import return_freed_memory
from lockstep.topology import View
from lockstep.worker.job import Job

CHECKED_STEPS = 3
"""The steps that a call takes where the job only checks the script."""

_RETURNS = 2
"""The first steps, after which a worker that divides updates returns memory, because later ones need less."""

_decoder = msgspec.msgpack.Decoder(list[ReplicaOutputs])


class GlobalStep(StepPrograms):
    """Takes the steps of one model, of one kind, in one job.

    The argument `follow` tries the model again if a step uses changed Python values; see
    `lockstep.keras.fit.introductions.Introductions.follow`.
    """

    def __init__(
        self,
        *,
        job: Job,
        backend: Backend,
        model: Any,
        kind: StepKind,
        calls: NumberedCalls,
        snapshots: Snapshots,
        context: Callable[[], AbstractContextManager[None]],
        traces: Traces,
        follow: Callable[
            [NumberedCall, Any, StepKind, Batch, Callable[[], AbstractContextManager[None]]], None
        ],
    ) -> None:
        super().__init__(
            job=job, backend=backend, model=model, kind=kind, calls=calls, context=context, traces=traces
        )
        self._follow = follow
        self._describe = variable_names(model)
        self._verifications = verifications_of(job)
        self._verifier = Verifier(job.exchange, job, self._verifications, self._describe)
        self._states = StateVerifier(job, backend, self._verifications)
        self._trials: tuple[NumberedCall, OutputTrials] = (calls.current, OutputTrials())
        self._snapshots = snapshots
        self.timer = job.timer
        self._digests = recorder_of(job, backend.to_numpy)
        self._divided = DividedUpdate.of(job)
        self._returns = 0 if self._divided is None else _RETURNS

    def follow(
        self, batch: Batch, published: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """Before a step, let the model be tried again if the step uses changed Python values.

        Args:
            batch: the batch of the step.
            published: returns a context in which the variables have their values, if they lack them.
        """
        self._follow(self.calls.current, self.model, self.kind, batch, published)

    def compute_once(self, batch: Batch) -> tuple[Any, Any, list[Total]]:
        """Take one step from the values of the variables, without counting it.

        Returns:
            The logs or outputs, the state, and the totals of the rounds.
        """
        state, totals = self.program.present(), list[Total]()
        self._verifications.begin(0)
        if self.kind != "predict":
            result, state = self._step(state, batch, totals=totals)
            return result, state, totals
        result, state = self._predict(state, batch, counts=False)
        return result, state, totals

    def take(self, state: Any, element: Any) -> tuple[Any, Any]:
        """Take one step on a batch of Keras's loop; return (logs, state), or (outputs, state) to predict."""
        call, resumable = self.calls.current, self._snapshots.resumable
        if call.steps < call.skipped:
            resumable.skip(1)
            if call.steps == call.skipped and self.job.joins:
                state = self._join_job(state, element)
            if call.steps < call.skipped:
                return resumable.outputs_of(call.steps) if self.kind == "predict" else {}, state
            logs, state = self._restored(state)
            if self._verifications.doubt is None:
                return logs, state
            # The other workers go back before this step, to repeat it with this worker.
            call.steps = call.skipped = call.steps - 1
        if self.kind == "predict":
            return self._predict(state, element)
        label, number = self._position
        if call.at_end:
            # The time between two calls of one step belongs to the script.
            self.timer.stop()
        self.timer.begin(label)
        batch = self._read(state, element)
        self.timer.lap("input")
        self.follow(batch, partial(self.program.published, state))
        refuse_other_trace(self.model, self.kind, self.traces.beginning)
        traced = self.traced
        (logs, state), record = self._verified_step(state, batch, element, number)
        self._digests.after_update(record, self.program, state, self._describe)
        state = self._next_step(logs, state)
        compiled = self.traced != traced
        # The compiler, or the slots before they were shared, needed much memory, and glibc would keep it.
        if compiled or self._returns:
            return_freed_memory()
        self._returns = max(0, self._returns - 1)
        owned = len(self.job.view.replicas_of(self.job.worker))
        trained = self.calls.taken
        self.timer.end(
            number,
            logs,
            trained=trained,
            examples=batch.examples,
            replicas=owned,
            compiled=compiled,
        )
        if self._digests.ends_after(trained):
            sys.exit(0)
        return logs, state

    @property
    def _position(self) -> tuple[str, int]:
        """The name of the call in progress and the number of its next step.

        Calls for one batch count as the steps of one call.
        """
        call = self.calls.current
        if not call.at_end:
            return call.name, call.steps + 1
        label, _, count = call.name.partition(" ")
        return label, int(count.partition(" ")[0])

    def _read(self, state: Any, element: Any) -> Batch:
        """Return the batch of an element of Keras's loop; one for a single step is that of an outer step."""
        replicas = self.job.view.replicas
        batch = read_batch(element, replicas, partial(self.program.published, state))
        single = self.local is not None and not isinstance(batch, LocalBatches)
        return LocalBatches([batch], replicas) if single else batch

    def _join_job(self, state: Any, element: Any) -> Any:
        """Join the job, after one step that compiles the program while the members do not yet wait.

        Raises:
            CallFinishedElsewhere: the members have finished the call.
        """
        batch = self._read(state, element)
        refuse_other_trace(self.model, self.kind, self.traces.beginning)
        if self.kind == "predict":
            _, state = self._predict(state, batch, counts=False)
        else:
            totals = list[Total]()
            _, state = self._step(state, batch, totals=totals)
            if self._divided is not None and self.kind == "train":
                self._divided.prepare(self.program, state, totals)
        self.backend.settle()
        if state is not None and self.kind == "train":
            self.program.prepare_load(state)
        if self._snapshots.resumable.join():
            # The step has reused the memory of the variables' values.
            with self.program.published(state):
                raise CallFinishedElsewhere
        return state

    def _verified_step(
        self, state: Any, batch: Batch, element: Any, number: int
    ) -> tuple[tuple[Any, Any], RecordedStep | None]:
        """Take a step that counts, and verify it if due; return ((logs, state), its record).

        If its workers repeat different bits, they take it again with another worker, which decides. All of
        them read the batch of `element` again, because they may divide the reading.
        """
        call, trains, where = self.calls.current, self.kind == "train", self.calls.where()
        while True:
            record = self._digests.begin(self.calls.taken + trains, call.name, number, trains=trains)
            self._verifications.begin(
                self.calls.taken + 1 if trains else number, first=call.steps == 0, trains=trains
            )
            totals = list[Total]()
            before = self._states.begin(self.program, state, where, [self.model])
            self._verifications.can_repeat = (before is not None or not trains) and self._admits_workers
            try:
                logs, state = self._step(state, batch, record, totals, counts=True)
                if before is not None:
                    again = partial(self._apply, totals=totals)
                    logs, state = self._states.end(before, self.program, (logs, state), where, again)
                if self.program.varies and not self.job.joins:
                    self.python.end()
            except StepWithdrawn:
                state = self._withdraw(state, before)
                batch = self._read(state, element)
            else:
                self._verifications.doubt = None
                return (logs, state), record

    @property
    def _admits_workers(self) -> bool:
        """Whether a worker can join before a step, with the state before it."""
        if self.kind == "predict":
            call = self.calls.current
            # A worker that joins gets the values of compiled models, and the outputs of earlier steps.
            if call.at_end or not (self.model.compiled and packable(call.outputs[-1:])):
                return False
        # A `fit` of a callback cannot be resumed, nor its validation.
        return len(self.calls.stack) == (2 if self.calls.current.metrics is None else 3)

    def _withdraw(self, state: Any, before: StateBefore | None) -> Any:
        """Go back to the state before a step, return it, and let another worker join there.

        An evaluation applies nothing before it is verified, so `state` is the state before its step.
        """
        self._digests.settle()
        if self.program.varies:
            self.python.undo()
        if before is not None:
            state = before.restored(self.program, state)
        logs, trains = self.calls.resumable.logs, self.kind == "train"
        # An evaluation uses a part of the state, and the other worker needs all of it.
        program = self.program if trains else self.backend.training_state(self.model)
        in_state = trains and not self.calls.current.at_end
        with nullcontext() if in_state else self.program.published(state):
            self._snapshots.change_workers(
                lambda whole: self._snapshots.take(
                    whole, self.model, logs, program, state if trains else None
                )
            )
        return state

    def _restored(self, state: Any) -> tuple[Any, Any]:
        """Return (logs, state) at the position where this process resumes; see `Snapshots.restore`."""
        if self.kind == "train":
            return self._snapshots.restore(self.model, self.program, state)
        logs, _ = self._snapshots.restore(self.model, self.backend.training_state(self.model))
        return logs, self.program.present()

    def _step(
        self,
        state: Any,
        batch: Batch,
        record: RecordedStep | None = None,
        totals: list[Total] | None = None,
        *,
        counts: bool = False,
    ) -> tuple[Any, Any]:
        """Compute and apply the rounds of a step, and store their totals in `totals`; return (logs, state).

        The workers may divide the update of a step that counts. Its changes of Python state are left to the
        caller.
        """
        totals = [] if totals is None else totals
        self.follow_growths()
        self.program.keep_passes(False)
        if self.program.varies:
            self.python.begin()
        complete, examples = False, dict[int, Any]()
        while not complete:
            round_ = StepRound(self, state, batch, list(totals), record, examples)
            total = self._verifier.sum(round_)
            complete = self.program.is_last(len(totals))
            if is_gather(total):
                self.gathering.add(len(totals))
            # The next reduce reuses the total's memory.
            totals.append(total if complete else {name: array.copy() for name, array in total.items()})
            self.timer.lap("exchange")
            if record is not None:
                record.add_round(round_, totals[-1])
        self._digests.before_update(record, self.program, state)
        divides = counts and self.kind == "train" and not self.job.joins
        result = self._apply(state, totals, self._divided if divides else None)
        if self.program.varies and not (self.job.joins or counts):
            self.python.end()
        self.timer.lap("update")
        return result

    def _apply(
        self, state: Any, totals: Sequence[Total], divided: DividedUpdate | None = None
    ) -> tuple[Any, Any]:
        # The gathered values have served their purpose, and differ between steps.
        totals = [{} if is_gather(total) else total for total in totals]
        if divided is not None:
            return divided.make(self.program, state, totals, self.calls, self._facts_before(state))
        return self.program.apply(state, totals)

    def _facts_before(self, state: Any) -> Facts:
        """Return facts that a divided update compares, because it makes different weights equal."""
        if (self.calls.current.steps + 1) % CHECK_EVERY or len(self.job.view.workers) == 1:
            return {}
        facts = state_facts(self.backend.to_numpy, self.program.named_state(state))
        # A compiled step has the settings of its first step.
        settings = settings_of_parts({"optimizer": self.model.optimizer}) if self.program.varies else {}
        return {**facts, **setting_facts(settings)}

    def _predict(self, state: Any, element: Any, *, counts: bool = True) -> tuple[Any, Any]:
        """Take one step of a program that predicts; return (outputs in the order of the rows, state).

        If the step counts, a second worker computes outputs again if that is due. If its workers repeat
        different bits, they take it again; see `_verified_step`.
        """
        call, is_verified = self.calls.current, counts and self._verifications.plan.verification.every
        while True:
            try:
                rows, state = self._predict_once(state, element, self._position[1] if is_verified else 0)
            except StepWithdrawn:
                state = self._withdraw(state, None)
                continue
            self._verifications.doubt = None
            if is_verified and self._admits_workers:
                call.outputs.append(rows)
            call.steps += counts
            return rows, state

    def _predict_once(self, state: Any, element: Any, number: int) -> tuple[Any, Any]:
        """Take a step as `_predict` does; `number` is that of a step to verify, and otherwise 0."""
        self.timer.stop()
        batch = read_batch(element, self.job.view.replicas, partial(self.program.published, state))
        self._verifications.begin(number, trains=False)
        self._verifications.can_repeat = self._admits_workers
        self.program.outputs()  # This drops the shares of a step that failed.
        if self.program.varies:
            self.python.begin()
        only = StepRound(self, state, batch)
        verified = self._verifier.verify(only)

        def join(view: View, communicator: Communicator) -> Any:
            owned = view.replicas_of(self.job.worker)
            layout = only.begin(owned)
            outputs = only.outputs
            parts = [self._part(state, batch, only.shares[r], outputs[r]) for r in owned if r in only.started]
            if len(view.workers) > 1:
                facts = {"data": batch.check().hex(), "state": ", ".join(layout.names)}
                blob = msgspec.msgpack.encode(parts)
                blobs = gather(self.job.worker, communicator, self.calls.where(), facts, blob)
                parts = [part for blob in blobs for part in _decoder.decode(blob)]
            # All replicas have the same nest. A worker without examples uses that of the sample.
            return keras.tree.pack_sequence_as(next(iter(outputs.values())), joined(parts))

        rows = self.job.exchange(join)
        if only.layout is not None and only.layout.leaves:
            self._digests.settle()
            _, state = self.program.apply(state, [self._verifier.sum(only)])
        self._verifications.note(verified)
        self._verifications.begin(0)
        if self.program.varies:
            self.python.undo()
        return rows, state

    def _part(self, state: Any, batch: Batch, share: Share, outputs: Any) -> ReplicaOutputs:
        """Return the outputs of a replica, with a trial of them if it is the first of several replicas."""
        leaves = leaves_by_path(outputs, self.backend.to_numpy)
        packed = [pack(name, array) for name, array in leaves]
        if share.examples == batch.examples or any(batch.share(r).examples for r in range(share.replica)):
            return ReplicaOutputs(share.replica, packed)
        call, trials = self._trials
        if call is not self.calls.current:
            call, trials = self._trials = self.calls.current, OutputTrials()

        def shapes(count: int) -> list[tuple[int, ...]]:
            return self.program.shapes(state, repeated_share(share, count))

        def computed(count: int) -> list[tuple[str, Any]]:
            self.program.compute(state, repeated_share(share, count), ())
            ((_, tried),) = self.program.outputs()
            return leaves_by_path(tried, self.backend.to_numpy)

        return ReplicaOutputs(share.replica, packed, trials.of(leaves, share.examples, shapes, computed))

    def _next_step(self, logs: Any, state: Any) -> Any:
        """Count a step, and do the work that is due after it; return the state."""
        self.job.note_step()
        call = self.calls.current
        call.steps += 1
        call.logs = logs
        trains = self.kind == "train"
        if self.job.settings.checks and call.steps >= CHECKED_STEPS:
            setattr(self.model, "stop_training" if trains else "stop_evaluating", True)
        if trains:
            self.calls.taken += 1
        # A call for one batch has one step.
        number = self.calls.taken if call.at_end and trains else call.steps
        if number % CHECK_EVERY == 0 and len(self.job.view.workers) > 1:
            arrays, label = self.program.named_state(state), f"after step {call.steps} of {call.name}"
            if not self.job.settings.allow_unlike:
                facts = {**state_facts(self.backend.to_numpy, arrays), **python_facts(self.model)}
                self._verifications.agree(label, facts, self.calls.taken, [self.model], whole=trains)
            elif (of_chief := chiefs_state(self.job, label, self.backend.to_numpy, arrays)) is not None:
                state = self.program.load(state, of_chief)
        if trains and not call.at_end:
            self._snapshots.end_step(
                lambda whole: self._snapshots.take(whole, self.model, logs, self.program, state)
            )
        return state
