"""A step of `fit`: replicas compute, a synchronization makes totals, and every worker applies them.

The same for every backend, whose program computes and applies. With one replica Keras's own train function
takes the step, and is watched while checkpoints are kept.
"""

import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import keras
import msgspec
import numpy as np
import xxhash

from lockstep.collectives.contract import Communicator
from lockstep.data.batch import GlobalBatch, Share
from lockstep.errors import CheckpointError
from lockstep.keras.backends.contract import Backend, Kind, Partial, Total, TrainFunctionCall
from lockstep.keras.backends.steps import misfits_explained
from lockstep.keras.consistency import CHECK_EVERY, agree, gather, state_facts
from lockstep.keras.numbered_calls import NumberedCalls
from lockstep.keras.state.resumable_calls import Superseded
from lockstep.keras.state.snapshots import Snapshots
from lockstep.keras.synchronization import (
    AllReduce,
    Packed,
    PartialLayout,
    Round,
    Synchronization,
    pack,
    unpack,
)
from lockstep.observability.step_timer import StepTimer
from lockstep.topology import View
from lockstep.worker.job import Job

Result = TypeVar("Result")

_ADVICE = (
    "compile the model again after changing what is trainable, and let every step change the same variables"
)


class ReplicaStep:
    """The steps of one model, of one kind, in one job."""

    def __init__(
        self,
        job: Job,
        backend: Backend,
        model: Any,
        kind: Kind,
        calls: NumberedCalls,
        snapshots: Snapshots,
        timer: StepTimer,
    ) -> None:
        self._job = job
        self._backend = backend
        self._program = backend.program(model, kind)
        self._synchronization: Synchronization = AllReduce(self._exchange, job.worker)
        self._layouts: dict[int, PartialLayout] = {}
        self._nest: Any = None
        self._calls = calls
        self._model = model
        self._trains = kind == "train"
        self._snapshots = snapshots
        self._timer = timer

    def advance(self, state: Any, batch: GlobalBatch) -> tuple[Any, Any]:
        """Take one step of a program that trains or tests; return (logs, state)."""
        call = self._calls.current
        if call.steps < call.skipped:
            call.steps += 1
            if call.steps == call.skipped and self._job.joins:
                state = self._join_job(state, batch)
            if call.steps < call.skipped:
                return {}, state
            return self._snapshots.restore(self._model, self._program, state)
        self._timer.begin(call.name)
        logs, state = self._step(state, batch)
        self._next_step(logs, state)
        self._timer.end(call.steps, logs)
        return logs, state

    def _join_job(self, state: Any, batch: GlobalBatch) -> Any:
        """Join the others; take a step alone before, so that they need not wait until it is compiled.

        Raises:
            Superseded: they have finished the call already.
        """
        _, state = self._step(state, batch)
        self._backend.settle()
        if self._snapshots.resumable.join():
            # The step has taken the memory of the variables' values.
            with self._program.published(state):
                raise Superseded
        return state

    def _step(self, state: Any, batch: GlobalBatch) -> tuple[Any, Any]:
        totals: list[Total] = []
        complete = False
        while not complete:
            total = self._total(self._round(state, batch, totals), len(totals))
            complete = self._program.is_last(len(totals))
            # The next reduce uses the total's memory again.
            totals.append(total if complete else {name: array.copy() for name, array in total.items()})
            self._timer.lap("exchange")
        result = self._program.apply(state, totals)
        self._timer.lap("update")
        return result

    def predict(self, state: Any, batch: GlobalBatch) -> tuple[Any, Any]:
        """Take one step of a program that predicts; return (outputs in the order of the rows, state)."""
        self._timer.stop()
        self._program.outputs()  # Those of a step that failed halfway.
        only = self._round(state, batch, ())
        outputs: dict[int, Any] = {}

        def join(view: View, communicator: Communicator) -> Any:
            only.begin(view.replicas_of(self._job.worker))
            outputs.update(self._program.outputs())
            if self._nest is None:
                self._nest = next(iter(outputs.values()))
            own = [outputs[r] for r in view.replicas_of(self._job.worker) if r in only.started]
            return self._concatenate(own, batch, view, communicator)

        rows = self._job.exchange(join)
        if only.layout is not None and only.layout.leaves:
            _, state = self._program.apply(state, [self._total(only, 0)])
        self._calls.current.steps += 1
        return rows, state

    def _round(self, state: Any, batch: GlobalBatch, earlier: Sequence[Total]) -> Round:
        """Return the round that follows the totals `earlier` of the rounds before it.

        Replicas without examples contribute nothing. A worker that has no others in the first step computes
        replica 0 as well: that is how it learns what a partial looks like.
        """
        call, replicas = self._calls.current, self._job.view.replicas
        seed = xxhash.xxh3_64_intdigest(struct.pack("<3Q", call.seed, call.number, call.steps))

        def computed(share: Share) -> Partial:
            if self._timer.running:
                share = share._replace(data=self._timer.charging("input", share.data))
            with misfits_explained(self._model, share.examples):
                return self._program.compute(state, share, earlier)

        def compute(replica: int) -> Partial | None:
            share = batch.share(replica, replicas, seed)
            return computed(share) if share.examples else None

        return Round(
            self._calls.where(),
            compute,
            self._backend.concrete,
            check=lambda names: batch.check(),
            advice=_ADVICE,
            sample=lambda: computed(batch.share(0, replicas, seed)),
            layout=self._layouts.get(len(earlier)),
            settle=self._settle,
            catching_up=partial(self._program.published, state),
        )

    def _total(self, this: Round, number: int) -> Total:
        """Return the total of a step's round, valid until the next one."""
        total = self._synchronization.synchronize(this)
        if this.layout is not None:
            self._layouts[number] = this.layout
        return total

    def _settle(self) -> None:
        self._backend.settle()
        self._timer.lap("compute")

    def _exchange(
        self,
        act: Callable[[View, Communicator], Result],
        catching_up: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Result:
        def timed(view: View, communicator: Communicator) -> Result:
            self._timer.lap("wait")  # In the view before, if it ended in this round.
            return act(view, communicator)

        return self._job.exchange(timed, catching_up)

    def _next_step(self, logs: Any, state: Any) -> None:
        self._job.stepped()
        call = self._calls.current
        call.steps += 1
        call.logs = logs
        if self._trains:
            self._calls.taken += 1
        if call.steps % CHECK_EVERY == 0 and len(self._job.view.workers) > 1:
            arrays = self._program.named_state(state)
            agree(
                self._job,
                f"after step {call.steps} of {call.name}",
                state_facts(self._backend.concrete, arrays),
            )
        if self._trains and not call.at_end:
            self._snapshots.end_step(
                lambda whole: self._snapshots.take(whole, self._model, logs, self._program, state)
            )

    def _concatenate(
        self, own: Sequence[Any], batch: GlobalBatch, view: View, communicator: Communicator
    ) -> Any:
        """Join the outputs of all workers, each a nest of arrays, along the rows."""
        parts = [[self._backend.concrete(leaf) for leaf in keras.tree.flatten(nest)] for nest in own]
        if len(view.workers) > 1:
            packed = [[pack("", leaf) for leaf in part] for part in parts]
            facts = {"data": batch.check().hex()}
            blob = msgspec.msgpack.encode(packed)
            blobs = gather(view, communicator, self._calls.where(), facts, blob)
            decoded = [msgspec.msgpack.decode(blob, type=list[list[Packed]]) for blob in blobs]
            parts = [[unpack(leaf)[1] for leaf in part] for worker in decoded for part in worker]
        leaves = [np.concatenate(column) for column in zip(*parts, strict=True)]
        return keras.tree.pack_sequence_as(self._nest, leaves)


class Watched:
    """What Keras's loop calls instead of its own train function, which takes the same steps.

    A call may be passed over, because another process has made it. After it, a checkpoint is kept if it is
    time. A call that the loop makes has `steps_per_execution` steps, also where the data has fewer left.
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
        """Do as the train function that is watched."""
        return self._call(*args)

    def _execute(self, execution: TrainFunctionCall) -> tuple[Any, Any]:
        call, model = self._calls.current, self._model
        steps = 1 if call.at_end else model.steps_per_execution
        if call.steps < call.skipped:
            execution.skip()
            call.steps += steps
            return self._passed_over(execution.state)
        logs, state = execution.run()
        call.steps += steps
        call.logs = logs
        self._calls.taken += steps
        if not call.at_end:
            self._snapshots.end_step(
                lambda whole: self._snapshots.take(whole, model, logs, self._held, state)
            )
        return logs, state

    def _passed_over(self, state: Any) -> tuple[Any, Any]:
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
