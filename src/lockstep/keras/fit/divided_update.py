"""The update of a step, divided among the workers of a host: each updates the blocks of its replicas.

    all       gather    who has the slots in shared memory; after it, nobody reads them for the last step
    each      its shards: `lockstep.collectives.shared.divided_state`
    all       barrier   the step is committed: every block is counted
    each      copies the new weights

On PyTorch, the optimizer's variables show the shared memory between two updates. Before it is filled for
other variables, they get copies of their values.

Until the barrier is complete, the total stays in the memory of the exchange and each worker has the old
weights. So when a worker is lost, the members of the next view make the same two calls: those that get its
replicas update the blocks that are not counted.

A step whose workers have values of their own for the slots, because they were just assigned, restored or
initialized, begins by writing them to the shared memory: each worker those of its shards. A worker that
joins has received the state of the others, and uses what is there.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from lockstep.collectives.contract import Communicator
from lockstep.collectives.shared.divided_state import Array, DividedLayout, DividedState
from lockstep.collectives.shared.pool import SharedPool
from lockstep.errors import DisagreementError, SharedMemoryError
from lockstep.keras.backends.contract import BlockUpdate, Program, Total
from lockstep.keras.numbered_calls import NumberedCalls
from lockstep.system.notes import note
from lockstep.topology import View
from lockstep.worker.job import Job

_TOP = 2
"""The calls in progress within a `fit` of the script itself: the script, and the `fit`."""


class _Standing(msgspec.Struct, frozen=True, array_like=True):
    """What a worker has before an update.

    Attributes:
        shares: whether its slots are in the shared memory.
        number: if so, how many updates they have had there.
        layout: describes the division.
    """

    shares: bool
    number: int
    layout: str


class DividedUpdate:
    """The divided updates of one worker.

    Args:
        job: whose workers divide them.
        pool: the memory for slots and new weights, which all workers of the host share.
    """

    def __init__(self, job: Job, pool: SharedPool) -> None:
        self._job = job
        self._pool = pool
        self._state: DividedState | None = None
        self._number = 0
        self._noted: set[str] = set()
        self._release: Callable[[], None] = lambda: None

    @staticmethod
    @lru_cache(1)
    def of(job: Job) -> "DividedUpdate | None":
        """Return the one instance of a job, or None if its workers do not divide updates."""
        pool = job.context.state_pool
        return None if pool is None else DividedUpdate(job, pool)

    def make(
        self, program: Program, state: Any, totals: Sequence[Total], calls: NumberedCalls
    ) -> tuple[Any, Any]:
        """Make the update of a step with the other workers, or by itself; return (logs, the new state).

        A `fit` within another call, or a call for one batch, makes its updates by itself: the memory belongs
        to one `fit` from its first step to its last.
        """
        update: BlockUpdate | str
        method = calls.current.name.partition(" ")[0]
        if calls.current.at_end:
            update = f"{method} takes one step by itself"
        elif len(calls.stack) > _TOP:
            update = f"{method} runs within another call"
        else:
            update = program.block_update(state, totals, self._job.view.replicas)
        if not isinstance(update, str):
            return self._together(update, calls.where())
        if self._job.is_chief and update not in self._noted:
            self._noted.add(update)
            note(f"each worker computes the whole update: {update}")
        return program.apply(state, totals)

    def _together(self, update: BlockUpdate, what: str) -> tuple[Any, Any]:
        layout = DividedLayout(update.groups, update.elements, self._job.view.replicas)

        def act(view: View, communicator: Communicator) -> DividedState:
            state = self._entered(update, layout, view, communicator, what)

            def compute(block: int, slots: Sequence[Array]) -> Sequence[Array]:
                group, start, _ = layout.places[block]
                return update.compute(group, start // layout.elements, slots)

            for replica in view.replicas_of(self._job.worker):
                state.update(self._number, replica, compute)
            communicator.barrier(what=what)
            return state

        state = self._job.exchange(act)
        self._number += 1
        result = update.finish(state, lambda: self._pool.map_privately(layout.size))
        self._release = update.release
        return result

    def _entered(
        self, update: BlockUpdate, layout: DividedLayout, view: View, communicator: Communicator, what: str
    ) -> DividedState:
        """Return the shared state as it is before the update, once nobody reads it any more."""
        shares = self._state is not None and self._state.layout == layout and update.has(self._state)
        standing = _Standing(shares, self._number, layout.text)
        blobs = communicator.gather(msgspec.msgpack.encode(standing), what=what)
        standings = [msgspec.msgpack.decode(blob, type=_Standing) for blob in blobs]
        first = standings[0].layout
        differing = [pair for pair in zip(view.workers, standings, strict=True) if pair[1].layout != first]
        if differing:
            worker, standing = differing[0]
            raise DisagreementError(
                f"{what}: the optimizers of the workers have other variables or settings: the update of "
                f"worker {view.workers[0]} has {first}, that of worker {worker} {standing.layout}",
                tuple(worker for worker, _ in differing),
            )
        sharing = [standing for standing in standings if standing.shares]
        if not sharing:
            return self._filled(update, layout, view, communicator, what)
        if not shares:
            self._state = self._mapped(layout)
        self._number = sharing[0].number
        assert self._state is not None
        return self._state

    def _filled(
        self, update: BlockUpdate, layout: DividedLayout, view: View, communicator: Communicator, what: str
    ) -> DividedState:
        """Write the slots to the shared memory, each worker those of its replicas."""
        # Those of another optimizer may still be there.
        self._release()
        failed = ""
        if view.workers[0] == self._job.worker:
            try:
                self._pool.grow(layout.size)
            except SharedMemoryError as error:
                failed = str(error)
        for text in communicator.gather(failed.encode(), what=what):
            if text:
                raise SharedMemoryError(text.decode())
        state = self._mapped(layout)
        for replica in view.replicas_of(self._job.worker):
            for block in layout.shards[replica]:
                update.fill(state, block)
            state.reset(replica)
        communicator.barrier(what=what)
        self._state, self._number = state, 0
        return state

    def _mapped(self, layout: DividedLayout) -> DividedState:
        return DividedState(layout, np.frombuffer(self._pool.map(layout.size), np.uint8))
