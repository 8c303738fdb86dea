"""The calls of a divided update, in one process and between threads: who fills, maps and updates what."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from lockstep.collectives.contract import Communicator
from lockstep.collectives.shared.divided_state import Array, BlockGroup, DividedState, SlotValue
from lockstep.collectives.shared.pool import SharedPool
from lockstep.errors import DisagreementError, SharedMemoryError
from lockstep.keras.fit.divided_update import DividedUpdate
from lockstep.keras.numbered_calls import NumberedCalls
from lockstep.observability.bus import Bus
from lockstep.protocol.job_spec import JobSettings
from lockstep.system.clock import SystemClock
from lockstep.topology import View, place
from lockstep.worker.job import Job, JobContext

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
    """An update that adds a number to its only slot, and subtracts the slot from the weights."""

    weights: Array
    own: Array
    shared: DividedState | None
    added: int
    filled: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    released: bool = False
    groups: tuple[BlockGroup, ...] = (BlockGroup(BLOCKS, np.dtype(np.int64), 1),)
    elements = ELEMENTS

    def has(self, state: DividedState) -> bool:
        return self.shared is state

    def own_slots(self) -> list[SlotValue]:
        return [SlotValue("momentum", 0, 0, 0, self.own)]

    def fill(self, state: DividedState, block: int) -> None:
        self.filled.append(block)
        _, start, stop = state.layout.places[block]
        state.slots[0][0][start:stop] = self.own[start:stop]

    def compute(self, group: int, number: int, slots: Sequence[Array]) -> Sequence[Array]:
        self.computed.append(number)
        new = slots[0] + self.added
        return [self.weights[number * ELEMENTS :][:ELEMENTS] - new, new]

    def finish(self, state: DividedState, private: Any) -> tuple[Any, Any]:
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


def job_of(view: View, worker: int, communicator: Communicator, pool: SharedPool) -> Job:
    settings = JobSettings(workers=REPLICAS, replicas=REPLICAS, divided_update=True)
    context = JobContext(worker, Bus(SystemClock(), 0), settings, state_pool=pool)
    return Job(context, (view, communicator))


def in_fit() -> NumberedCalls:
    calls = NumberedCalls()
    calls.stack.append(type(calls.current)("fit 1", 1))
    return calls


def together(
    pool: SharedPool, updates: Sequence[Sums], divided: dict[int, DividedUpdate], *facts: dict[str, str]
) -> list[Any]:
    """Let members, each in its own thread, make one update; return their errors. `divided` keeps theirs."""
    meeting, view, failed = Meeting(len(updates)), place(REPLICAS, tuple(range(len(updates)))), list[Any]()

    def run(worker: int, update: Sums) -> None:
        try:
            job = job_of(view, worker, Member(meeting, worker), pool)
            made = divided.setdefault(worker, DividedUpdate(job, pool))
            made._job = job
            of_worker = facts[worker] if facts else {}
            program: Any = Trained(update)
            logs, update.shared = made.make(program, None, [], in_fit(), of_worker)
            assert logs == "logs"
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
        np.testing.assert_array_equal(update.shared.weights[0], update.weights - first[0].own - 6)
    # The script has set the slots: all workers have values of their own again.
    third = [sums(2) for _ in range(3)]
    assert together(pool, third, divided) == []
    # Before that, those that may show the memory have their own again.
    assert [update.released for update in (*first, *second, *third)] == [False] * 2 + [True] * 3 + [False] * 3
    assert third[2].shared is not None
    np.testing.assert_array_equal(third[2].shared.slots[0][0], third[0].own + 2)


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
    assert "step 1 of fit 1: the optimizers of the workers have other variables" in str(raised[0])
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
    assert "worker 1 has another value of momentum than the workers that share it" in str(errors[0])
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
