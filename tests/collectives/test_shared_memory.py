"""Members in different processes: death, signals, limits, and the memory that they share."""

import mmap
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from collective_members import Control, Processes, Settings, plan_of
from collective_scripts import (
    Reduce,
    call,
    expected,
    large_then_small,
    limited_file_size,
    partials_of,
)
from reference_sums import sha
from test_communicator import CALLS, quick_reports, values

from lockstep.collectives.call import REASON_LIMIT, CollectiveCall
from lockstep.collectives.contract import PeerWait, WaitPolicy
from lockstep.collectives.shared import communicator as communicator_module
from lockstep.collectives.shared import control_segment, futex, pool
from lockstep.collectives.shared.barrier import Barrier
from lockstep.collectives.shared.buffers import Buffers
from lockstep.collectives.shared.communicator import SharedCommunicator
from lockstep.collectives.shared.control_segment import ControlSegment, decode, encode
from lockstep.collectives.shared.pool import SharedPool
from lockstep.collectives.shared.slice_reduce import SliceReduce
from lockstep.errors import InternalError, PeerLostError, PeerStuckError, SharedMemoryError
from lockstep.system.clock import SystemClock
from lockstep.system.memory import available_memory, cgroup_rooms

SMALL = Reduce(1, ((100,),), ("float32",))
BIG = Reduce(2, ((1_000_000,),), ("float32",))

FORKS = """
import os

import numpy as np

from lockstep.collectives.shared.pool import SharedPool

pool = SharedPool.create()
pool.grow(10_000)
memory = np.frombuffer(pool.map(10_000), np.uint8)
shown = pool.show(memory)
readable, writable = os.pipe()
if not (child := os.fork()):
    os.read(readable, 1)
    os._exit(int(shown.sum() > 0))
memory[:] = 1
os.write(writable, b"x")
assert os.waitpid(child, 0)[1] == 0
"""
"""Forks while an array shows the memory, and changes it."""


@pytest.mark.parametrize(("kind", "options"), CALLS)
def test_members_raise_when_one_is_killed(
    processes: Processes, kind: str, options: dict[str, object]
) -> None:
    """The member dies while the others wait for it; a process that is not a member aborts the view."""
    waiting = set()

    def listen(control: Control, rank: int, _: PeerWait) -> None:
        waiting.add(rank)
        if waiting == {0, 1}:
            waiting.add(2)
            control.signal(2, signal.SIGKILL)
            control.abort("worker 2 was killed by signal 9 (SIGKILL)")

    calls = [(kind, options)] * 2
    outcomes = processes.run(
        plan_of(3, 3), call, [*calls, None], settings=Settings(quick_reports()), listen=listen
    )
    assert outcomes[2].error is ProcessLookupError
    for outcome in outcomes[:2]:
        assert outcome.error is PeerLostError
        assert outcome.message == "worker 2 was killed by signal 9 (SIGKILL)"


@pytest.mark.parametrize(("kind", "options"), CALLS)
def test_an_interrupted_member_ends_the_view(
    processes: Processes, kind: str, options: dict[str, object]
) -> None:
    waiting = set()

    def listen(control: Control, rank: int, _: PeerWait) -> None:
        waiting.add(rank)
        if waiting == {0, 1}:
            waiting.add(2)
            control.signal(0, signal.SIGINT)

    calls = [(kind, {**options, "what": "step 7"})] * 2
    outcomes = processes.run(
        plan_of(3, 3), call, [*calls, None], settings=Settings(quick_reports()), listen=listen, absent=[2]
    )
    assert outcomes[0].error is KeyboardInterrupt
    assert outcomes[1].error is PeerLostError
    assert outcomes[1].message.startswith(f"worker 0 left {kind} for step 7 with KeyboardInterrupt")


@pytest.mark.parametrize("workers", [1, 3])
def test_too_little_memory_raises_on_every_member(processes: Processes, workers: int) -> None:
    plan = plan_of(3, workers)
    outcomes = processes.run(plan, large_then_small, BIG, SMALL, settings=Settings(available=1_000_000))
    for message, before in values(outcomes):
        assert message.startswith("SharedMemoryError: the exchange between workers needs ")
        assert "1000000 bytes are available" in message
        assert before == expected(plan, SMALL)
    assert len({message for message, _ in values(outcomes)}) == 1


