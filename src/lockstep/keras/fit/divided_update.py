"""The update of a step, divided among the workers of each host: each updates the blocks of its shards.

    all       gather    who can divide the update, and who has the slots in shared memory; after it, nobody
                        reads them for the last step
    each      its shards: `lockstep.collectives.shared.divided_state`
    all       gather    who has updated its shards; if all have, the step is committed
    each      uses the new weights: those in the shared memory, or a copy

Each host has all slots, and a worker updates an equal share of all shards, in the order of the workers of its
host. So any host may be lost.

Between two updates, the optimizer's variables show the shared memory. On PyTorch, they always show it; before
it is filled for other variables, they get copies of their values. On JAX, they show it at the end of an
epoch; before an update, the parts that are still in use are copied.

Until the step is committed, the total stays in the memory of the exchange and the old weights stay as they
are. So when a worker is lost, the others update the blocks that are not counted. A worker that survives
may still write a block of a shard that another worker of its host gets in the next view. So in each view, a
worker begins only after a complete call, for which all workers of its host have left the earlier views. In a
view in which it has not begun, it answers that it has not updated its shards, and another round follows. A
host that is one call behind gets the answers, and all hosts decide the same.

The workers may have values of their own for the slots, because they were just assigned, restored or
initialized. Then the step begins by writing them to the shared memory: each worker writes those of its
shards. If some workers share the slots and others have values of their own, such as a worker that has copied
or received them, both must be equal, even if the workers that shared them on a host are now lost. On a host
where no worker shared them, the workers write them. So two things are compared that the update would make
equal: the slots here, and every `CHECK_EVERY` steps the facts about the state and the settings before the
update.

A worker that joins on a host whose members gave it the memory itself, not values, has the slots there. The
counters show the number of their updates.
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
from lockstep.keras.worker_exchange import Facts, describe_difference, gather, state_facts
from lockstep.system.notes import note
from lockstep.topology import View, place
from lockstep.worker.job import Job

_TOP = 2
"""The calls in progress within a `fit` of the script itself: the script, and the `fit`."""


class _Standing(msgspec.Struct, frozen=True, array_like=True):
    """A worker's situation before an update.

    Attributes:
        worker: its id.
        host: the first worker of its host.
        hindrance: why it cannot divide the update; empty if it can.
        facts: facts that must be equal if all workers can divide it.
        shares: whether its slots are in the shared memory of its host.
        number: if so, the number of updates that they have had there.
        layout: describes the division.
    """

    worker: int
    host: int
    hindrance: str
    facts: Facts
    shares: bool
    number: int
    layout: str


class _OwnSlots(msgspec.Struct, frozen=True, array_like=True):
    """A worker's own slots, before slots are shared that not all workers share.

    Attributes:
        worker: its id.
        facts: facts about its slots; empty if it does not compare them.
        differing: a slot for which the lost workers of its host shared a different value; empty if there is
            none.
        failed: why its host has too little memory; empty if it has enough.
    """

    worker: int
    facts: dict[str, str]
    differing: str
    failed: str


class DividedUpdate:
    """The divided updates of one worker.

    Args:
        job: the job whose workers divide the updates.
        pool: the memory for slots and new weights, which all workers of the host share.
    """

    def __init__(self, job: Job, pool: SharedPool) -> None:
        self._job = job
        self._pool = pool
        self._state: DividedState | None = None
        self._number = 0
        self._begun: View | None = None
        self._noted: set[str] = set()
        self._release: Callable[[], None] = lambda: None

    @staticmethod
    @lru_cache(1)
    def of(job: Job) -> "DividedUpdate | None":
        """Return the instance for a job, or None if its workers do not divide updates."""
        pool = job.context.state_pool
        return None if pool is None else DividedUpdate(job, pool)

    def make(
        self, program: Program, state: Any, totals: Sequence[Total], calls: NumberedCalls, facts: Facts
    ) -> tuple[Any, Any]:
        """Make the update of a step with the other workers, or by itself; return (logs, the new state).

        A `fit` within another call, or a call for one batch, makes its updates by itself: the memory belongs
        to one `fit` from its first step to its last. If one worker cannot divide an update, none does.

        Args:
            program: the program of the step.
            state: the state before the update.
            totals: the totals of the step.
            calls: the calls in progress.
            facts: facts that must be equal on all workers before the update.

        Raises:
            DisagreementError: the workers have different facts, variables or slots.
            SharedMemoryError: there is too little memory for the slots.
        """
        method = calls.current.name.partition(" ")[0]
        if calls.current.at_end:
            hindrance = f"{method} takes one step by itself"
        elif len(calls.stack) > _TOP:
            hindrance = f"{method} runs within another call"
        else:
            update = program.block_update(state, totals, self._job.view.replicas)
            standings = self._meet(update, facts, calls.where())
            hindrance = _hindrance(standings)
            if not (isinstance(update, str) or hindrance):
                return self._together(update, standings, calls.where())
        if self._job.is_chief and hindrance not in self._noted:
            self._noted.add(hindrance)
            note(f"each worker computes the whole update: {hindrance}")
        return program.apply(state, totals)

    def prepare(self, program: Program, state: Any, totals: Sequence[Total]) -> None:
        """Compile what an update needs, while the other workers do not wait for this one.

        The kernel needs much time to free the memory of a large state. If the worker will get the values in
        shared memory, it also frees its own values now.

        Args:
            program: the program of the step.
            state: the state after a step of this worker alone. Later, only its form is needed.
            totals: the totals of that step.
        """
        update = program.block_update(state, totals, self._job.view.replicas)
        if isinstance(update, str):
            return
        update.prepare()
        if not self._job.context.over_hosts and self._layout(update).size <= self._pool.size:
            update.forget_values()

    def _meet(self, update: BlockUpdate | str, facts: Facts, label: str) -> list[_Standing]:
        """Return the situation of all workers before an update."""
        if isinstance(update, str):
            hindrance, shares, layout = update, False, ""
        else:
            hindrance, shares, layout = "", self._shares(update), self._layout(update).text
            if not shares:
                # The next update may write to any part of the memory.
                update.own_values()
            # No worker writes to it before all have made this call.
            self._pool.keep_shown()

        def meet(view: View, communicator: Communicator) -> tuple[View, list[_Standing]]:
            worker, host = self._job.worker, self._host(view)[0]
            own = _Standing(worker, host, hindrance, facts, shares=shares, number=self._number, layout=layout)
            blobs = gather(worker, communicator, label, {}, msgspec.msgpack.encode(own))
            standings = [msgspec.msgpack.decode(blob, type=_Standing) for blob in blobs]
            _compare_standings(standings, label)
            return view, standings

        self._begun, standings = self._job.exchange(meet)
        return standings

    def _layout(self, update: BlockUpdate) -> DividedLayout:
        return DividedLayout(update.groups, update.elements, self._job.view.replicas, update.versions)

    def _shares(self, update: BlockUpdate) -> bool:
        """Whether the slots of the update are in the shared memory."""
        layout = self._layout(update)
        if self._state is None and layout.size <= self._pool.size:
            # A worker that has just joined may have loaded them there.
            state = self._mapped(layout)
            if update.adopt(state, state.updates, self._pool):
                self._state, self._number = state, state.updates
        return self._state is not None and self._state.layout == layout and update.has(self._state)

    def _together(self, update: BlockUpdate, standings: Sequence[_Standing], label: str) -> tuple[Any, Any]:
        layout = self._layout(update)
        # On hosts that complete the call later, the view may have fewer workers.
        hosts = {each.worker: each.host for each in standings}
        numbers = {each.host: each.number for each in standings if each.shares}
        sharing = {each.worker for each in standings if each.shares}
        number = numbers.get(hosts[self._job.worker])
        if number is None:
            # The slots of another optimizer may still be there.
            self._release()
        if not all(each.shares for each in standings):
            self._compare_slots(update, layout, sharing, label, is_filled=number is not None)
        if self._job.worker not in sharing:
            self._state = self._mapped(layout)
        if numbers.keys() != set(hosts.values()):
            fills = number is None
            self._for_each_shard(lambda shard: self._fill(update, shard) if fills else None, label)
        state = self._state
        assert state is not None

        def compute(block: int, slots: Sequence[Array]) -> Sequence[Array]:
            group, start, _ = layout.places[block]
            return update.compute(group, start // layout.elements, slots)

        self._for_each_shard(lambda shard: state.update(number or 0, shard, compute), label)
        self._number = (number or 0) + 1
        # If it ends with an error, some variables may show the memory.
        self._release = update.release
        return update.finish(state, self._number, self._pool)

    def _host(self, view: View) -> tuple[int, ...]:
        """Return the workers of this worker's host."""
        return next(host for host in view.hosts if self._job.worker in host)

    def _for_each_shard(self, act: Callable[[int], object], label: str) -> None:
        """Call `act` for each shard on one worker of each host; return when all are done.

        If workers are lost, it is called again for their shards, and perhaps for others.
        """

        def attempt(view: View, communicator: Communicator) -> tuple[View, bool]:
            begins = view is self._begun
            if begins:
                for shard in place(view.replicas, self._host(view)).replicas_of(self._job.worker):
                    act(shard)
            answers = gather(self._job.worker, communicator, label, {}, bytes([begins]))
            return view, all(answer == b"\1" for answer in answers)

        done = False
        while not done:
            self._begun, done = self._job.exchange(attempt)

    def _compare_slots(
        self, update: BlockUpdate, layout: DividedLayout, sharing: set[int], label: str, *, is_filled: bool
    ) -> None:
        """Check that all slots are equal, and make room for them on hosts where no worker shared them.

        Args:
            update: the update, which has the slots of this worker.
            layout: the layout of the division.
            sharing: the workers that shared the slots before the update; some may be lost.
            label: names the call.
            is_filled: whether some of them are on this host.
        """

        def compare(view: View, communicator: Communicator) -> None:
            worker, host = self._job.worker, self._host(view)
            sharing_here = [each for each in host if each in sharing]
            failed = differing = ""
            if not is_filled and worker == host[0]:
                try:
                    self._pool.grow(layout.size)
                except SharedMemoryError as error:
                    failed = str(error)
            if is_filled and not sharing_here:
                # The values that the lost workers have left count.
                shared = self._mapped(layout)
                differing = next((slot.name for slot in update.own_slots() if not slot.is_in(shared)), "")
            # On each host, one of the workers that share them is enough.
            compares = worker not in sharing or worker == sharing_here[0]
            own = _OwnSlots(worker, slot_facts() if compares else {}, differing, failed)
            blobs = gather(worker, communicator, label, {}, msgspec.msgpack.encode(own))
            _compare_slots([msgspec.msgpack.decode(blob, type=_OwnSlots) for blob in blobs], sharing, label)

        @cache
        def slot_facts() -> dict[str, str]:
            return state_facts(lambda array: array, {slot.name: slot.array for slot in update.own_slots()})

        self._job.exchange(compare)

    def _fill(self, update: BlockUpdate, shard: int) -> None:
        """Write the slots of a shard to the shared memory of this host."""
        assert self._state is not None
        for block in self._state.layout.shards[shard]:
            update.fill(self._state, block)
        self._state.reset(shard)

    def _mapped(self, layout: DividedLayout) -> DividedState:
        return DividedState(layout, np.frombuffer(self._pool.map(layout.size), np.uint8))


