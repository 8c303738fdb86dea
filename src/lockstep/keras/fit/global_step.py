"""A step of Keras's loops: replicas compute, rounds make totals, and every worker applies them.

It is the same for every backend, whose program computes and applies. With one replica, Keras's own train
function takes the step; if checkpoints are saved, a wrapper counts its steps.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from typing import Any

import keras
import msgspec
import numpy.typing as npt
import xxhash

from lockstep.collectives.contract import Communicator
from lockstep.data.batch import Batch, LocalBatches, Share
from lockstep.errors import CheckpointError, LockstepError
from lockstep.keras.backends.common import refuse_misfit
from lockstep.keras.backends.contract import Backend, Partial, Program, StepKind, Total, TrainFunctionCall
from lockstep.keras.backends.growth import growths_of, refuse_other_trace
from lockstep.keras.backends.traces import Traces
from lockstep.keras.backends.whole_batch import is_gather, updating
from lockstep.keras.fit.divided_update import DividedUpdate
from lockstep.keras.fit.local_steps import LocalProgram
from lockstep.keras.fit.outputs import OutputTrials, ReplicaOutputs, joined, leaves_by_path
from lockstep.keras.input.readings import read_batch
from lockstep.keras.nests import repeated, structure_of
from lockstep.keras.numbered_calls import NumberedCall, NumberedCalls
from lockstep.keras.python_replicas import PythonOfReplicas, python_facts
from lockstep.keras.rounds import PartialLayout, Round
from lockstep.keras.seeds import seed_at
from lockstep.keras.state.resumable_calls import CallFinishedElsewhere
from lockstep.keras.state.settings import settings_of_parts
from lockstep.keras.state.snapshots import Snapshots
from lockstep.keras.state_verification import StateBefore, StateVerifier
from lockstep.keras.step_digests import RecordedStep, recorder_of, variable_names
from lockstep.keras.verification import StepWithdrawn, Verifier, verifications_of
from lockstep.keras.worker_exchange import (
    CHECK_EVERY,
    Facts,
    chiefs_state,
    gather,
    pack,
    setting_facts,
    state_facts,
)
from lockstep.topology import View
from lockstep.worker.job import Job

_ADVICE = (
    "all replicas must take the same path and leave equal values in Python attributes. A condition may "
    "depend on weights and callbacks, not on examples: keep values that do in a metric or a variable of a "
    "layer (add_weight), or return them from train_step as a log"
)

CHECKED_STEPS = 3
"""The steps that a call takes where the job only checks the script."""

_decoder = msgspec.msgpack.Decoder(list[ReplicaOutputs])


@lru_cache
def _names_digest(names: tuple[str, ...]) -> bytes:
    return xxhash.xxh3_64_digest("\0".join(names).encode())


def _repeated(share: Share, count: int) -> Share:
    """Return a share with another number of examples: the same ones, from the beginning again."""
    return share._replace(examples=count, data=lambda: repeated(share.data(), share.examples, count))


class GlobalStep:
    """The steps of one model, of one kind, in one job.

    Attributes:
        program: computes a replica's part of a step, and applies the total.
        python: the Python attributes that the steps change.
        context: returns the context in which replicas compute.
        layouts: the layouts of the partials, by the number of the round and the names of the arrays.
        gathering: the numbers of the rounds that have ended at a call of `gather`.

    The argument `traces` has the traces of all programs of the step. The argument `follow` tries the model
    again if a step follows other values of Python; see
    `lockstep.keras.fit.introductions.Introductions.follow`.
    """

    def __init__(
        self,
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
        self.job = job
        self.kind = kind
        self.backend = backend
        self.context = context
        self._follow = follow
        self._traces = traces
        # A check compares a step with one process, so it takes no local steps.
        self._local = job.local_steps if kind == "train" and not job.settings.checks else None
        self._make_program(model)
        self.python = PythonOfReplicas.of_model(model, backend.to_numpy, trains=kind == "train")
        self._describe = variable_names(model)
        self._verifications = verifications_of(job)
        self._verifier = Verifier(job.exchange, job, self._verifications, self._describe)
        self._states = StateVerifier(job, backend, self._verifications)
        self._trials: tuple[NumberedCall, OutputTrials] = (calls.current, OutputTrials())
        self.calls = calls
        self.model = model
        self._snapshots = snapshots
        self.timer = job.timer
        self._digests = recorder_of(job, backend.to_numpy)
        self._divided = DividedUpdate.of(job)

    def _make_program(self, model: Any) -> None:
        """Make a program that knows the growths of the model, as of its first step."""
        self._growths = b""
        self.program: Program = self.backend.program(model, self.kind, self._traces.trace)
        if self._local is not None:
            self.program = LocalProgram(self.program, self.backend, model, self._local)
        self._programs: dict[str, Program] = {}
        self.layouts: dict[int, dict[frozenset[str], PartialLayout]] = {}
        self.gathering: set[int] = set()

    def _follow_growths(self) -> None:
        """Make another program if the model was tried again since: the traces have the earlier growths."""
        growths = growths_of(self.model).digest(self.kind)
        if self._growths not in (b"", growths):
            self._make_program(self.model)
        self._growths = growths

    def compute_once(self, batch: Batch) -> tuple[Any, Any, list[Total]]:
        """Take one step from the values of the variables, which does not count.

        Returns:
            The logs or outputs, the state, and the totals of the rounds.
        """
        state, totals = self.program.present(), list[Total]()
        self._verifications.begin(0)
        if self.kind != "predict":
            result, state = self._step(state, batch, totals=totals)
            return result, state, totals
        steps = self.calls.current.steps
        result, state = self._predict(state, batch)
        self.calls.current.steps = steps
        return result, state, totals

    def take(self, state: Any, element: Any) -> tuple[Any, Any]:
        """Take one step on a batch of Keras's loop; return (logs, state), or (outputs, state) to predict."""
        if self.kind == "predict":
            return self._predict(state, element)
        call = self.calls.current
        if call.steps < call.skipped:
            self._snapshots.resumable.skip(1)
            if call.steps == call.skipped and self.job.joins:
                state = self._join_job(state, element)
            if call.steps < call.skipped:
                return {}, state
            logs, state = self._snapshots.restore(self.model, self.program, state)
            if self._verifications.doubt is None:
                return logs, state
            # The others go back before this step, to take it again with this worker.
            call.steps = call.skipped = call.steps - 1
        label, number = call.name, call.steps + 1
        if call.at_end:
            # The time between two calls of one step belongs to the script.
            self.timer.stop()
            label, _, count = call.name.partition(" ")
            number = int(count.partition(" ")[0])
        self.timer.begin(label)
        batch = self._read(state, element)
        self.timer.lap("input")
        self._follow(call, self.model, self.kind, batch, partial(self.program.published, state))
        refuse_other_trace(self.model, self.kind, self._traces.beginning)
        traced = self._traced
        (logs, state), record = self._verified_step(state, batch, call, number)
        self._digests.after_update(record, self.program, state, self._describe)
        state = self._next_step(logs, state)
        owned = len(self.job.view.replicas_of(self.job.worker))
        trained = self.calls.taken
        self.timer.end(
            number,
            logs,
            trained=trained,
            examples=batch.examples,
            replicas=owned,
            compiled=self._traced != traced,
        )
        if self._digests.ends_after(trained):
            sys.exit(0)
        return logs, state

    def _read(self, state: Any, element: Any) -> Batch:
        """Return the batch of an element of Keras's loop; one for a single step is that of an outer step."""
        replicas = self.job.view.replicas
        batch = read_batch(element, replicas, partial(self.program.published, state))
        single = self._local is not None and not isinstance(batch, LocalBatches)
        return LocalBatches([batch], replicas) if single else batch

    def _join_job(self, state: Any, element: Any) -> Any:
        """Join the job, after one step that compiles the program while the members do not wait yet.

        Raises:
            CallFinishedElsewhere: the members have finished the call.
        """
        batch = self._read(state, element)
        refuse_other_trace(self.model, self.kind, self._traces.beginning)
        _, state = self._step(state, batch)
        self.backend.settle()
        if self._snapshots.resumable.join():
            # The step has reused the memory of the variables' values.
            with self.program.published(state):
                raise CallFinishedElsewhere
        return state

    def _verified_step(
        self, state: Any, batch: Batch, call: NumberedCall, number: int
    ) -> tuple[tuple[Any, Any], RecordedStep | None]:
        """Take a step that counts, and verify it if that is due; return ((logs, state), its record).

        If its workers insist on different bits, they take it again with another worker, which decides.
        """
        trains, where = self.kind == "train", self.calls.where()
        while True:
            record = self._digests.begin(self.calls.taken + trains, call.name, number, trains=trains)
            self._verifications.begin(
                self.calls.taken + 1 if trains else number, first=call.steps == 0, trains=trains
            )
            totals = list[Total]()
            before = self._states.begin(self.program, state, where, [self.model])
            self._verifications.can_repeat = before is not None and self._admits_workers
            try:
                logs, state = self._step(state, batch, record, totals, counts=True)
                if before is not None:
                    again = partial(self._apply, totals=totals)
                    logs, state = self._states.end(before, self.program, (logs, state), where, again)
                if self.program.varies and not self.job.joins:
                    self.python.end()
            except StepWithdrawn:
                assert before is not None
                state = self._withdraw(state, before)
            else:
                return (logs, state), record

    @property
    def _admits_workers(self) -> bool:
        """Whether a worker can join before a step, with the state before it."""
        return self._local is None and not self.calls.current.at_end and len(self.calls.stack) == 2

    def _withdraw(self, state: Any, before: StateBefore) -> Any:
        """Go back to the state before a step, which is returned, and let another worker join there."""
        self._digests.settle()
        if self.program.varies:
            self.python.undo()
        state, logs = before.restored(self.program, state), self.calls.current.logs
        self._snapshots.change_workers(
            lambda whole: self._snapshots.take(whole, self.model, logs, self.program, state)
        )
        return state

    def _step(
        self,
        state: Any,
        batch: Batch,
        record: RecordedStep | None = None,
        totals: list[Total] | None = None,
        *,
        counts: bool = False,
    ) -> tuple[Any, Any]:
        """Compute and apply the rounds of a step, whose totals `totals` gets; return (logs, state).

        The workers may divide the update of a step that counts, and the caller makes its changes in Python.
        """
        totals = [] if totals is None else totals
        self._follow_growths()
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
        # What was gathered has served its purpose, and is not the same in each step.
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

    def _predict(self, state: Any, element: Any) -> tuple[Any, Any]:
        """Take one step of a program that predicts; return (outputs in the order of the rows, state)."""
        self.timer.stop()
        batch = read_batch(element, self.job.view.replicas, partial(self.program.published, state))
        self._verifications.begin(0)
        self.program.outputs()  # Drops those of a step that failed.
        if self.program.varies:
            self.python.begin()
        only = StepRound(self, state, batch)
        outputs: dict[int, Any] = {}

        def join(view: View, communicator: Communicator) -> Any:
            owned = view.replicas_of(self.job.worker)
            layout = only.begin(owned)
            outputs.update(self.program.outputs())
            parts = [self._part(state, batch, only.shares[r], outputs[r]) for r in owned if r in only.started]
            if len(view.workers) > 1:
                facts = {"data": batch.check().hex(), "state": ", ".join(layout.names)}
                blob = msgspec.msgpack.encode(parts)
                blobs = gather(self.job.worker, communicator, self.calls.where(), facts, blob)
                parts = [part for blob in blobs for part in _decoder.decode(blob)]
            # All replicas have the same nest; that of the sample serves a worker without examples.
            return keras.tree.pack_sequence_as(next(iter(outputs.values())), joined(parts))

        rows = self.job.exchange(join)
        if only.layout is not None and only.layout.leaves:
            self._digests.settle()
            _, state = self.program.apply(state, [self.job.exchange(only.sum, only.catching_up)])
        if self.program.varies:
            self.python.undo()
        self.calls.current.steps += 1
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
            return self.program.shapes(state, _repeated(share, count))

        def computed(count: int) -> list[tuple[str, Any]]:
            self.program.compute(state, _repeated(share, count), ())
            ((_, tried),) = self.program.outputs()
            return leaves_by_path(tried, self.backend.to_numpy)

        return ReplicaOutputs(share.replica, packed, trials.of(leaves, share.examples, shapes, computed))

    @property
    def _traced(self) -> int:
        """How many times the backend has traced a replica's computation."""
        return sum(program.traced for program in self._programs.values() or [self.program])

    def program_for(self, data: Any) -> Program:
        """Return the program for examples like these: what it does may depend on which inputs they have.

        A program that trains has the same inputs in each step, and keeps what it has learned of its updates.
        """
        if self.kind == "train" or self.program.varies:
            return self.program
        structure = structure_of(data)
        if structure not in self._programs:
            first = not self._programs
            new = self.program if first else self.backend.program(self.model, self.kind, self._traces.trace)
            self._programs[structure] = new
        self.program = self._programs[structure]
        return self.program

    def _next_step(self, logs: Any, state: Any) -> Any:
        """Count a step, and do what is due after it; return the state."""
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


