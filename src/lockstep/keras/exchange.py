"""How a step goes: compute the replicas this worker owns, sum over all of them, apply the total.

The same for every backend. The program of a step computes and applies; the communicator sums.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from lockstep.collectives.contract import Leaves, Span
from lockstep.data.batch import GlobalBatch
from lockstep.data.digest import digest_arrays
from lockstep.errors import ModelError
from lockstep.job import Job
from lockstep.keras.agreement import agree, gather
from lockstep.keras.calls import Calls
from lockstep.keras.contract import Backend, Partial, Program, Total

CHECK_EVERY = 100
"""Steps between two comparisons of the workers' states."""

_Packed = list[tuple[str, list[int], bytes]]


@dataclass(frozen=True)
class Layout:
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


class Exchange:
    """The steps of one model, of one kind, in one job."""

    def __init__(self, job: Job, backend: Backend, program: Program, calls: Calls) -> None:
        self._job = job
        self._backend = backend
        self._program = program
        self._owned = job.view.replicas_of(job.worker)
        self._layouts: list[Layout] = []
        self._nest: Any = None
        self._calls = calls
        self._steps = 0

    def advance(self, state: Any, batch: GlobalBatch) -> tuple[Any, Any]:
        """Take one step of a program that trains or tests; return (logs, state)."""
        totals: list[Total] = []
        complete = False
        while not complete:
            started = self._compute(state, batch, totals)
            complete = self._program.complete(len(totals))
            total = self._reduce(batch, started, len(totals))
            # The next reduce uses the total's memory again.
            totals.append(total if complete else {name: array.copy() for name, array in total.items()})
        logs, state = self._program.apply(state, totals)
        self._next_step(state)
        return logs, state

    def predict(self, state: Any, batch: GlobalBatch) -> tuple[Any, Any]:
        """Take one step of a program that predicts; return (outputs in the order of the rows, state)."""
        self._program.outputs()  # Those of a step that failed halfway.
        started = self._compute(state, batch, [])
        outputs = self._program.outputs()
        if self._nest is None:
            self._nest = outputs[0][1]
        rows = self._gather([nest for replica, nest in outputs if replica in started], batch)
        if self._layouts[0].names:
            _, state = self._program.apply(state, [self._reduce(batch, started, 0)])
        self._calls.current.steps += 1
        return rows, state

    def _compute(self, state: Any, batch: GlobalBatch, earlier: Sequence[Total]) -> dict[int, Partial]:
        """Start the computation of the owned replicas that have examples.

        A worker whose replicas have no examples in the first batch computes replica 0 as well, without
        contributing it: that is how it learns what a partial looks like.
        """
        replicas = self._job.view.replicas
        call = self._calls.current
        seed = xxhash.xxh3_64_intdigest(struct.pack("<3Q", self._job.seed, call.number, call.steps))
        shares = [batch.share(replica, replicas, seed) for replica in self._owned]
        compute = self._program.compute
        started = {share.replica: compute(state, share, earlier) for share in shares if share.examples}
        if len(self._layouts) == len(earlier):
            partial = next(iter(started.values()), None)
            if partial is None:
                partial = compute(state, batch.share(0, replicas, seed), earlier)
            names = tuple(sorted(partial))
            zeros = tuple(np.zeros_like(self._backend.concrete(partial[name])) for name in names)
            self._layouts.append(Layout(names, zeros))
        return started

    def _reduce(self, batch: GlobalBatch, started: Mapping[int, Partial], number: int) -> Total:
        """Sum the partials of round `number`; the result is valid until the next reduce."""
        layout = self._layouts[number]
        # The backend is still computing: time to hash what it computes from.
        check = batch.check() if len(self._job.view.workers) > 1 else b""
        partials: dict[Span, Leaves] = {}
        for replica in self._owned:
            partial = started.get(replica)
            partials[Span(replica, replica + 1)] = (
                layout.zeros
                if partial is None
                else layout.leaves({name: self._backend.concrete(value) for name, value in partial.items()})
            )
        self._backend.settle()
        total = self._job.communicator.reduce(partials, check=check, what=self._calls.where())
        return dict(zip(layout.names, total, strict=True))

    def _next_step(self, state: Any) -> None:
        call = self._calls.current
        call.steps += 1
        self._steps += 1
        if self._steps % CHECK_EVERY == 0 and len(self._job.view.workers) > 1:
            arrays = self._program.named_state(state)
            agree(self._job, f"after step {call.steps} of {call.name}", state_facts(self._backend, arrays))

    def _gather(self, own: Sequence[Any], batch: GlobalBatch) -> Any:
        """Join the outputs of all workers, each a nest of arrays, along the rows."""
        parts = [[self._backend.concrete(leaf) for leaf in keras.tree.flatten(nest)] for nest in own]
        if len(self._job.view.workers) > 1:
            packed = [[(str(a.dtype), list(a.shape), a.tobytes()) for a in part] for part in parts]
            facts = {"data": batch.check().hex()}
            blobs = gather(self._job, self._calls.where(), facts, msgspec.msgpack.encode(packed))
            parts = [_unpack(part) for blob in blobs for part in _decode(blob)]
        leaves = [np.concatenate(column) for column in zip(*parts, strict=True)]
        return keras.tree.pack_sequence_as(self._nest, leaves)


def state_facts(backend: Backend, arrays: Mapping[str, Any]) -> dict[str, str]:
    """Describe each variable's shape, dtype and value in a fact of its own."""
    facts = {}
    for name, value in arrays.items():
        array = backend.concrete(value)
        facts[f"variable {name}"] = f"{array.dtype}{list(array.shape)} #{digest_arrays([array]).hex()[:16]}"
    return facts


def _decode(blob: bytes) -> list[_Packed]:
    return msgspec.msgpack.decode(blob, type=list[_Packed])


def _unpack(part: _Packed) -> list[npt.NDArray[Any]]:
    return [np.frombuffer(data, dtype=dtype).reshape(shape) for dtype, shape, data in part]
