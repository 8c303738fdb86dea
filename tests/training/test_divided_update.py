"""The calls of a divided update, in one process and between threads: who fills, maps and updates what."""

import random
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import pytest

from lockstep.collectives.contract import Communicator
from lockstep.collectives.shared import divided_state
from lockstep.collectives.shared.divided_state import Array, BlockGroup, DividedState, SlotValue
from lockstep.collectives.shared.pool import SharedPool
from lockstep.errors import DisagreementError, PeerLostError, SharedMemoryError
from lockstep.keras.fit.divided_update import DividedUpdate
from lockstep.keras.numbered_calls import NumberedCalls
from lockstep.observability.bus import Bus
from lockstep.protocol.job_spec import JobSettings
from lockstep.system.clock import SystemClock
from lockstep.topology import View, place, place_on_hosts
from lockstep.worker.job import Job, JobContext
from lockstep.worker.peers import Alone, Membership

REPLICAS, BLOCKS, ELEMENTS = 4, 6, 16
PATIENCE = 120.0


class Meeting:
    """The calls of members that are threads."""

    def __init__(self, members: int) -> None:
        self._members = members
        self._barrier = threading.Barrier(members)
        self._blobs: dict[int, bytes] = {}

    def gather(self, rank: int, blob: bytes) -> list[bytes]:
        self._blobs[rank] = blob
        self._barrier.wait(PATIENCE)
        blobs = [self._blobs[other] for other in range(self._members)]
        self._barrier.wait(PATIENCE)
        return blobs


class Member(Communicator):
    """One member's end of a meeting."""

    notice, waited = 0, 0.0

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank

    def gather(self, blob: bytes, *, what: str = "gather") -> list[bytes]:
        return self._meeting.gather(self._rank, blob)

    def barrier(self, *, what: str = "barrier") -> None:
        self._meeting.gather(self._rank, b"")

    def close(self) -> None:
        pass


@dataclass
class Sums:
    """An update that adds a number to its only slot, and subtracts the slot from the weights.

    Attributes:
        loaded: whether it is the first one of a worker that has loaded the values in the shared memory.
    """

    weights: Array
    own: Array
    shared: DividedState | None
    added: int
    filled: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    released: bool = False
    after: Array | None = None
    groups: tuple[BlockGroup, ...] = (BlockGroup(BLOCKS, np.dtype(np.int64), 1),)
    versions: int = 1
    loaded: bool = False
    prepared: bool = False
    forgotten: bool = False
    elements = ELEMENTS

    def has(self, state: DividedState) -> bool:
        return self.shared is state

    def prepare(self) -> None:
        self.prepared = True

    def forget_values(self) -> None:
        self.forgotten = True

    def adopt(self, state: DividedState, updates: int, pool: SharedPool) -> bool:
        if self.loaded:
            self.shared, self.weights = state, state.weights_after(updates)[0]
        return self.loaded

    def own_values(self) -> None:
        self.weights = self.weights.copy()

    def own_slots(self) -> list[SlotValue]:
        return [SlotValue("momentum", 0, 0, 0, self.own if self.shared is None else self.shared.slots[0][0])]

    def fill(self, state: DividedState, block: int) -> None:
        self.filled.append(block)
        _, start, stop = state.layout.places[block]
        divided_state.copy_all([state.slots[0][0][start:stop]], [self.own[start:stop]])

    def compute(self, group: int, number: int, slots: Sequence[Array]) -> Sequence[Array]:
        self.computed.append(number)
        new = slots[0] + self.added
        return [self.weights[number * ELEMENTS :][:ELEMENTS] - new, new]

    def finish(self, state: DividedState, updates: int, pool: Any) -> tuple[Any, Any]:
        self.after = state.weights_after(updates)[0]
        return "logs", state

    def release(self) -> None:
        assert not self.released
        self.released = True