def test_an_allocation_that_fails_raises_on_every_member(processes: Processes) -> None:
    plan = plan_of(2, 2)
    limit = 1_000_000
    outcomes = processes.run(plan, limited_file_size, BIG, SMALL, limit)
    for message, before in values(outcomes):
        assert message.startswith("SharedMemoryError: the exchange between workers needs 4001792 bytes more")
        assert "File too large" in message
        assert before == expected(plan, SMALL)


@pytest.mark.usefixtures("closes_descriptors")
def test_a_closed_segment_leaves_no_file_and_no_descriptor(processes: Processes) -> None:
    def files() -> set[Path]:
        return set(Path("/dev/shm").iterdir())

    before = files()
    segment = ControlSegment.create(2)
    other = ControlSegment.attach(os.dup(segment.fd))
    assert files() == before
    segment.close()
    segment.close()
    other.close()
    assert files() == before


def test_a_control_segment_is_not_inherited_by_default() -> None:
    segment = ControlSegment.create(1)
    assert not os.get_inheritable(segment.fd)
    copy = os.dup(segment.fd)
    os.set_inheritable(copy, True)
    other = ControlSegment.attach(copy)
    assert not os.get_inheritable(copy)
    other.close()
    segment.close()


def test_views_reuse_the_pool() -> None:
    pool = SharedPool.create()
    buffers = Buffers(SharedPool.attach(os.dup(pool.fd)))
    sizes = []
    for replicas, shape in ((1, (1000,)), (3, (1000,)), (1, (10,)), (2, (5000,))):
        segment = ControlSegment.create(1)
        plan = plan_of(replicas, 1)
        communicator = SharedCommunicator(segment, buffers, 0, plan, WaitPolicy(timeout=60.0))
        for seed in (1, 2):
            case = Reduce(seed, (shape,), ("float32",))
            total = communicator.reduce(partials_of(plan, 0, case))
            assert sha(total) == expected(plan, case)
        sizes.append(os.fstat(pool.fd).st_size)
        communicator.close()
        segment.close()
    assert sizes[0] < sizes[3]
    assert sizes[0] == sizes[1] == sizes[2]
    pool.close()
    pool.close()


def test_parts_of_a_large_total_use_the_same_memory_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room, members = 1 << 15, 4
    monkeypatch.setattr(communicator_module, "ROOM", room)
    plan, pool, control = plan_of(5, members), SharedPool.create(), ControlSegment.create(members)
    done: list[str] = []

    def record(name: str) -> None:
        original = getattr(SliceReduce, name)

        def recorded(*given: Any) -> None:
            original(*given)
            done.append(name)

        monkeypatch.setattr(SliceReduce, name, recorded)

    record("publish")
    record("sum")
    case = Reduce(3, ((70_000,), (3,), (9, 11)), ("float32", "float16", "float64"), "mixed")

    def run(rank: int) -> list[str]:
        segment = ControlSegment.attach(os.dup(control.fd))
        buffers = Buffers(SharedPool.attach(os.dup(pool.fd)))
        communicator = SharedCommunicator(segment, buffers, rank, plan, WaitPolicy(timeout=60.0))
        return [
            sha(communicator.reduce(partials_of(plan, rank, case._replace(seed=seed)))) for seed in range(3)
        ]

    with ThreadPoolExecutor(members) as threads:
        digests = list(threads.map(run, range(members)))
    assert digests == [[expected(plan, case._replace(seed=seed)) for seed in range(3)]] * members
    total = 4 * 70_000
    assert total < os.fstat(pool.fd).st_size < total + room + 3 * mmap.PAGESIZE
    parts = [done[i : i + 2 * members] for i in range(0, len(done), 2 * members)]
    assert len(parts) == 3 * 18
    assert parts == [["publish"] * members + ["sum"] * members] * len(parts)
    pool.close()
    control.close()


