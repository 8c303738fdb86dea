"""Members on several hosts: bits for any spread of replicas, lost connections, results that are fetched."""

import contextlib
import functools
import itertools
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from collective_members import DEADLINE
from collective_scripts import Reduce, partials_of
from host_threads import ConnectedView, WorkerOfHost, run_threads
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_sums import DTYPES, leaves_of, reference, sha

from lockstep.collectives.call import CollectiveCall
from lockstep.collectives.contract import PeerWait, Span, WaitPolicy
from lockstep.collectives.network import communicator as communicator_module
from lockstep.collectives.network import lane_reduce
from lockstep.collectives.network.communicator import NetworkCommunicator
from lockstep.collectives.network.disagreement import common_error
from lockstep.collectives.network.frames import (
    HEADER_SIZE,
    HELLO_SIZE,
    LENGTH_LIMIT,
    Frame,
    FrameError,
    Header,
    Hello,
    MemberDetails,
    Result,
    decode_blobs,
    decode_details,
    decode_result,
    describe_call,
    encode_blobs,
    encode_result,
)
from lockstep.collectives.network.last_call import KeptResult
from lockstep.collectives.network.memory import Extents, NetworkBuffers
from lockstep.collectives.network.streams import Outgoing
from lockstep.collectives.plan import HostPlan, ReducePlan
from lockstep.collectives.shared.pool import SharedPool
from lockstep.errors import DisagreementError, InternalError, PeerLostError, SharedMemoryError
from lockstep.topology import place_on_hosts