class Trained:
    """A program whose update can be divided, or that says why not."""

    def __init__(self, update: Sums | str) -> None:
        self.update = update
        self.applied = 0

    def block_update(self, state: Any, totals: Any, replicas: int) -> Any:
        return self.update

    def apply(self, state: Any, totals: Any) -> tuple[Any, Any]:
        self.applied += 1
        return "whole", state


@pytest.fixture
def pool() -> Iterator[SharedPool]:
    pool = SharedPool.create()
    yield pool
    pool.close()


def job_of(
    view: View,
    worker: int,
    communicator: Communicator,
    pool: SharedPool,
    membership: Membership | None = None,
) -> Job:
    settings = JobSettings(workers=REPLICAS, replicas=REPLICAS, divided_update=True)
    context = JobContext(worker, Bus(SystemClock(), 0), settings, state_pool=pool)
    return Job(context, (view, communicator), membership)


def in_fit() -> NumberedCalls:
    calls = NumberedCalls()
    calls.stack.append(type(calls.current)("fit 1", 1))
    return calls


def together(
    pool: SharedPool,
    updates: Sequence[Sums | str],
    divided: dict[int, DividedUpdate],
    *facts: dict[str, str],
    logs: str = "logs",
) -> list[Any]:
    """Let members, each in its own thread, make one update; return their errors. `divided` keeps theirs."""
    meeting, view, failed = Meeting(len(updates)), place(REPLICAS, tuple(range(len(updates)))), list[Any]()

    def run(worker: int, update: Sums | str) -> None:
        try:
            job = job_of(view, worker, Member(meeting, worker), pool)
            made = divided.setdefault(worker, DividedUpdate(job, pool))
            made._job = job
            of_worker = facts[worker] if facts else {}
            program: Any = Trained(update)
            of_step, state = made.make(program, None, [], in_fit(), of_worker)
            assert of_step == logs
            if isinstance(update, Sums):
                update.shared = state
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(updates)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return failed


def sums(added: int, shared: DividedState | None = None) -> Sums:
    return Sums(np.arange(BLOCKS * ELEMENTS), np.arange(BLOCKS * ELEMENTS) * 10, shared, added)


def test_workers_fill_once_and_a_joiner_uses_what_is_there(pool: SharedPool) -> None:
    divided: dict[int, DividedUpdate] = {}
    first = [sums(1), sums(1)]
    assert together(pool, first, divided) == []
    assert [update.filled for update in first] == [[0, 1, 2, 3], [4, 5]]
    assert [update.computed for update in first] == [[0, 1, 2, 3], [4, 5]]
    # The third worker has received the values.
    second = [sums(5, first[0].shared), sums(5, first[1].shared), sums(5)]
    second[2].own += 1
    assert together(pool, second, divided) == []
    assert [update.filled for update in second] == [[], [], []]
    assert sorted(block for update in second for block in update.computed) == list(range(BLOCKS))
    for update in second:
        assert update.shared is not None
        np.testing.assert_array_equal(update.shared.slots[0][0], first[0].own + 6)
        np.testing.assert_array_equal(update.after, update.weights - first[0].own - 6)
    # The script has set the slots: all workers have values of their own again.
    third = [sums(2) for _ in range(3)]
    assert together(pool, third, divided) == []
    # Before that, those that may show the memory have their own again.
    assert [update.released for update in (*first, *second, *third)] == [False] * 2 + [True] * 3 + [False] * 3
    assert third[2].shared is not None
    np.testing.assert_array_equal(third[2].shared.slots[0][0], third[0].own + 2)


def test_what_shows_the_shared_slots_does_not_change_with_the_next_update(pool: SharedPool) -> None:
    divided: dict[int, DividedUpdate] = {}
    first = [sums(1), sums(1)]
    assert together(pool, first, divided) == []
    state = first[0].shared
    assert state is not None
    shown = pool.show(state.slots[0][0])
    assert together(pool, [sums(5, update.shared) for update in first], divided) == []
    np.testing.assert_array_equal(state.slots[0][0], first[0].own + 6)
    np.testing.assert_array_equal(shown, first[0].own + 1)