def test_attaching_a_pool_to_another_file_raises(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file, pytest.raises(InternalError, match="not a memory pool"):
        SharedPool.attach(file.fileno())


def test_what_is_written_to_a_private_mapping_is_seen_there_alone_and_noticed() -> None:
    pool = SharedPool.create()
    pool.grow(size := 3 * mmap.PAGESIZE + 10)
    shared, private = np.frombuffer(pool.map(size), np.uint8), pool.map_privately(size)
    shared[:] = 1
    assert private.bytes.tolist() == [1] * size
    shared[5] = 2
    assert private.bytes[5] == 2
    assert not private.is_written()
    private.bytes[-1] = 3
    assert private.is_written()
    assert shared[-1] == 1
    assert not pool.map_privately(size).is_written()
    pool.close()


def test_what_arrays_show_of_the_memory_is_kept_while_they_or_views_of_them_are_in_use() -> None:
    pool = SharedPool.create()
    pool.grow(size := 5 * mmap.PAGESIZE)
    memory = np.frombuffer(pool.map(size), np.uint8)
    memory[:] = 1
    parts = [memory[i * 4000 + 8 : (i + 1) * 4000] for i in range(5)]
    first, *_, last = map(pool.show, parts)
    view = pool.show(parts[1])[:5]
    assert first.ctypes.data != parts[0].ctypes.data
    parts[0][0] = 2
    # No copy before the memory changes.
    assert first[0] == 2
    last[0] = 7
    again = pool.show(parts[4])
    assert (again[0], parts[4][0]) == (1, 1)
    pool.keep_shown()
    memory[:] = 3
    assert [set(array[1:].tolist()) for array in (first, last, again, view)] == [{1}] * 4
    assert (first[0], last[0], again[0]) == (2, 7, 1)
    assert pool.show(parts[0])[0] == 3
    assert pool.show(np.ones(1)) is None
    pool.close()
    assert pool.show(parts[0]) is None


def test_what_could_not_be_kept_is_kept_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SharedPool.create()
    shared.grow(size := 2 * mmap.PAGESIZE)
    memory = np.frombuffer(shared.map(size), np.uint8)
    arrays = [shared.show(memory[: mmap.PAGESIZE]), shared.show(memory[mmap.PAGESIZE :])]
    with monkeypatch.context() as patch:
        patch.setattr(pool, "_TAKE_PAGES", -1)
        with pytest.raises(SharedMemoryError, match="cannot copy 4096 bytes of a shared state"):
            shared.keep_shown()
    shared.keep_shown()
    memory[:] = 1
    assert not np.any(arrays)
    shared.close()


def test_a_forked_process_has_what_arrays_showed_before() -> None:
    subprocess.run([sys.executable, "-c", FORKS], check=True)


def test_abort_keeps_the_first_reason_and_truncates_it() -> None:
    segment = ControlSegment.create(2)
    other = ControlSegment.attach(os.dup(segment.fd))
    assert other.reason() is None
    segment.abort("x" + "ä" * REASON_LIMIT)
    other.abort("later")
    assert other.reason() == "x" + "ä" * ((REASON_LIMIT - 1) // 2)
    segment.close()
    segment.abort("closed: nothing happens")
    other.close()


def test_attaching_a_control_segment_to_another_file_raises(tmp_path: Path) -> None:
    for content in (b"", b"x" * 10_000, b"LOCKSTEP" + b"\0" * 10_000):
        file = tmp_path / "file"
        file.write_bytes(content)
        fd = os.open(file, os.O_RDWR)
        with pytest.raises(InternalError, match="not a control segment"):
            ControlSegment.attach(fd)
        os.close(fd)


@pytest.mark.usefixtures("closes_descriptors")
def test_too_little_memory_for_a_control_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_segment, "available_memory", lambda: 1000)
    with pytest.raises(SharedMemoryError, match=r"needs \d+ bytes .*1000 bytes are available"):
        ControlSegment.create(2)


def test_a_control_segment_cannot_shrink() -> None:
    segment = ControlSegment.create(1)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 0)
    segment.close()


def barriers(members: int, policy: WaitPolicy) -> tuple[ControlSegment, list[Barrier]]:
    """The barriers of a view whose members are threads."""
    control = ControlSegment.create(members)
    segments = [ControlSegment.attach(os.dup(control.fd)) for _ in range(members)]
    workers = range(members)
    return control, [Barrier(segments[rank], rank, workers, policy, None, SystemClock()) for rank in workers]


def test_a_member_that_arrives_after_others_have_given_up_does_not_complete_the_call() -> None:
    control, (killed, late, waiting) = barriers(3, WaitPolicy(timeout=60.0))
    last = CollectiveCall("reduce", "step 2")
    with ThreadPoolExecutor(1) as threads, late.during(last):
        killed._arrive()
        found = threads.submit(waiting.arrive_and_wait, last)
        control.abort("worker 0 was killed")
        assert isinstance(found.exception(), PeerLostError)
        with pytest.raises(PeerLostError, match="worker 0 was killed"):
            late.arrive_and_wait(last)


