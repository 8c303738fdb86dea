"""A step of Keras's loops: replicas compute, a synchronization makes totals, and every worker applies them.

It is the same for every backend, whose program computes and applies. With one replica, Keras's own train
function takes the step; if checkpoints are saved, a wrapper counts its steps.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from typing import Any

import keras
import msgspec
import xxhash

from lockstep.collectives.contract import Communicator
from lockstep.data.batch import GlobalBatch, PendingBatch, Share
from lockstep.errors import CheckpointError, LockstepError
from lockstep.keras.backends.common import refuse_misfit
from lockstep.keras.backends.contract import Backend, Partial, Program, StepKind, Total, TrainFunctionCall
from lockstep.keras.backends.growth import growths_of
from lockstep.keras.fit.outputs import OutputTrials, ReplicaOutputs, joined, leaves_by_path
from lockstep.keras.input.readings import whole_batch
from lockstep.keras.nests import repeated, structure_of
from lockstep.keras.numbered_calls import NumberedCall, NumberedCalls
from lockstep.keras.python_replicas import PythonOfReplicas, python_facts
from lockstep.keras.seeds import seed_at
from lockstep.keras.state.resumable_calls import CallFinishedElsewhere
from lockstep.keras.state.snapshots import Snapshots
from lockstep.keras.step_digests import RecordedStep, recorder_of, variable_names
from lockstep.keras.synchronization import (
    AllReduce,
    PartialLayout,
    Round,
    Synchronization,
)
from lockstep.keras.verification import VerifiedReduce, verifications_of
from lockstep.keras.worker_exchange import (
    CHECK_EVERY,
    agree,
    chiefs_state,
    gather,
    pack,
    state_facts,
)
from lockstep.topology import View
from lockstep.worker.job import Job

_ADVICE = (
    "a condition in the step must have the same outcome on all replicas: it may depend on the optimizer's "
    "iterations, on weights and on what a callback has set, but not on a replica's examples or its random "
    "numbers; and a step must leave equal values in Python attributes on all replicas: keep what depends on "
    "the examples in a metric or in a variable of a layer (add_weight), or return it from train_step as a log"
)


_CHECKED_STEPS = 3
"""The steps that a call takes where the job only checks the script."""

_decoder = msgspec.msgpack.Decoder(list[ReplicaOutputs])


@lru_cache
def _names_digest(names: tuple[str, ...]) -> bytes:
    return xxhash.xxh3_64_digest("\0".join(names).encode())


def _repeated(share: Share, count: int) -> Share:
    """Return a share with another number of examples: the same ones, from the beginning again."""
    return share._replace(examples=count, data=lambda: repeated(share.data(), share.examples, count))


class GlobalStep:
    """The steps of one model, of one kind, in one job."""

    def __init__(
        self,
        job: Job,
        backend: Backend,
        model: Any,
        kind: StepKind,
        calls: NumberedCalls,
        snapshots: Snapshots,
        context: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._job = job
        self._backend = backend
        self._context = context
        self._program = backend.program(model, kind)
        self._programs: dict[str, Program] = {}
        self._python = PythonOfReplicas.of_model(model, backend.to_numpy, trains=kind == "train")
        self._describe = variable_names(model)
        self._verifications = verifications_of(job)
        self._synchronization: Synchronization = VerifiedReduce(
            AllReduce(job.exchange, job.worker), job.exchange, job, self._verifications, self._describe
        )
        self._layouts: dict[int, dict[frozenset[str], PartialLayout]] = {}
        self._trials: tuple[NumberedCall, OutputTrials] = (calls.current, OutputTrials())
        self._calls = calls
        self._model = model
        self._kind = kind
        self._snapshots = snapshots
        self._timer = job.timer
        self._digests = recorder_of(job, backend.to_numpy)

    @property
    def program(self) -> Program:
        """What computes a replica's part of a step, and applies the total."""
        return self._program

    def compute_once(self, batch: GlobalBatch) -> tuple[Any, Any, list[Total]]:
        """Take one step from the values of the variables, which does not count.

        Returns:
            The logs or outputs, the state, and the totals of the rounds.
        """
        state, totals = self._program.present(), list[Total]()
        self._verifications.begin(0)
        if self._kind != "predict":
            result, state = self._step(state, batch, totals=totals)
            return result, state, totals
        steps = self._calls.current.steps
        result, state = self._predict(state, batch)
        self._calls.current.steps = steps
        return result, state, totals

    def take(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """Take one step on a batch of Keras's loop; return (logs, state), or (outputs, state) to predict."""
        return self._predict(state, batch) if self._kind == "predict" else self._advance(state, batch)

    def _advance(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """Take one step of a program that trains or tests; return (logs, state)."""
        call = self._calls.current
        if call.steps < call.skipped:
            self._snapshots.resumable.skip(1)
            if call.steps == call.skipped and self._job.joins:
                state = self._join_job(state, self._read(state, batch))
            if call.steps < call.skipped:
                return {}, state
            return self._snapshots.restore(self._model, self._program, state)
        label, number = call.name, call.steps + 1
        if call.at_end:
            # The time between two calls of one step belongs to the script.
            self._timer.stop()
            label, _, count = call.name.partition(" ")
            number = int(count.partition(" ")[0])
        self._timer.begin(label)
        data = self._read(state, batch)
        self._timer.lap("input")
        trains = self._kind == "train"
        record = self._digests.begin(self._calls.taken + trains, call.name, number, trains=trains)
        self._verifications.begin(self._calls.taken + 1 if trains else 0, first=call.steps == 0)
        traced = self._traced
        logs, state = self._step(state, data, record)
        self._digests.after_update(record, self._program, state, self._describe)
        state = self._next_step(logs, state)
        owned = len(self._job.view.replicas_of(self._job.worker))
        trained = self._calls.taken
        self._timer.end(
            number,
            logs,
            trained=trained,
            examples=data.examples,
            replicas=owned,
            compiled=self._traced != traced,
        )
        if self._digests.ends_after(trained):
            sys.exit(0)
        return logs, state

    def _join_job(self, state: Any, batch: GlobalBatch) -> Any:
        """Join the job, after one step that compiles the program while the members do not wait yet.

        Raises:
            CallFinishedElsewhere: the members have finished the call.
        """
        _, state = self._step(state, batch)
        self._backend.settle()
        if self._snapshots.resumable.join():
            # The step has reused the memory of the variables' values.
            with self._program.published(state):
                raise CallFinishedElsewhere
        return state

    def _step(
        self,
        state: Any,
        batch: GlobalBatch,
        record: RecordedStep | None = None,
        totals: list[Total] | None = None,
    ) -> tuple[Any, Any]:
        """Compute and apply the rounds of a step, whose totals `totals` gets; return (logs, state)."""
        totals = [] if totals is None else totals
        if self._program.varies:
            self._python.begin()
        complete = False
        while not complete:
            this = self._round(state, batch, totals, record)
            total = self._synchronization.synchronize(this)
            complete = self._program.is_last(len(totals))
            # The next reduce reuses the total's memory.
            totals.append(total if complete else {name: array.copy() for name, array in total.items()})
            self._timer.lap("exchange")
            if record is not None:
                record.add_round(this, totals[-1])
        self._digests.before_update(record, self._program, state)
        result = self._program.apply(state, totals)
        if self._program.varies and not self._job.joins:
            self._python.end()
        self._timer.lap("update")
        return result

    def _predict(self, state: Any, given: Any) -> tuple[Any, Any]:
        """Take one step of a program that predicts; return (outputs in the order of the rows, state)."""
        self._timer.stop()
        batch = self._read(state, given)
        self._verifications.begin(0)
        self._program.outputs()  # Drops those of a step that failed.
        if self._program.varies:
            self._python.begin()
        shares: dict[int, Share] = {}
        only = self._round(state, batch, (), shares=shares)
        outputs: dict[int, Any] = {}

        def join(view: View, communicator: Communicator) -> Any:
            own = view.replicas_of(self._job.worker)
            layout = only.begin(own)
            outputs.update(self._program.outputs())
            parts = [self._part(state, batch, shares[r], outputs[r]) for r in own if r in only.started]
            if len(view.workers) > 1:
                facts = {"data": batch.check().hex(), "state": ", ".join(layout.names)}
                blob = msgspec.msgpack.encode(parts)
                blobs = gather(self._job.worker, communicator, self._calls.where(), facts, blob)
                parts = [part for blob in blobs for part in _decoder.decode(blob)]
            # All replicas have the same nest; that of the sample serves a worker without examples.
            return keras.tree.pack_sequence_as(next(iter(outputs.values())), joined(parts))

        rows = self._job.exchange(join)
        if only.layout is not None and only.layout.leaves:
            self._digests.settle()
            _, state = self._program.apply(state, [self._synchronization.synchronize(only)])
        if self._program.varies:
            self._python.undo()
        self._calls.current.steps += 1
        return rows, state

    def _part(self, state: Any, batch: GlobalBatch, share: Share, outputs: Any) -> ReplicaOutputs:
        """Return the outputs of a replica, with a trial of them if it is the first of several replicas."""
        leaves = leaves_by_path(outputs, self._backend.to_numpy)
        packed = [pack(name, array) for name, array in leaves]
        replicas = self._job.view.replicas
        if share.examples == batch.examples or any(
            batch.share(r, replicas).examples for r in range(share.replica)
        ):
            return ReplicaOutputs(share.replica, packed)
        call, trials = self._trials
        if call is not self._calls.current:
            call, trials = self._trials = self._calls.current, OutputTrials()

        def shapes(count: int) -> list[tuple[int, ...]]:
            return self._program.shapes(state, _repeated(share, count))

        def computed(count: int) -> list[tuple[str, Any]]:
            self._program.compute(state, _repeated(share, count), ())
            ((_, tried),) = self._program.outputs()
            return leaves_by_path(tried, self._backend.to_numpy)

        return ReplicaOutputs(share.replica, packed, trials.of(leaves, share.examples, shapes, computed))

    def _read(self, state: Any, batch: Any) -> GlobalBatch:
        """Return the global batch for a batch of Keras's loop; all members do this together."""
        if isinstance(batch, PendingBatch):
            return batch.read(partial(self._program.published, state))
        return batch if isinstance(batch, GlobalBatch) else whole_batch(batch)

    def _round(
        self,
        state: Any,
        batch: GlobalBatch,
        earlier: Sequence[Total],
        record: RecordedStep | None = None,
        shares: dict[int, Share] | None = None,
    ) -> Round:
        """Return the round that follows the rounds with the totals `earlier`.

        It puts the shares that this worker computes, with examples that are read, into `shares`.

        Replicas without examples contribute nothing. A worker that has only such replicas also computes
        replica 0 to learn the layout of a partial: in the first step, and where steps vary, in each.
        """
        replicas, seed, number = self._job.view.replicas, self._seed(), len(earlier)
        python, what = self._python, self._calls.where()
        program, layouts = self._program, self._layouts.setdefault(number, {})
        varies = program.varies or self._kind != "train"

        def computed(share: Share) -> Partial:
            read = self._timer.charging("input", share.data) if self._timer.running else share.data
            data = read()
            # A replica that this worker only verifies is recorded by its owner.
            if record is not None and share.replica in self._job.view.replicas_of(self._job.worker):
                record.read(share.replica, data)
            share = share._replace(data=lambda: data)
            if shares is not None:
                shares[share.replica] = share

            def run(rows: int) -> Partial:
                given = data if rows == share.examples else _first_rows(data, rows)
                own = share._replace(data=lambda: given, examples=rows)
                return self._program_for(data).compute(state, own, earlier)

            try:
                with self._context():
                    if not program.varies:
                        return run(share.examples)
                    return python.compute(run, share.replica, share.examples, what, first_round=number == 0)
            except LockstepError:
                raise
            except Exception as error:
                self._explain(error, share, batch.examples, state, earlier)
                raise

        def compute(replica: int) -> Partial | None:
            share = batch.share(replica, replicas, seed)
            return computed(share) if share.examples else None

        def form_of_last() -> str:
            changed = python.form() if self._kind != "predict" and program.is_last(number) else ""
            return f"{changed}; {program.form(number)}" if changed else program.form(number)

        def check(names: Sequence[str]) -> bytes:
            form = form_of_last().encode() if program.varies else b""
            growths = growths_of(self._model).digest(self._kind)
            return xxhash.xxh3_128_digest(batch.check() + growths + _names_digest(names) + form)

        return Round(
            what,
            compute,
            self._backend.to_numpy,
            check=check,
            advice=_ADVICE,
            sample=lambda: computed(batch.share(0, replicas, seed)),
            form=form_of_last if program.varies else None,
            layout=None if varies else next(iter(layouts.values()), None),
            layouts=layouts,
            entered=lambda: self._timer.lap("wait"),
            settle=self._settle,
            catching_up=partial(program.published, state),
            parts=lambda arrays: self._program.parts(number, arrays),
        )

    @property
    def _traced(self) -> int:
        """How many times the backend has traced a replica's computation."""
        return sum(program.traced for program in self._programs.values() or [self._program])

    def _program_for(self, data: Any) -> Program:
        """Return the program for examples like these: what it does may depend on which inputs they have.

        A program that trains has the same inputs in each step, and keeps what it has learned of its updates.
        """
        if self._kind == "train" or self._program.varies:
            return self._program
        structure = structure_of(data)
        if structure not in self._programs:
            first = not self._programs
            self._programs[structure] = (
                self._program if first else self._backend.program(self._model, self._kind)
            )
        self._program = self._programs[structure]
        return self._program

    def _explain(
        self, error: Exception, share: Share, whole: int, state: Any, earlier: Sequence[Total]
    ) -> None:
        """Raise ModelError if a replica has failed because its program expects the rows of the whole batch.

        As many rows as the batch has show it: those of the replica, repeated.
        """
        if share.examples == whole:
            return
        try:
            with self._context():
                self._program.compute(state, _repeated(share, whole), earlier)
        except Exception:
            return
        located = self._program.located(error, state, share, earlier)
        refuse_misfit(self._model, share.examples, whole, located)

    def _seed(self) -> int:
        """Return the seed of the current step, from which replicas derive random numbers."""
        call = self._calls.current
        return seed_at(call.seed, call.number, call.steps)

    def _settle(self) -> None:
        self._backend.settle()
        self._timer.lap("compute")

    def _next_step(self, logs: Any, state: Any) -> Any:
        """Count a step, and do what is due after it; return the state."""
        self._job.note_step()
        call = self._calls.current
        call.steps += 1
        call.logs = logs
        trains = self._kind == "train"
        if self._job.settings.checks and call.steps >= _CHECKED_STEPS:
            setattr(self._model, "stop_training" if trains else "stop_evaluating", True)
        if trains:
            self._calls.taken += 1
        # A call for one batch has one step.
        number = self._calls.taken if call.at_end and trains else call.steps
        if number % CHECK_EVERY == 0 and len(self._job.view.workers) > 1:
            arrays, what = self._program.named_state(state), f"after step {call.steps} of {call.name}"
            if not self._job.settings.allow_unlike:
                facts = state_facts(self._backend.to_numpy, arrays)
                agree(self._job, what, {**facts, **python_facts(self._model)})
            elif (given := chiefs_state(self._job, what, self._backend.to_numpy, arrays)) is not None:
                state = self._program.load(state, given)
        if trains and not call.at_end:
            self._snapshots.end_step(
                lambda whole: self._snapshots.take(whole, self._model, logs, self._program, state)
            )
        return state


def _first_rows(data: Any, rows: int) -> Any:
    return keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[:rows], data)


class TrackedTrainFunction:
    """Wraps Keras's own train function: counts its steps, skips those taken elsewhere, and saves checkpoints.

    A call of the loop counts as `steps_per_execution` steps, even if the data has fewer left.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        backend: Backend,
        model: Any,
        calls: NumberedCalls,
        snapshots: Snapshots,
    ) -> None:
        self._model = model
        self._calls = calls
        self._snapshots = snapshots
        self._held = backend.training_state(model)
        self._call = backend.intercepted(model, function, self._execute)

    def __call__(self, *args: Any) -> Any:
        """Call the train function."""
        return self._call(*args)

    def _execute(self, execution: TrainFunctionCall) -> tuple[Any, Any]:
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