@pytest.mark.parametrize("over_hosts", [False, True])
def test_a_worker_that_joins_forgets_values_if_it_will_find_them_in_shared_memory(
    pool: SharedPool, *, over_hosts: bool
) -> None:
    job = job_of(place(REPLICAS, (0,)), 0, Member(Meeting(1), 0), pool)
    job._context = replace(job.context, over_hosts=over_hosts)
    divided, early, late = DividedUpdate(job, pool), sums(1), sums(1)
    divided.prepare(Trained(early), None, [])  # type: ignore[arg-type]
    assert (early.prepared, early.forgotten) == (True, False)
    assert together(pool, [sums(1)], {}) == []
    divided.prepare(Trained(late), None, [])  # type: ignore[arg-type]
    assert (late.prepared, late.forgotten) == (True, not over_hosts)
    divided.prepare(Trained("the step is not compiled"), None, [])  # type: ignore[arg-type]


def test_one_worker_makes_all_blocks(pool: SharedPool) -> None:
    divided: dict[int, DividedUpdate] = {}
    assert together(pool, [update := sums(3)], divided) == []
    assert update.computed == list(range(BLOCKS))


def test_all_workers_raise_if_there_is_too_little_memory(pool: SharedPool) -> None:
    pool._available = lambda: 0
    job = job_of(place(REPLICAS, (0,)), 0, Member(Meeting(1), 0), pool)
    with pytest.raises(SharedMemoryError, match="needs 2304 bytes more of shared memory"):
        DividedUpdate(job, pool).make(Trained(sums(1)), None, [], in_fit(), {})  # type: ignore[arg-type]


def test_what_cannot_be_divided_is_named_once_and_computed_by_each_worker(
    pool: SharedPool, capfd: pytest.CaptureFixture[str]
) -> None:
    program = Trained("the step is not compiled")
    divided = DividedUpdate.of(job_of(place(REPLICAS, (0,)), 0, Member(Meeting(1), 0), pool))
    assert divided is not None
    for _ in range(2):
        assert divided.make(program, None, [], in_fit(), {}) == ("whole", None)  # type: ignore[arg-type]
    assert capfd.readouterr().err.count("computes the whole update: the step is not compiled") == 1


def test_no_worker_divides_an_update_that_one_cannot_divide(
    pool: SharedPool, capfd: pytest.CaptureFixture[str]
) -> None:
    divided: dict[int, DividedUpdate] = {}
    facts = [{"setting optimizer: beta_1": text} for text in ("0.9", "0.8")]
    for _ in range(2):
        updates = [sums(1), "pagemap is not readable"]
        assert together(pool, updates, divided, *facts, logs="whole") == []
    errors = capfd.readouterr().err
    assert errors.count("each worker computes the whole update: on worker 1, pagemap is not readable") == 1
    assert together(pool, first := [sums(1), sums(1)], divided) == []
    assert [update.filled for update in first] == [[0, 1, 2, 3], [4, 5]]


def test_a_fit_within_another_call_and_a_call_for_one_batch_are_not_divided(
    pool: SharedPool, capfd: pytest.CaptureFixture[str]
) -> None:
    program = Trained(sums(1))
    divided = DividedUpdate(job_of(place(REPLICAS, (0,)), 0, Member(Meeting(1), 0), pool), pool)
    inner, batch = in_fit(), in_fit()
    inner.stack.append(type(inner.current)("fit 1 within fit 1", 2))
    batch.current.at_end = True
    for calls in (inner, batch):
        divided.make(program, None, [], calls, {})  # type: ignore[arg-type]
    assert program.applied == 2
    errors = capfd.readouterr().err
    assert "computes the whole update: fit runs within another call" in errors
    assert "computes the whole update: fit takes one step by itself" in errors