def test_members_complete_a_call_in_which_all_arrived_before_the_view_ended() -> None:
    control, (killed, first, second) = barriers(3, WaitPolicy(timeout=60.0))
    for barrier in (killed, first, second):
        barrier._arrival = 1
        barrier._arrive()
    control.abort("worker 0 was killed")
    for barrier in (first, second):
        assert barrier._is_settled(CollectiveCall("reduce", "step 2"))


@pytest.mark.parametrize("stuck", [False, True])
def test_a_call_completes_for_all_members_or_for_none(stuck: bool) -> None:
    """Members are late in random calls, while the view is aborted or the time of others runs out."""
    draw = random.Random(int(stuck))
    for _ in range(60):
        control, members = barriers(3, WaitPolicy(timeout=0.003 if stuck else 60.0))
        delays = [[draw.choice((0.0, 0.0, draw.uniform(0, 0.006))) for _ in range(30)] for _ in members]

        def run(member: Barrier, late: list[float]) -> int:
            """Make calls until the view ends; return how many were complete."""
            made = 0
            try:
                for delay in late:
                    with member.during(call := CollectiveCall("barrier", f"call {made}")):
                        time.sleep(delay)
                        member.arrive_and_wait(call)
                    made += 1
            except (PeerLostError, PeerStuckError):
                pass
            return made

        with ThreadPoolExecutor(3) as threads:
            running = [threads.submit(run, *one) for one in zip(members, delays, strict=True)]
            if not stuck:
                time.sleep(draw.uniform(0, 0.02))
                control.abort("worker 3 was killed")
        assert len({one.result() for one in running}) == 1


def test_arrivals_are_counted_beyond_32_bits() -> None:
    segment = ControlSegment.create(1)
    barrier = Barrier(segment, 0, [0], quick_reports(), None, None)  # type: ignore[arg-type]
    barrier._arrival = 2**32 - 2
    for _ in range(4):
        barrier.arrive_and_wait(CollectiveCall("barrier", "barrier"))
    assert barrier._arrival == 2
    segment.close()


@pytest.mark.parametrize(
    "call",
    [
        CollectiveCall("barrier", ""),
        CollectiveCall("reduce", "step ä", b"\0" * 64, b"\1" * 16),
        CollectiveCall("reduce", "", b"\0", b"\0" * 16),
    ],
)
def test_a_slot_encodes_a_call(call: CollectiveCall) -> None:
    assert decode(encode(call, 2**40) + b"rest") == (call, 2**40)


def test_a_slot_truncates_a_long_name() -> None:
    found, _ = decode(encode(CollectiveCall("barrier", "ä" * 600), 0))
    assert found.what == "ä" * 256


def test_memory_left_under_cgroup_limits(tmp_path: Path) -> None:
    membership, mount = tmp_path / "cgroup", tmp_path / "mount"
    membership.write_text("4:cpu,memory:/job\n1:cpu:/\n0::/a/b\n")

    def group(path: str, **files: str) -> None:
        (mount / path).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (mount / path / name.replace("__", ".")).write_text(text)

    group("a/b", memory__max="1000\n", memory__current="900\n", memory__stat="anon 5\ninactive_file 50\n")
    group("a", memory__max="max\n", memory__current="5000\n")
    group("memory/job", memory__limit_in_bytes="700\n", memory__usage_in_bytes="500\n")
    group("memory", memory__limit_in_bytes="9000\n", memory__usage_in_bytes="1000\n")
    assert cgroup_rooms(membership, mount) == [200, 8000, 150]
    assert cgroup_rooms(tmp_path / "absent", mount) == []
    assert 0 < available_memory() < 2**60


def test_a_word_is_confirmed_with_weak_memory_ordering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futex, "LOADS_IN_ORDER", False)
    segment = ControlSegment.create(1)
    for _ in range(3):
        futex.confirm(segment.address(0), segment.arrivals(0))
        futex.adder(segment.address(0))()
    assert segment.arrivals(0) == 3
    segment.close()
    with pytest.raises(OSError, match="futex: "):
        futex.wake(1)
