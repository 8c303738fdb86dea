"""How a step goes: compute the replicas this worker owns, sum over all of them, apply the total.

The same for every backend. The program of a step computes and applies; the communicator sums. In a new view,
what was computed for the step is kept, and only replicas that the worker did not own before are added.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import keras
import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from lockstep.collectives.contract import Communicator, Leaves, Span
from lockstep.data.batch import GlobalBatch, Share
from lockstep.errors import ModelError
from lockstep.keras.backends.contract import Backend, Kind, Partial, Total
from lockstep.keras.backends.steps import misfits_explained
from lockstep.keras.call_stack import CallStack
from lockstep.keras.consistency import CHECK_EVERY, agree, gather, state_facts
from lockstep.keras.state.resumable_calls import Superseded
from lockstep.keras.state.snapshots import Snapshots
from lockstep.topology import View
from lockstep.worker.job import Job

_Packed = list[tuple[str, list[int], bytes]]


@dataclass(frozen=True)
class PartialLayout:
    """The names, shapes and dtypes of a program's partials, equal for all replicas and workers."""

    names: tuple[str, ...]
    zeros: tuple[npt.NDArray[Any], ...]

    def leaves(self, partial: Mapping[str, npt.NDArray[Any]]) -> Leaves:
        """Return the arrays of `partial` in the layout's order."""
        if partial.keys() != set(self.names):
            changed = ", ".join(sorted(partial.keys() ^ set(self.names)))
            raise ModelError(
                f"the step has changed what it computes since it began ({changed}): compile the model again "
                "after changing what is trainable, and let every step change the same variables"
            )
        return [partial[name] for name in self.names]


@dataclass(frozen=True)
class Round:
    """One round of a step: what its replicas are computed from, and those that this worker has computed.

    Attributes:
        state: at the beginning of the step.
        batch: of the step.
        earlier: the totals of the rounds before.
        started: the partials of the replicas whose computation has begun.
    """

    state: Any
    batch: GlobalBatch
    earlier: Sequence[Total] = ()
    started: dict[int, Partial] = field(default_factory=dict)


class ReplicaStep:
    """The steps of one model, of one kind, in one job."""

    def __init__(
        self,
        job: Job,
        backend: Backend,
        model: Any,
        kind: Kind,
        calls: CallStack,
        snapshots: Snapshots,
    ) -> None:
        self._job = job
        self._backend = backend
        self._program = backend.program(model, kind)
        self._layouts: list[PartialLayout] = []
        self._nest: Any = None
        self._calls = calls
        self._model = model
        self._trains = kind == "train"
        self._snapshots = snapshots

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
        logs, state = self._step(state, batch)
        self._next_step(logs, state)
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
            total = self._job.exchange(
                partial(self._sum, Round(state, batch, totals)), partial(self._program.published, state)
            )
            complete = self._program.complete(len(totals))
            # The next reduce uses the total's memory again.
            totals.append(total if complete else {name: array.copy() for name, array in total.items()})
        return self._program.apply(state, totals)

    def predict(self, state: Any, batch: GlobalBatch) -> tuple[Any, Any]:
        """Take one step of a program that predicts; return (outputs in the order of the rows, state)."""
        self._program.outputs()  # Those of a step that failed halfway.
        only = Round(state, batch)
        outputs: dict[int, Any] = {}

        def join(view: View, communicator: Communicator) -> Any:
            self._compute(only, view)
            outputs.update(self._program.outputs())
            if self._nest is None:
                self._nest = next(iter(outputs.values()))
            own = [outputs[r] for r in view.replicas_of(self._job.worker) if r in only.started]
            return self._concatenate(own, batch, view, communicator)

        rows = self._job.exchange(join)
        if self._layouts[0].names:
            total = self._job.exchange(partial(self._sum, only))
            _, state = self._program.apply(state, [total])
        self._calls.current.steps += 1
        return rows, state

    def _compute(self, this: Round, view: View) -> None:
        """Start the computation of the replicas owned in `view` that have examples and have not begun.

        A worker whose replicas have no examples in the first batch computes replica 0 as well, without
        contributing it: that is how it learns what a partial looks like.
        """
        call = self._calls.current
        seed = xxhash.xxh3_64_intdigest(struct.pack("<3Q", call.seed, call.number, call.steps))
        for replica in view.replicas_of(self._job.worker):
            share = this.batch.share(replica, view.replicas, seed)
            if share.examples and replica not in this.started:
                this.started[replica] = self._computed(this, share)
        if len(self._layouts) == len(this.earlier):
            computed = next(iter(this.started.values()), None)
            if computed is None:
                share = this.batch.share(0, view.replicas, seed)
                computed = self._computed(this, share)
            names = tuple(sorted(computed))
            zeros = tuple(np.zeros_like(self._backend.concrete(computed[name])) for name in names)
            self._layouts.append(PartialLayout(names, zeros))

    def _computed(self, this: Round, share: Share) -> Partial:
        with misfits_explained(self._model, share.examples):
            return self._program.compute(this.state, share, this.earlier)

    def _sum(self, this: Round, view: View, communicator: Communicator) -> Total:
        """Compute and sum a round; the total is valid until the next reduce."""
        self._compute(this, view)
        layout = self._layouts[len(this.earlier)]
        # The backend is still computing: time to hash what it computes from.
        check = this.batch.check() if len(view.workers) > 1 else b""
        partials: dict[Span, Leaves] = {}
        for replica in view.replicas_of(self._job.worker):
            computed = this.started.get(replica)
            partials[Span(replica, replica + 1)] = (
                layout.zeros
                if computed is None
                else layout.leaves({name: self._backend.concrete(value) for name, value in computed.items()})
            )
        self._backend.settle()
        total = communicator.reduce(partials, check=check, what=self._calls.where())
        return dict(zip(layout.names, total, strict=True))

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
            packed = [[(str(a.dtype), list(a.shape), a.tobytes()) for a in part] for part in parts]
            facts = {"data": batch.check().hex()}
            blob = msgspec.msgpack.encode(packed)
            blobs = gather(view, communicator, self._calls.where(), facts, blob)
            parts = [_unpack(part) for blob in blobs for part in _decode(blob)]
        leaves = [np.concatenate(column) for column in zip(*parts, strict=True)]
        return keras.tree.pack_sequence_as(self._nest, leaves)


def _decode(blob: bytes) -> list[_Packed]:
    return msgspec.msgpack.decode(blob, type=list[_Packed])


def _unpack(part: _Packed) -> list[npt.NDArray[Any]]:
    return [np.frombuffer(data, dtype=dtype).reshape(shape) for dtype, shape, data in part]