def test_workers_whose_optimizers_differ_are_named(pool: SharedPool) -> None:
    meeting, view, raised = Meeting(2), place(REPLICAS, (0, 1)), list[DisagreementError]()

    def run(worker: int) -> None:
        update = sums(1)
        update.groups = (BlockGroup(BLOCKS, np.dtype(np.int64), 1 + worker),)
        divided = DividedUpdate(job_of(view, worker, Member(meeting, worker), pool), pool)
        try:
            divided.make(Trained(update), None, [], in_fit(), {})  # type: ignore[arg-type]
        except DisagreementError as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(worker,)) for worker in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert [error.workers for error in raised] == [(1,), (1,)]
    assert "step 1 of fit 1: the optimizers of the workers have different variables" in str(raised[0])
    assert "worker 1 6 blocks of int64 with 2 slots, 16 elements each" in str(raised[0])


def test_a_worker_that_alone_has_set_slots_is_named_and_equal_values_are_used(pool: SharedPool) -> None:
    divided: dict[int, DividedUpdate] = {}
    first = [sums(1), sums(1), sums(1)]
    assert together(pool, first, divided) == []
    shared = first[0].shared
    # As after a fork, the second worker has a copy of the values.
    second = [sums(1, shared), sums(1), sums(1, first[2].shared)]
    second[1].own += 1
    assert together(pool, second, divided) == []
    assert [update.filled for update in second] == [[], [], []]
    assert shared is not None
    np.testing.assert_array_equal(shared.slots[0][0], first[0].own + 2)
    third = [sums(1, shared), sums(1), sums(1, first[2].shared)]
    errors = together(pool, third, divided)
    assert [error.workers for error in errors] == [(1,)] * 3
    assert "worker 1 has a different value of momentum from the workers that share it" in str(errors[0])
    assert [update.computed for update in third] == [[], [], []]


def test_workers_that_have_set_slots_differently_are_named_before_one_writes(pool: SharedPool) -> None:
    updates = [sums(1), sums(1)]
    updates[1].own[-1] = 0
    errors = together(pool, updates, {})
    assert [error.workers for error in errors] == [(1,)] * 2
    assert "worker 0 has variable momentum = int64[96]" in str(errors[0])
    assert [update.filled for update in updates] == [[], []]


def test_workers_whose_facts_before_the_update_differ_are_named(pool: SharedPool) -> None:
    facts = [{"setting optimizer: beta_1": text} for text in ("0.9", "0.9", "0.8")]
    errors = together(pool, [sums(1), sums(1), sums(1)], {}, *facts)
    assert [error.workers for error in errors] == [(2,)] * 3
    assert "worker 0 has setting optimizer: beta_1 = 0.9 where worker 2 has 0.8" in str(errors[0])


class Killed(BaseException):
    """A worker is lost here: nothing of its own runs afterwards."""