class StepRound(Round):
    """The round of a step that follows the rounds with the totals `earlier`.

    Replicas without examples contribute nothing. A worker that has only such replicas also computes
    replica 0 to learn the layout of a partial: in the first step, and where steps vary, in each.

    Args:
        step: the program's step.
        state: at the beginning of the step.
        batch: the batch of the step.
        earlier: the totals of the earlier rounds.
        record: the record of the step.
        examples: gets those of a replica, by its id, if the step takes another round.

    Attributes:
        shares: the shares that this worker has computed, of a program that predicts.
    """

    advice = _ADVICE

    def __init__(
        self,
        step: GlobalStep,
        state: Any,
        batch: Batch,
        earlier: Sequence[Total] = (),
        record: RecordedStep | None = None,
        examples: dict[int, Any] | None = None,
    ) -> None:
        layouts = step.layouts.setdefault(len(earlier), {})
        varies = step.program.varies or step.kind != "train"
        layout = None if varies else next(iter(layouts.values()), None)
        if layout is not None and layout.joined:
            # Sample weights are gathered only where there are some.
            layout = None
        super().__init__(
            step.calls.where(), step.job.worker, number=len(earlier), layout=layout, layouts=layouts
        )
        call = step.calls.current
        self._seed = seed_at(call.seed, call.number, call.steps)
        self._step = step
        self._state = state
        self._batch = batch
        self._earlier = earlier
        self._record = record
        self._examples = {} if examples is None else examples
        self.shares: dict[int, Share] = {}

    def _share(self, replica: int) -> Share:
        return self._batch.share(replica, self._seed)

    def contributes(self, replica: int) -> bool:
        """Whether the replica has examples."""
        return self._share(replica).examples > 0

    def counts(self, replica: int) -> bool:
        """Whether what the replica sets counts."""
        return self._batch.is_counted(replica)

    def compute(self, replica: int) -> Partial:
        """Compute a replica by the program; the computation may still go on afterwards."""
        step, share = self._step, self._share(replica)
        if (data := self._examples.get(replica)) is None:
            data = (step.timer.charging("input", share.data) if step.timer.running else share.data)()
        share = share._replace(data=lambda: data)
        # A replica that this worker only verifies is recorded by its owner.
        if self._record is not None and replica in step.job.view.replicas_of(self.worker):
            self._record.read(replica, data)
            self._record.rows = self._batch.examples
        if step.kind == "predict":
            self.shares[replica] = share

        def run(rows: int) -> Partial:
            first = share if rows == share.examples else _first_rows(share, rows)
            return step.program.compute(self._state, first, self._earlier)

        try:
            with step.context():
                if step.program.varies:
                    partial = self._compute_in_python(run, share)
                else:
                    partial = step.program_for(data).compute(self._state, share, self._earlier)
        except LockstepError:
            raise
        except Exception as error:
            self._explain(error, share)
            raise
        if step.program.is_last(self.number):
            self._examples.pop(replica, None)
        else:
            self._examples[replica] = data
        return partial

    def _compute_in_python(self, run: Callable[[int], Partial], share: Share) -> Partial:
        # Rounds that gather run only a part of the step.
        program, python, replica = self._step.program, self._step.python, share.replica
        first_round = not updating(self._earlier) and self.number not in self._step.gathering
        program.keep_passes(python.computes_once(replica, first_round=first_round))
        partial = python.compute(run, replica, share.examples, self.label, first_round=first_round)
        if python.has_written:
            # A round without a forward pass would not write it.
            program.keep_passes(False)
        return partial

    def form(self) -> str | None:
        """Return the form of the last computation, if steps of the program vary."""
        step, program = self._step, self._step.program
        if not program.varies:
            return None
        changed = step.python.form() if step.kind != "predict" and program.is_last(self.number) else ""
        return f"{changed}; {program.form(self.number)}" if changed else program.form(self.number)

    def check(self, names: Sequence[str]) -> bytes:
        """Return a hash of the batch, of what trials have measured, of the names, and of the form."""
        form = (self.form() or "").encode()
        growths = growths_of(self._step.model).digest(self._step.kind)
        return xxhash.xxh3_128_digest(self._batch.check() + growths + _names_digest(tuple(names)) + form)

    def to_numpy(self, array: Any) -> npt.NDArray[Any]:
        """Wait for an array of the backend; return it as NumPy sees it."""
        return self._step.backend.to_numpy(array)

    def parts(self, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arrays of a partial or a total by their names in the program."""
        return self._step.program.parts(self.number, arrays)

    def entered(self) -> None:
        """Note that this worker has waited for the view."""
        self._step.timer.lap("wait")

    def settle(self) -> None:
        """Wait for the last update, which reads its totals in place."""
        self._step.backend.settle()
        self._step.timer.lap("compute")

    def catching_up(self) -> AbstractContextManager[None]:
        """Within the block, the variables have the values from before the step."""
        return self._step.program.published(self._state)

    def _explain(self, error: Exception, share: Share) -> None:
        """Raise ModelError if a replica has failed because its program expects the rows of the whole batch.

        As many rows as the batch has show it: those of the replica, repeated.
        """
        step, whole = self._step, self._batch.examples
        if share.examples == whole:
            return
        try:
            with step.context():
                step.program.compute(self._state, _repeated(share, whole), self._earlier)
        except Exception:
            return
        located = step.program.located(error, self._state, share, self._earlier)
        refuse_misfit(step.model, share.examples, whole, located)


def _first_rows(share: Share, rows: int) -> Share:
    """Return a share with fewer examples: the first ones."""

    def data() -> Any:
        return keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[:rows], share.data())

    return share._replace(examples=rows, data=data)


class TrackedTrainFunction:
    """Wraps Keras's own train function: counts its steps, skips those taken elsewhere, and saves checkpoints.

    Nothing else refers to Keras's function, so it ends with this object. If one lived on after `compile`, JAX
    would take the function of the new `compile` for it, because both compile the same method of the model:
    the model would train with its old loss.
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
    """What a train function does beside training.

    A call of the loop counts as `steps_per_execution` steps, even if the data has fewer left.
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