@pytest.fixture(autouse=True, scope="module")
def small_pieces() -> Iterator[None]:
    """Let small totals take the ways of large ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lane_reduce, "CHUNK", 1 << 10)
        patch.setattr(lane_reduce, "SMALLEST_CHUNK", 1 << 8)
        patch.setattr(lane_reduce, "DIRECT", 1 << 7)
        patch.setattr(communicator_module, "SMALL", 1 << 10)
        yield


def hosts_of(counts: tuple[int, ...]) -> list[list[int]]:
    ids = itertools.count()
    return [[next(ids) for _ in range(count)] for count in counts]


def workers_of(hosts: list[list[int]]) -> dict[int, WorkerOfHost]:
    found = {}
    for ids in hosts:
        pool = SharedPool.create()
        for worker in ids:
            found[worker] = WorkerOfHost(pool)
    return found


# Bits.


@st.composite
def spreads(draw: st.DrawFn) -> tuple[int, tuple[int, ...]]:
    counts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    return draw(st.integers(sum(counts), 13)) if sum(counts) <= 13 else 13, tuple(counts)


shapes = st.lists(st.integers(0, 40), max_size=2).map(tuple)
cases = st.lists(
    st.builds(
        lambda seed, each, style: Reduce(seed, tuple(a for a, _ in each), tuple(b for _, b in each), style),
        st.integers(0, 2**32 - 1),
        st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=6),
        st.sampled_from(["replicas", "merged", "mixed"]),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(spread=spreads(), reduces=cases)
def test_the_bits_do_not_depend_on_hosts(spread: tuple[int, tuple[int, ...]], reduces: list[Reduce]) -> None:
    replicas, counts = spread
    hosts = hosts_of(counts)
    view, workers = ConnectedView(replicas, hosts), workers_of(hosts)
    plan = ReducePlan.of(view.view)

    def script(worker: int) -> Callable[[], list[str]]:
        def run() -> list[str]:
            communicator = view.entrances[worker].enter(workers[worker])
            rank = plan.workers.index(worker)
            found = [sha(communicator.reduce(partials_of(plan, rank, case))) for case in reduces]
            communicator.close()
            return found

        return run

    try:
        results = run_threads({worker: script(worker) for worker in workers})
    finally:
        for each in (view, *workers.values()):
            each.close()
    want = [
        sha(reference([leaves_of(case.seed, at, case.shapes, case.dtypes) for at in range(replicas)]))
        for case in reduces
    ]
    assert results == dict.fromkeys(workers, want)


# Lost connections.

SMALL = Reduce(1, ((5,), (3,)), ("float32", "int8"))
LARGE = Reduce(2, ((300,), (7,), (90,)), ("float32", "int8", "float32"))
Call = Callable[[NetworkCommunicator, ReducePlan, int], Any]


def reduce_of(case: Reduce) -> Call:
    def call(communicator: NetworkCommunicator, plan: ReducePlan, rank: int) -> Any:
        return sha(communicator.reduce(partials_of(plan, rank, case)))

    return call


def gather(communicator: NetworkCommunicator, plan: ReducePlan, rank: int) -> Any:
    return communicator.gather(bytes([rank]) * (rank + 1))


def all_to_all(communicator: NetworkCommunicator, plan: ReducePlan, rank: int) -> Any:
    parts = [[np.full(3 + other, 10 * rank + other, np.uint8)] for other in range(plan.members)]
    received = [part.tobytes() for part in communicator.all_to_all(parts)]
    wanted = [bytes([10 * other + rank]) * (3 + rank) for other in range(plan.members)]
    return "right" if received == wanted else received


def disagree(communicator: NetworkCommunicator, plan: ReducePlan, rank: int) -> Any:
    try:
        communicator.reduce(partials_of(plan, rank, SMALL), check=bytes([rank]))
    except DisagreementError as error:
        return str(error)
    return "no error"


CALLS: dict[str, Call] = {
    "small": reduce_of(SMALL),
    "large": reduce_of(LARGE),
    "gather": gather,
    "all_to_all": all_to_all,
    "disagree": disagree,
}


class Trial:
    """Workers of each host make calls and a barrier, over views whose connections break.

    If any of them needs the second view, all enter it, as in a job, and end it with another barrier: one that
    has completed all calls gives the others what they lack.
    """

    def __init__(self, counts: tuple[int, ...], cut: tuple[int, int, int | None], names: list[str]) -> None:
        self._hosts = hosts_of(counts)
        self._workers = workers_of(self._hosts)
        self._views = [ConnectedView(4, self._hosts, number) for number in (1, 2)]
        self._plan = ReducePlan.of(self._views[0].view)
        sender, receiver, left = cut
        self.stream = self._views[0].pairs[sender, receiver][0]
        self.stream.left = left
        self._names = names
        self._condition = threading.Condition()
        self._finished = 0
        self._needs_second = False

    def run(self) -> dict[int, Any]:
        results = run_threads(
            {worker: lambda worker=worker: self._script(worker) for worker in self._workers}
        )
        for each in (*self._views, *self._workers.values()):
            each.close()
        return results

    def _script(self, worker: int) -> tuple[list[Any], list[int]]:
        first, second = (view.entrances[worker] for view in self._views)
        kept = self._workers[worker]
        results: list[Any] = []
        repeated: list[int] = []
        communicator = first.enter(kept)
        try:
            self._make_calls(communicator, worker, results)
        except PeerLostError:
            if len(results) < len(self._names):
                repeated.append(len(results))
            with self._condition:
                self._needs_second = True
                self._condition.notify_all()
        finally:
            communicator.close()
        with self._condition:
            self._finished += 1
            self._condition.notify_all()
            self._condition.wait_for(
                lambda: self._needs_second or self._finished == len(self._workers), DEADLINE
            )
        if self._needs_second:
            communicator = second.enter(kept)
            self._make_calls(communicator, worker, results)
            communicator.barrier(what="the end")
            communicator.close()
        return results[: len(self._names)], repeated

    def _make_calls(self, communicator: NetworkCommunicator, worker: int, results: list[Any]) -> None:
        """Make the calls that have no result yet."""
        rank = self._plan.workers.index(worker)
        while len(results) < len(self._names):
            results.append(CALLS[self._names[len(results)]](communicator, self._plan, rank))
        if len(results) == len(self._names):
            results.append(communicator.barrier())


@pytest.mark.ci("gather", "disagree", "large")
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("counts", [(1, 1), (2, 1)])
def test_a_connection_that_breaks_after_any_byte(counts: tuple[int, ...], name: str) -> None:
    """All members make all calls with equal results: in the old view, in the new one, or by fetching them."""
    names = ["small", name, "large"]
    other = counts[0]
    whole = Trial(counts, (0, other, None), names)
    want = whole.run()
    assert {str(results) for results, _ in want.values()} == {str(want[0][0])}, want
    end = whole.stream.sent
    step = max(1, end // 24)
    fetched = 0
    for left in range(0, end + 1, step):
        for cut in ((0, other, left), (other, 0, left)):
            found = Trial(counts, cut, names).run()
            assert {worker: results for worker, (results, _) in found.items()} == {
                worker: results for worker, (results, _) in want.items()
            }, (cut, found)
            hosts = [found[worker][1] for worker in range(sum(counts))]
            assert hosts[: counts[0]] == [hosts[0]] * counts[0], (cut, found)
            fetched += hosts[0] != hosts[-1]
    assert fetched, "no host has ever completed a call that another one has not"


def test_newcomers_begin_after_the_last_call_of_any_host() -> None:
    """One host has completed a call that the other has not; then a worker joins on each host."""
    for left in itertools.count(600, -20):
        pair = hosts_of((1, 1))
        workers = workers_of(pair)
        first = ConnectedView(4, pair)
        first.pairs[0, 1][0].left = left
        results = run_threads(
            {worker: make_calls(first, workers, worker, ["small"] * 2) for worker in (0, 1)}
        )
        first.close()
        if workers[0].last.number > workers[1].last.number:
            break
        for worker in workers.values():
            worker.close()
    done = workers[0].last.number
    assert workers[1].last.number == done - 1
    assert isinstance(results[1], PeerLostError)

    grown = [[0, 2], [1, 3]]
    for worker, old in ((2, 0), (3, 1)):
        workers[worker] = WorkerOfHost(SharedPool.attach(os.dup(workers[old].pool.fd)))
    second = ConnectedView(4, grown, 2)
    names = {0: ["small"] * (2 - done), 1: ["small"] * (3 - done), 2: ["small"] * (2 - done)}
    names[3] = names[2]
    following = {worker: [*names[worker], "large", "gather", "all_to_all"] for worker in workers}
    results = run_threads(
        {worker: make_calls(second, workers, worker, following[worker]) for worker in workers}
    )
    for each in (second, *workers.values()):
        each.close()
    assert {worker.last.number for worker in workers.values()} == {5}
    assert results[1][0] == sha_of(SMALL)
    assert results[1][1:] == results[0] == results[2] == results[3]


@pytest.mark.parametrize(
    ("what", "repeated"),
    [
        ("the weights", [b"kept", b"too"]),
        ("the seeds", "has completed gather for the weights, but this worker repeats gather for the seeds"),
    ],
    ids=["the same call", "another name"],
)
def test_a_kept_result_is_given_only_to_the_same_call(what: str, repeated: list[bytes] | str) -> None:
    """A script that repeats another call than the one that the other host has completed has diverged."""
    hosts = hosts_of((1, 1))
    view, workers = ConnectedView(2, hosts, 2), workers_of(hosts)
    kept = KeptResult(CollectiveCall("gather", "the weights"), blobs=(b"kept", b"too"))
    workers[0].last.complete(1, kept)
    workers[1].last.complete(0, None)

    def ahead() -> object:
        communicator = view.entrances[0].enter(workers[0])
        try:
            return communicator.gather(b"")
        finally:
            communicator.close()

    def behind() -> object:
        communicator = view.entrances[1].enter(workers[1])
        try:
            result = communicator.gather(b"new", what=what)
            communicator.gather(b"")
            return result
        finally:
            communicator.close()

    results = run_threads({0: ahead, 1: behind})
    for each in (view, *workers.values()):
        each.close()
    if isinstance(repeated, list):
        assert results == {0: [b"", b""], 1: repeated}
    else:
        assert isinstance(results[1], InternalError), results
        assert repeated in str(results[1])


def make_calls(
    view: ConnectedView, workers: dict[int, WorkerOfHost], worker: int, names: list[str]
) -> Callable[[], list[Any]]:
    plan = ReducePlan.of(view.view)
    rank = plan.workers.index(worker)

    def run() -> list[Any]:
        communicator = view.entrances[worker].enter(workers[worker])
        try:
            return [CALLS[name](communicator, plan, rank) for name in names]
        finally:
            communicator.close()

    return run


def sha_of(case: Reduce, replicas: int = 4) -> str:
    parts = [leaves_of(case.seed, at, case.shapes, case.dtypes) for at in range(replicas)]
    return sha(reference(parts))


# Lanes.


@pytest.mark.parametrize(
    "names",
    [
        ("large", "large", "gather", "gather"),
        ("large", "small", "large", "large"),
        ("gather", "gather", "gather", "large"),
        ("gather", "all_to_all", "large", "small"),
        ("all_to_all", "all_to_all", "all_to_all", "gather"),
    ],
)
@pytest.mark.parametrize("counts", [(2, 2), (3, 1), (2, 1, 1)])
def test_members_that_use_different_lanes_disagree(counts: tuple[int, ...], names: tuple[str, ...]) -> None:
    hosts = hosts_of(counts)
    view, workers = ConnectedView(4, hosts), workers_of(hosts)
    plan = ReducePlan.of(view.view)

    def script(worker: int) -> list[Any]:
        communicator = view.entrances[worker].enter(workers[worker])
        results = [CALLS["large"](communicator, plan, worker)]
        for _ in range(2):
            with pytest.raises(DisagreementError) as raised:
                CALLS[names[worker]](communicator, plan, worker)
            results += [str(raised.value), CALLS["large"](communicator, plan, worker)]
        communicator.close()
        return results

    results = run_threads({worker: functools.partial(script, worker) for worker in workers})
    for each in (view, *workers.values()):
        each.close()
    text = results[0][1]
    for found in results.values():
        assert found == [sha_of(LARGE), text, sha_of(LARGE), text, sha_of(LARGE)]


@pytest.mark.parametrize(
    ("checks", "hint"),
    [
        ("xxy", "worker 2 from 79. The data files may differ between node1 and node2: compare"),
        ("xyx", "worker 1 from 79. Every worker must take the same step"),
    ],
)
def test_data_that_differ_between_hosts_are_looked_for_in_files_first(checks: str, hint: str) -> None:
    members = [
        MemberDetails.of(CollectiveCall("reduce", "step 1", check.encode()), [], "") for check in checks
    ]
    assert hint in str(common_error(members, (0, 1, 2), ("node1", "node1", "node2")))


def test_a_lane_that_breaks() -> None:
    """The first lane lives; the members of a host still complete a call all or none."""
    names = ["small", "disagree", "large", "large"]
    whole = Trial((2, 2), (1, 3, None), names)
    want = whole.run()
    for left in range(0, whole.stream.sent + 1, max(1, whole.stream.sent // 24)):
        found = Trial((2, 2), (1, 3, left), names).run()
        assert {worker: results for worker, (results, _) in found.items()} == {
            worker: results for worker, (results, _) in want.items()
        }, (left, found)
        assert found[0][1] == found[1][1], (left, found)
        assert found[2][1] == found[3][1], (left, found)


# Memory.


@pytest.mark.parametrize("counts", [(2, 1), (1, 2)])
@pytest.mark.parametrize("name", ["reduce", "all_to_all"])
def test_all_hosts_raise_if_one_has_too_little_memory(counts: tuple[int, ...], name: str) -> None:
    hosts = hosts_of(counts)
    view, workers = ConnectedView(4, hosts), workers_of(hosts)
    for host in hosts:
        if len(host) > 1:
            for worker in host:
                pool = SharedPool.attach(os.dup(workers[host[0]].pool.fd), lambda: 1 << 20)
                workers[worker].buffers = NetworkBuffers(pool)
    plan, big = ReducePlan.of(view.view), Reduce(1, ((1 << 20,),), ("float32",))

    def script(worker: int) -> list[Any]:
        communicator = view.entrances[worker].enter(workers[worker])
        rank = plan.workers.index(worker)
        results = [CALLS["large"](communicator, plan, rank)]
        calls: dict[str, Callable[[], object]] = {
            "reduce": lambda: communicator.reduce(partials_of(plan, rank, big)),
            "all_to_all": lambda: communicator.all_to_all([[np.zeros(1 << 20, np.uint8)]] * plan.members),
        }
        with pytest.raises(SharedMemoryError, match="Use fewer workers") as raised:
            calls[name]()
        results += [str(raised.value), CALLS["all_to_all"](communicator, plan, rank)]
        communicator.close()
        return results

    results = run_threads({worker: functools.partial(script, worker) for worker in workers})
    for each in (view, *workers.values()):
        each.close()
    assert set(results) == set(workers)
    for found in results.values():
        assert found == [sha_of(LARGE), results[0][1], "right"]


# Frames.

anything = st.binary(max_size=300)


@pytest.mark.parametrize(
    "decode",
    [Header.decode, Hello.decode, decode_details, decode_result, functools.partial(decode_blobs, count=2)],
)
@given(data=anything)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_decoders_return_a_value_or_raise(decode: Callable[[bytes], Any], data: bytes) -> None:
    with contextlib.suppress(FrameError):
        decode(data)


@given(data=st.binary(min_size=HEADER_SIZE - 6, max_size=HEADER_SIZE - 6))
def test_headers_return_a_value_or_raise(data: bytes) -> None:
    with contextlib.suppress(FrameError):
        header = Header.decode(b"LSX1" + bytes([1, 0]) + data)
        assert Header.decode(header.encode()) == header


def test_frames_are_decoded_as_they_were_encoded() -> None:
    hello = Hello(bytes(range(16)), 1, 2, 3, -1, True)
    assert Hello.decode(hello.encode()) == hello
    blobs = [b"", b"a", b"bcd"]
    assert decode_blobs(b"".join(encode_blobs(blobs)), 3) == blobs
    result = Result("reduce", bytes(16), [b"total"], "text", (1, 2))
    assert decode_result(encode_result(result)) == result


@given(garbage=st.binary(max_size=400), after=st.sampled_from(["nothing", "hello", "header", "endless"]))
@settings(max_examples=120, deadline=None, derandomize=True)
def test_garbage_of_another_host_ends_the_view(garbage: bytes, after: str) -> None:
    hosts = hosts_of((1, 1))
    view, workers = ConnectedView(2, hosts), workers_of(hosts)
    data = b""
    if after != "nothing":
        hello = Hello(b"a job in a test.", 1, 1, 101, -1, False)
        data += Header(Frame.HELLO, length=HELLO_SIZE).encode() + hello.encode()
    if after in ("header", "endless"):
        call = describe_call(CollectiveCall("gather", "gather"))
        length = 500 if after == "header" else LENGTH_LIMIT
        data += Header(Frame.CALL, number=1, length=length, call=call).encode()
    stream = view.pairs[1, 0][0]
    stream.sendall(data + garbage)
    stream.shutdown(socket.SHUT_WR)
    communicator = view.entrances[0].enter(workers[0])
    try:
        with pytest.raises(PeerLostError, match="worker 1 on host 1"):
            communicator.gather(b"blob")
    finally:
        communicator.close()
        for each in (view, *workers.values()):
            each.close()


def test_silence_within_the_data_of_another_host_counts_as_waiting() -> None:
    """A host may be lost between a header and its data. Time in which data arrive is not waiting."""
    hosts = hosts_of((1, 1))
    view, workers = ConnectedView(2, hosts), workers_of(hosts)
    call = describe_call(CollectiveCall("gather", "gather"))
    hello = Hello(b"a job in a test.", 1, 1, 101, -1, False).encode()
    stream = view.pairs[1, 0][0]
    stream.sendall(Header(Frame.HELLO, length=HELLO_SIZE).encode() + hello)
    stream.sendall(Header(Frame.CALL, number=1, length=500, call=call).encode() + b"first bytes")
    waits: list[PeerWait] = []

    def observe(wait: PeerWait) -> None:
        waits.append(wait)
        stream.shutdown(socket.SHUT_WR)

    communicator = view.entrances[0].enter(workers[0], WaitPolicy(DEADLINE, report_every=0.5), observe)
    try:
        with pytest.raises(PeerLostError, match="worker 1 on host 1"):
            communicator.gather(b"blob")
        assert communicator.waited >= waits[0].seconds >= 0.5
    finally:
        communicator.close()
        for each in (view, *workers.values()):
            each.close()


def test_time_in_which_own_data_leave_is_not_waiting() -> None:
    class Slow(Outgoing):
        """A stream on which data leave for some time."""

        is_idle = False
        error = None
        answers = iter((False, False, True))

        def __init__(self) -> None:
            pass

        def flush(self, seconds: float) -> bool:
            return next(self.answers)

    hosts = hosts_of((1, 1))
    view, workers = ConnectedView(2, hosts), workers_of(hosts)
    communicator = view.entrances[0].enter(workers[0])
    lane = communicator._lane
    assert lane is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(lane._outgoing, 1, Slow())
        lane.flush(CollectiveCall("reduce", "reduce"))
    assert communicator.waited == 0.0
    communicator.close()
    for each in (view, *workers.values()):
        each.close()


@pytest.mark.parametrize("size", [-1, LENGTH_LIMIT + 1, (1 << 63) - 1])
def test_parts_of_impossible_sizes_end_the_view(size: int) -> None:
    hosts = hosts_of((1, 1))
    view, workers = ConnectedView(2, hosts), workers_of(hosts)
    call = describe_call(CollectiveCall("all_to_all", "all_to_all"))
    hello = Hello(b"a job in a test.", 1, 1, 101, -1, False).encode()
    view.pairs[1, 0][0].sendall(
        Header(Frame.HELLO, length=HELLO_SIZE).encode()
        + hello
        + Header(Frame.CALL, number=1, length=16, call=call).encode()
        + np.array([size, 1], np.int64).tobytes()
    )
    communicator = view.entrances[0].enter(workers[0])
    try:
        with pytest.raises(PeerLostError, match="sizes that no part has"):
            communicator.all_to_all([[np.zeros(3, np.uint8)]] * 2)
    finally:
        communicator.close()
        for each in (view, *workers.values()):
            each.close()


@pytest.mark.parametrize("wrong", ["job", "term", "view", "incarnation", "done"])
def test_a_hello_of_another_view_is_refused(wrong: str) -> None:
    hosts = hosts_of((1, 1))
    view, workers = ConnectedView(2, hosts), workers_of(hosts)
    hello = Hello(b"a job in a test.", 1, 1, 101, -1, False)
    other = {"job": bytes(16), "term": 2, "view": 2, "incarnation": 100, "done": 1}[wrong]
    data = hello._replace(**{wrong: other}).encode()
    view.pairs[1, 0][0].sendall(Header(Frame.HELLO, length=HELLO_SIZE).encode() + data)
    workers[0].last.complete(3, None)
    communicator = view.entrances[0].enter(workers[0])
    error, text = (
        (PeerLostError, "are not of this exchange") if wrong != "done" else (InternalError, "result")
    )
    try:
        with pytest.raises(error, match=text):
            communicator.barrier()
    finally:
        communicator.close()
        for each in (view, *workers.values()):
            each.close()


# Memory of a host, and plans.


@given(
    sizes=st.lists(st.tuples(*[st.integers(0, 40_000)] * 4), min_size=1, max_size=8),
)
@settings(deadline=None, derandomize=True)
def test_regions_never_overlap_and_stay_while_they_suffice(sizes: list[tuple[int, int, int, int]]) -> None:
    extents = Extents()
    for needed in sizes:
        before, extents = extents, extents.enlarged(needed)
        assert extents.fits(needed)
        assert Extents.decode(extents.encode()) == extents
        for old, new, size in zip(before, extents, needed, strict=True):
            assert new == old or size > old.size
        taken = sorted(each for each in extents if each.size)
        for first, second in itertools.pairwise(taken):
            assert first.start + first.size <= second.start


@given(spread=spreads())
@settings(deadline=None, derandomize=True)
def test_every_host_sees_the_same_sums(spread: tuple[int, tuple[int, ...]]) -> None:
    replicas, counts = spread
    view = place_on_hosts(replicas, tuple(map(tuple, hosts_of(counts))))
    plans = [HostPlan.of(view, host) for host in range(len(counts))]
    whole = ReducePlan.of(view)
    assert len({plan.published for plan in plans}) == 1
    assert [span for spans in plans[0].published for span in spans] == sorted(
        span for spans in plans[0].published for span in spans
    )
    for plan in plans:
        assert plan.workers == whole.workers
        own = [plan.seen.published[plan.rank(local)] for local in range(len(plan.workers_here))]
        first = whole.workers.index(plan.workers_here[0])
        assert own == list(whole.published[first : first + len(own)])
        parts = [span for spans in own for span in spans]
        assert [
            Span(each.operands[0].start, each.operands[-1].stop) for each in plan.host_sums(parts)
        ] == list(plan.published[plan.host])
        for local in range(len(plan.workers_here)):
            total = plan.seen.total(plan.rank(local), own[local])
            assert (total.operands[0].start, total.operands[-1].stop) == plan.seen.whole


# Permission to end calls.


class Held:
    """The first host of a view, which has no permission to end calls.

    Attributes:
        segment: of this host.
    """

    def __init__(self, view: ConnectedView, waiting: int | None = None) -> None:
        """Take the permission away; `wait` waits for so many members, or all."""
        self.segment = view.segments[0]
        self.segment.permit(0.0)
        self._waiting = self.segment.members if waiting is None else waiting
        self._waits: set[int] = set()
        self._all_wait = threading.Event()
        self._block = self.segment.wait_for_permit
        self.segment.wait_for_permit = self._note  # type: ignore[method-assign]

    def _note(self, seconds: float) -> None:
        self._waits.add(threading.get_ident())
        if len(self._waits) == self._waiting:
            self._all_wait.set()
        self._block(seconds)

    def wait(self) -> None:
        """Wait until the members of the host wait for the permission."""
        assert self._all_wait.wait(DEADLINE)


class Pausing:
    """Hosts that have made one call, when the first of them loses the permission to end calls."""

    def __init__(self, counts: tuple[int, ...]) -> None:
        self.hosts = hosts_of(counts)
        self.workers = workers_of(self.hosts)
        self.views = [ConnectedView(4, self.hosts, number) for number in (1, 2)]
        self._plan = ReducePlan.of(self.views[0].view)
        self._met = threading.Barrier(len(self.workers) + 1)

    @property
    def numbers(self) -> set[int]:
        """The numbers of the last calls of the members of the first host."""
        return {self.workers[worker].last.number for worker in self.hosts[0]}

    def run(self, name: str, drive: Callable[[Held], None]) -> dict[int, Any]:
        """Make a call and another one on all members while `drive` acts; return the results.

        A member repeats the call in the second view if the first one ends.
        """
        names = (name, "large")

        def script(worker: int) -> Any:
            rank = self._plan.workers.index(worker)
            results: list[Any] = []
            for number, view in enumerate(self.views):
                communicator = view.entrances[worker].enter(self.workers[worker])
                try:
                    if number == 0:
                        CALLS["small"](communicator, self._plan, rank)
                        self._met.wait(DEADLINE)
                        self._met.wait(DEADLINE)
                    while len(results) < len(names):
                        results.append(CALLS[names[len(results)]](communicator, self._plan, rank))
                except PeerLostError:
                    continue
                finally:
                    communicator.close()
                return results
            return "no view is left"

        def drives() -> None:
            self._met.wait(DEADLINE)
            held = Held(self.views[0])
            self._met.wait(DEADLINE)
            drive(held)

        scripts: dict[int, Callable[[], Any]] = {at: functools.partial(script, at) for at in self.workers}
        results = run_threads({**scripts, -1: drives})
        for each in (*self.views, *self.workers.values()):
            each.close()
        assert results.pop(-1) is None
        return results


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("counts", [(1, 1), (2, 1), (2,)])
def test_a_host_without_permission_ends_no_call(counts: tuple[int, ...], name: str) -> None:
    """It ends the call as soon as it has the permission."""
    job = Pausing(counts)

    def drive(held: Held) -> None:
        held.wait()
        assert job.numbers == {1}
        held.segment.permit(math.inf)

    results = job.run(name, drive)
    assert {str(each) for each in results.values()} == {str(results[0])}
    assert {worker.last.number for worker in job.workers.values()} == {3}


@pytest.mark.parametrize("name", ["small", "large", "gather", "disagree"])
def test_a_view_that_ends_during_the_pause(name: str) -> None:
    """The host gets the result of the call in the next view, and ends the call when it has the permission."""
    job = Pausing((2, 1))

    def drive(held: Held) -> None:
        held.wait()
        again = Held(job.views[1])
        held.segment.abort("the view changes")
        again.wait()
        assert job.numbers == {1}
        again.segment.permit(math.inf)

    results = job.run(name, drive)
    assert {str(each) for each in results.values()} == {str(results[0])}


def test_a_disagreement_ends_with_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the time runs out while the hosts find out how they differ."""
    job, original = Pausing((2, 1)), communicator_module.exchange_details
    again: list[Held] = []
    revoked = threading.Event()

    def exchange_details(lane: Any, call: CollectiveCall, number: int, hosts: HostPlan, local: Any) -> Any:
        if hosts.host == 0:
            again.append(Held(job.views[0], waiting=1))
            revoked.set()
        return original(lane, call, number, hosts, local)

    monkeypatch.setattr(communicator_module, "exchange_details", exchange_details)

    def drive(held: Held) -> None:
        held.segment.permit(math.inf)
        assert revoked.wait(DEADLINE)
        again[0].wait()
        assert job.numbers == {1}
        held.segment.permit(math.inf)

    results = job.run("disagree", drive)
    assert {str(each) for each in results.values()} == {str(results[0])}