class Hosts:
    """Workers that are threads, on several hosts, in views that end when one of them is lost.

    As in a job, a call ends on a host for all its workers or for none, and a host that is one call behind
    gets the result when its workers make the call again. A worker that is left writes on until its next call.

    Attributes:
        view: the current view.
        results: of the complete calls.
        dead: the workers that were lost.
    """

    def __init__(self, chance: random.Random, losses: int, *hosts: tuple[int, ...]) -> None:
        self.changed = threading.Condition()
        self.view = place_on_hosts(REPLICAS, hosts)
        self.results: list[list[bytes]] = []
        self.dead = set[int]()
        self._chance, self._losses = chance, losses
        self._host = {worker: host[0] for host in hosts for worker in host}
        self._done = dict.fromkeys(self._host.values(), 0)
        self._arrived: dict[int, bytes] = {}

    def add(self, worker: int, host: int | None) -> None:
        """Let a worker join between two steps, on a host of the view, given its index, or on a new one."""
        hosts = list(self.view.hosts)
        self._host[worker] = worker if host is None else self._host[hosts[host][0]]
        self._done.setdefault(self._host[worker], len(self.results))
        if host is None:
            hosts.append((worker,))
        else:
            hosts[host] += (worker,)
        with self.changed:
            self._begin(hosts)

    def of(self, worker: int) -> int:
        """The number of a worker's host."""
        return self._host[worker]

    def _begin(self, hosts: Sequence[tuple[int, ...]]) -> None:
        self.view = place_on_hosts(REPLICAS, tuple(filter(None, hosts)), self.view.number + 1)
        self._arrived = {}
        self.changed.notify_all()

    def lose(self, worker: int) -> None:
        """Begin a view without a worker."""
        self.dead.add(worker)
        self._begin([tuple(w for w in host if w not in self.dead) for host in self.view.hosts])

    def may_lose(self, worker: int, share: float) -> bool:
        """Perhaps lose a worker; return whether it was."""
        loses = self._losses > 0 and len(self.view.workers) > 1 and self._chance.random() < share
        if loses:
            self._losses -= 1
            self.lose(worker)
        return loses

    def gather(self, worker: int, view: View, blob: bytes) -> list[bytes]:
        with self.changed:
            if worker in self.dead or self.may_lose(worker, 0.05):
                raise Killed
            if view is not self.view:
                raise PeerLostError("the view is over")
            host = self._host[worker]
            number = self._done[host]
            self._arrived[worker] = blob
            if number == len(self.results) and set(self._arrived) == set(view.workers):
                self.results.append([self._arrived[each] for each in view.workers])
                if self.may_lose(other := self._chance.choice(view.workers), 0.2):
                    # It reached some hosts only.
                    ends = [each for each in self._done if self._chance.random() < 0.5]
                    self._done |= dict.fromkeys(set(ends) - {self._host[other]}, number + 1)
                else:
                    self._done |= dict.fromkeys(self._done, number + 1)
                    self._arrived = {}
            elif number < len(self.results) and all(
                each in self._arrived for each in view.workers if self._host[each] == host
            ):
                self._done[host] = number + 1
                self._arrived = {each: b for each, b in self._arrived.items() if self._host[each] != host}
            self.changed.notify_all()
            while self._done[host] == number:
                if worker in self.dead:
                    raise Killed
                if view is not self.view:
                    raise PeerLostError("the view is over")
                assert self.changed.wait(PATIENCE)
            if worker in self.dead:
                raise Killed
            return self.results[number]


class End(Member):
    """One worker's end of a view of hosts."""

    def __init__(self, hosts: Hosts, worker: int) -> None:
        self._hosts, self._worker, self.view = hosts, worker, hosts.view

    def gather(self, blob: bytes, *, what: str = "gather") -> list[bytes]:
        return self._hosts.gather(self._worker, self.view, blob)


class Views(Alone):
    """How a worker gets to the next view of hosts."""

    def __init__(self, hosts: Hosts, worker: int) -> None:
        self._hosts, self._worker = hosts, worker

    def next_view(self, lost: PeerLostError, *, expected: bool = False) -> Any:
        with self._hosts.changed:
            if self._worker in self._hosts.dead:
                raise Killed
            return self._hosts.view, End(self._hosts, self._worker)