def _hindrance(standings: Sequence[_Standing]) -> str:
    """Return why the workers do not divide an update, naming the worker if others can; empty if all can."""
    hindered = [standing for standing in standings if standing.hindrance]
    if not hindered:
        return ""
    first = hindered[0]
    where = f"on worker {first.worker}, " if len(hindered) < len(standings) else ""
    return f"{where}{first.hindrance}"


def _compare_standings(standings: Sequence[_Standing], label: str) -> None:
    """Compare the facts that must be equal if the workers divide an update."""
    if _hindrance(standings):
        return
    workers, facts = [each.worker for each in standings], [each.facts for each in standings]
    if difference := describe_difference(workers, facts):
        others = tuple(each.worker for each in standings if each.facts != facts[0])
        raise DisagreementError(f"{label}: {difference}", others)
    first = standings[0]
    differing = [standing for standing in standings if standing.layout != first.layout]
    if differing:
        raise DisagreementError(
            f"{label}: the optimizers of the workers have different variables or settings: the update of "
            f"worker {first.worker} has {first.layout}, that of worker {differing[0].worker} "
            f"{differing[0].layout}",
            tuple(standing.worker for standing in differing),
        )


def _compare_slots(slots: Sequence[_OwnSlots], sharing: set[int], label: str) -> None:
    for each in slots:
        if each.failed:
            raise SharedMemoryError(each.failed)
    compared = [each for each in slots if each.facts]
    # The shared values count.
    compared.sort(key=lambda each: each.worker not in sharing)
    differing = [each for each in slots if each.differing] or [
        each for each in compared if each.facts != compared[0].facts
    ]
    if differing:
        workers = tuple(each.worker for each in differing)
        text = describe_difference([each.worker for each in compared], [each.facts for each in compared])
        if sharing:
            facts, shared = differing[0].facts, compared[0].facts
            name = differing[0].differing or next(n for n in facts if facts[n] != shared.get(n))
            text = (
                f"worker {workers[0]} has a different value of {name.removeprefix('variable ')} from the "
                "workers that share it: look for code that sets variables of the optimizer on some workers "
                "only"
            )
        raise DisagreementError(f"{label}: {text}", workers)