def test_time_that_runs_out_while_members_arrive() -> None:
    """The call ends for no member of the host, also if some have arrived with permission."""
    hosts = hosts_of((2,))
    view, workers = ConnectedView(4, hosts), workers_of(hosts)
    plan = ReducePlan.of(view.view)
    segment, arrives, revoked = view.segments[0], threading.Event(), threading.Event()

    def script(worker: int) -> str:
        communicator = view.entrances[worker].enter(workers[worker])
        CALLS["small"](communicator, plan, worker)
        if worker == 1:
            check = communicator._barrier.await_permission

            def late(call: CollectiveCall) -> None:
                arrives.set()
                assert revoked.wait(DEADLINE)
                check(call)

            communicator._barrier.await_permission = late  # type: ignore[method-assign]
        with pytest.raises(PeerLostError) as raised:
            CALLS["small"](communicator, plan, worker)
        communicator.close()
        return str(raised.value)

    def drive() -> None:
        assert arrives.wait(DEADLINE)
        while segment.arrivals(0) == segment.arrivals(1):
            time.sleep(0)
        held = Held(view, waiting=1)
        revoked.set()
        held.wait()
        held.segment.abort("the view changes")

    results = run_threads({0: lambda: script(0), 1: lambda: script(1), 2: drive})
    assert results == {0: "the view changes", 1: "the view changes", 2: None}
    assert [worker.last.number for worker in workers.values()] == [1, 1]
    for each in (view, *workers.values()):
        each.close()