class Training:
    """Steps of workers on hosts, and the undivided update of the same numbers."""

    def __init__(self, hosts: Hosts, versions: int = 1) -> None:
        self.hosts = hosts
        self.versions = versions
        self.weights, self.slots = np.arange(BLOCKS * ELEMENTS), np.arange(BLOCKS * ELEMENTS) * 10
        self.updates: dict[int, Sums] = {}
        self._pools: dict[int, SharedPool] = {}
        self._divided: dict[int, DividedUpdate] = {}

    def step(self, added: int, own: Collection[int] = ()) -> None:
        """Take a step on all workers, and check the weights and slots of those that are left.

        Args:
            added: the number that the update adds.
            own: the workers that have copies of the slots.
        """
        assert self.take(added, dict.fromkeys(own, self.slots)) == []
        self.slots = self.slots + added
        self.weights = self.weights - self.slots
        for worker in self.hosts.view.workers:
            shared = self.updates[worker].shared
            assert shared is not None
            np.testing.assert_array_equal(shared.slots[0][0], self.slots)
            np.testing.assert_array_equal(self.updates[worker].after, self.weights)

    def take(self, added: int, own: Mapping[int, Array]) -> list[BaseException]:
        """Take a step on all workers, some of which have their own slots; return their errors."""
        for worker in self.hosts.view.workers:
            before = self.updates.get(worker)
            shared = None if before is None or worker in own else before.shared
            slots, weights = own.get(worker, self.slots), self.weights.copy()
            if self.versions > 1 and before is not None and before.after is not None:
                weights = before.after
            loaded = before is None and worker not in own and self.is_shared_by_chief(own)
            if loaded:
                slots = weights = slots + weights
            self.updates[worker] = Sums(
                weights, slots.copy(), shared, added, versions=self.versions, loaded=loaded
            )
            if (host := self.hosts.of(worker)) not in self._pools:
                self._pools[host] = SharedPool.create()
        failed = list[BaseException]()

        def run(worker: int) -> None:
            update, pool = self.updates[worker], self._pools[self.hosts.of(worker)]
            view, end = Views(self.hosts, worker).next_view(PeerLostError(""))
            job = job_of(view, worker, end, pool, Views(self.hosts, worker))
            divided = self._divided.setdefault(worker, DividedUpdate(job, pool))
            divided._job = job
            program: Any = Trained(update)
            try:
                _, update.shared = divided.make(program, None, [], in_fit(), {})
            except Killed:
                pass
            except BaseException as error:
                failed.append(error)

        threads = [
            threading.Thread(target=run, args=(worker,), name=str(worker))
            for worker in self.hosts.view.workers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        return failed

    def is_shared_by_chief(self, own: Collection[int]) -> bool:
        """Whether the chief has the weights and the slots in memory that a worker that joins maps."""
        chief, is_one_host = self.hosts.view.workers[0], len(self.hosts.view.hosts) == 1
        return self.versions > 1 and is_one_host and chief in self._divided and chief not in own

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


HOSTS = ([(0, 1), (2, 3)], [(0, 1, 2), (3,)], [(0,), (1,), (2, 3)], [(0, 1, 2, 3)], [(0, 1), (2,)])


@pytest.mark.parametrize("seed", range(120))
def test_workers_of_hosts_are_lost_and_join_and_the_state_is_that_of_the_undivided_update(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    members = HOSTS[seed % len(HOSTS)]
    hosts = Hosts(chance, 3, *members)
    training, joined = Training(hosts, 1 + seed % 2), sum(map(len, members))
    lose_while_copying(hosts, monkeypatch)
    for step in range(5):
        if len(hosts.view.workers) < REPLICAS and chance.random() < 0.7:
            hosts.add(joined, chance.choice([None, *range(len(hosts.view.hosts))]))
            joined += 1
        # As after a fork of some processes, or after the script has set slots.
        part = chance.choice([0.2, 1.0])
        own = [worker for worker in hosts.view.workers if chance.random() < part]
        training.step(step + 2, own)
    training.close()


def test_a_block_that_a_lost_worker_has_written_is_repeated_from_the_old_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosts = Hosts(random.Random(0), 0, (0, 1))
    training = Training(hosts, versions=2)
    training.step(1)

    def copy_all(targets: Sequence[Array], sources: Sequence[Array]) -> None:
        for target, source in zip(targets, sources, strict=True):
            target[:] = source
        # The weights and the slot of a block.
        if len(targets) == 2 and threading.current_thread().name == "0":
            with hosts.changed:
                hosts.lose(0)
            raise Killed

    monkeypatch.setattr(divided_state, "copy_all", copy_all)
    # The slots are written again, and the updates are counted from 0.
    training.step(2, own=(0, 1))
    assert hosts.dead == {0}
    training.close()


def lose_while_copying(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    def copy_all(targets: Sequence[Array], sources: Sequence[Array]) -> None:
        worker = int(threading.current_thread().name)
        for target, source in zip(targets, sources, strict=True):
            target[: len(target) // 2] = source[: len(source) // 2]
            with hosts.changed:
                if hosts.may_lose(worker, 0.02):
                    raise Killed
            target[:] = source

    monkeypatch.setattr(divided_state, "copy_all", copy_all)


@pytest.mark.parametrize("seed", range(60))
def test_a_worker_that_has_set_slots_is_named_unless_it_is_lost(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    hosts = Hosts(chance, 0, *HOSTS[seed % len(HOSTS)])
    training = Training(hosts)
    training.step(1)
    hosts._losses, calls = 3, len(hosts.results)
    lose_while_copying(hosts, monkeypatch)
    own = {worker: training.slots.copy() for worker in hosts.view.workers if chance.random() < 0.5}
    setting = chance.choice(hosts.view.workers)
    own[setting] = training.slots + np.arange(BLOCKS * ELEMENTS)
    errors = training.take(2, own)
    training.close()
    # All raise an error, or none if this worker or all that share the slots are lost before the comparison.
    possible = {len(hosts.view.workers)}
    met, compared = ({msgspec.msgpack.decode(b)[0] for b in blobs} for blobs in hosts.results[calls:][:2])
    here = {worker for worker in met if hosts.of(worker) == hosts.of(setting)}
    if setting in hosts.dead or (met - own.keys()).isdisjoint(compared | here):
        possible.add(0)
    assert len(errors) in possible
    assert {type(error) for error in errors} <= {DisagreementError}


@pytest.mark.parametrize("members", [[(0, 1)], [(0, 1), (2,)]])
def test_slots_are_compared_with_those_that_a_lost_worker_has_shared(
    members: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Worker 0 is lost after it has said that it shares the slots, and before they are compared.
    hosts = Hosts(random.Random(0), 0, *members)
    training, compare_slots = Training(hosts), DividedUpdate._compare_slots
    training.step(1)

    def compared(self: DividedUpdate, *args: Any, **kwargs: Any) -> None:
        if threading.current_thread().name == "0":
            with hosts.changed:
                hosts.lose(0)
            raise Killed
        compare_slots(self, *args, **kwargs)

    monkeypatch.setattr(DividedUpdate, "_compare_slots", compared)
    errors: list[Any] = training.take(2, dict.fromkeys(hosts.view.workers[1:], training.slots + 1))
    assert [type(error) for error in errors] == [DisagreementError] * (len(hosts.view.workers))
    assert errors[0].workers == (1,)
    assert "worker 1 has a different value of momentum from the workers that share it" in str(errors[0])
    training.close()


def test_a_worker_that_is_left_ends_its_block_before_another_updates_the_shard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # When worker 0 is lost, the shard that worker 1 is writing belongs to worker 2.
    hosts = Hosts(random.Random(0), 0, (0, 1, 2))
    training, updating, together = Training(hosts), list[tuple[str, int]](), list[bool]()
    update = DividedState.update

    def updated(self: DividedState, number: int, shard: int, compute: Any) -> None:
        name = threading.current_thread().name
        with hosts.changed:
            together.append(any(shard == each for _, each in updating))
            updating.append((name, shard))
            hosts.changed.notify_all()
            if name == "0":
                assert hosts.changed.wait_for(lambda: ("1", 2) in updating, PATIENCE)
                hosts.lose(0)
                updating.remove((name, shard))
                raise Killed
            if (name, shard) == ("1", 2) and not hosts.dead:
                assert hosts.changed.wait_for(
                    lambda: (hosts.dead and 2 in hosts._arrived) or ("2", 2) in updating, PATIENCE
                )
        update(self, number, shard, compute)
        with hosts.changed:
            updating.remove((name, shard))

    monkeypatch.setattr(DividedState, "update", updated)
    training.step(1)
    assert hosts.dead == {0}
    assert not any(together)
    training.close()
