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
initialized, begins by writing them to the shared memory: each worker those of its shards. If only some have
values of their own, such as one that joins or has copied the slots, these must be what is there, which is
used. So two things are compared that the update would make equal: the slots here, and every `CHECK_EVERY`
steps the facts about the state and the settings before the update.
"""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

import msgspec
import numpy as np

from lockstep.collectives.contract import Communicator
from lockstep.collectives.shared.divided_state import Array, DividedLayout, DividedState
from lockstep.collectives.shared.pool import SharedPool
from lockstep.errors import DisagreementError, SharedMemoryError
from lockstep.keras.backends.contract import BlockUpdate, Program, Total
from lockstep.keras.numbered_calls import NumberedCalls
from lockstep.keras.worker_exchange import Facts, gather, state_facts
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
        self, program: Program, state: Any, totals: Sequence[Total], calls: NumberedCalls, facts: Facts
    ) -> tuple[Any, Any]:
        """Make the update of a step with the other workers, or by itself; return (logs, the new state).

        A `fit` within another call, or a call for one batch, makes its updates by itself: the memory belongs
        to one `fit` from its first step to its last.

        Args:
            program: the program of the step.
            state: before the update.
            totals: of the step.
            calls: the calls in progress.
            facts: must be equal on all workers before the update.

        Raises:
            DisagreementError: the workers have other facts, variables or slots.
            SharedMemoryError: there is too little memory for the slots.
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
            return self._together(update, facts, calls.where())
        if self._job.is_chief and update not in self._noted:
            self._noted.add(update)
            note(f"each worker computes the whole update: {update}")
        return program.apply(state, totals)

    def _together(self, update: BlockUpdate, facts: Facts, label: str) -> tuple[Any, Any]:
        layout = DividedLayout(update.groups, update.elements, self._job.view.replicas)
        shares = self._state is not None and self._state.layout == layout and update.has(self._state)

        @cache
        def own_slot() -> str:
            # In a later view, blocks may already be updated.
            shared = self._mapped(layout)
            return next((slot.name for slot in update.own_slots() if not slot.is_in(shared)), "")

        def act(view: View, communicator: Communicator) -> DividedState:
            standing = _Standing(shares, self._number, layout.text)
            blob = msgspec.msgpack.encode(standing)
            blobs = gather(self._job.worker, communicator, label, facts, blob)
            standings = [msgspec.msgpack.decode(blob, type=_Standing) for blob in blobs]
            _compare_layouts(view, standings, label)
            if not any(standing.shares for standing in standings):
                state = self._filled(update, layout, view, communicator, label)
            else:
                if not all(standing.shares for standing in standings):
                    slot = "" if shares else own_slot()
                    _refuse_own_slots(view, communicator.gather(slot.encode(), what=label), label)
                state = self._shared(layout, shares, standings)

            def compute(block: int, slots: Sequence[Array]) -> Sequence[Array]:
                group, start, _ = layout.places[block]
                return update.compute(group, start // layout.elements, slots)

            for replica in view.replicas_of(self._job.worker):
                state.update(self._number, replica, compute)
            communicator.barrier(what=label)
            return state

        state = self._job.exchange(act)
        self._number += 1
        # If it ends with an error, some variables may show the memory.
        self._release = update.release
        return update.finish(state, lambda: self._pool.map_privately(layout.size))

    def _shared(self, layout: DividedLayout, shares: bool, standings: Sequence[_Standing]) -> DividedState:
        """Return the shared state as it is before the update."""
        if not shares:
            self._state = self._mapped(layout)
        self._number = next(standing.number for standing in standings if standing.shares)
        assert self._state is not None
        return self._state

    def _filled(
        self, update: BlockUpdate, layout: DividedLayout, view: View, communicator: Communicator, label: str
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
        slots = {slot.name: slot.array for slot in update.own_slots()}
        facts = state_facts(lambda array: array, slots)
        for text in gather(self._job.worker, communicator, label, facts, failed.encode()):
            if text:
                raise SharedMemoryError(text.decode())
        state = self._mapped(layout)
        for replica in view.replicas_of(self._job.worker):
            for block in layout.shards[replica]:
                update.fill(state, block)
            state.reset(replica)
        communicator.barrier(what=label)
        self._state, self._number = state, 0
        return state

    def _mapped(self, layout: DividedLayout) -> DividedState:
        return DividedState(layout, np.frombuffer(self._pool.map(layout.size), np.uint8))


def _compare_layouts(view: View, standings: Sequence[_Standing], label: str) -> None:
    first = standings[0].layout
    differing = [pair for pair in zip(view.workers, standings, strict=True) if pair[1].layout != first]
    if differing:
        worker, standing = differing[0]
        raise DisagreementError(
            f"{label}: the optimizers of the workers have other variables or settings: the update of "
            f"worker {view.workers[0]} has {first}, that of worker {worker} {standing.layout}",
            tuple(worker for worker, _ in differing),
        )


def _refuse_own_slots(view: View, names: Sequence[bytes], label: str) -> None:
    """Raise DisagreementError if workers have values of their own, given the name of a slot of each."""
    if slots := {worker: name.decode() for worker, name in zip(view.workers, names, strict=True) if name}:
        worker, name = next(iter(slots.items()))
        raise DisagreementError(
            f"{label}: worker {worker} has another value of {name} than the workers that share it: look for "
            "code that sets variables of the optimizer on some workers only",
            tuple(slots),
        )
