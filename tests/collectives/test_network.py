"""Members on several hosts: bits for any spread of replicas, lost connections, results that are fetched."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from collective_scripts import Reduce, partials_of
from host_threads import ConnectedView, WorkerOfHost, run_threads
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_sums import DTYPES, leaves_of, reference, sha

from lockstep.collectives.network import communicator as communicator_module
from lockstep.collectives.network import lane_reduce
from lockstep.collectives.network.communicator import NetworkCommunicator
from lockstep.collectives.plan import ReducePlan
from lockstep.collectives.shared.pool import SharedPool
from lockstep.errors import DisagreementError, PeerLostError


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
            position = plan.workers.index(worker)
            found = [sha(communicator.reduce(partials_of(plan, position, case))) for case in reduces]
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
    def call(communicator: NetworkCommunicator, plan: ReducePlan, position: int) -> Any:
        return sha(communicator.reduce(partials_of(plan, position, case)))

    return call


def gather(communicator: NetworkCommunicator, plan: ReducePlan, position: int) -> Any:
    return communicator.gather(bytes([position]) * (position + 1))


def broadcast(communicator: NetworkCommunicator, plan: ReducePlan, position: int) -> Any:
    return communicator.broadcast(b"root" if position == 1 else None, root=1)


def all_to_all(communicator: NetworkCommunicator, plan: ReducePlan, position: int) -> Any:
    parts = [[np.full(3 + other, 10 * position + other, np.uint8)] for other in range(plan.members)]
    received = [part.tobytes() for part in communicator.all_to_all(parts)]
    wanted = [bytes([10 * other + position]) * (3 + position) for other in range(plan.members)]
    return "right" if received == wanted else received


def disagree(communicator: NetworkCommunicator, plan: ReducePlan, position: int) -> Any:
    try:
        communicator.reduce(partials_of(plan, position, SMALL), check=bytes([position]))
    except DisagreementError as error:
        return str(error)
    return "no error"


CALLS: dict[str, Call] = {
    "small": reduce_of(SMALL),
    "large": reduce_of(LARGE),
    "gather": gather,
    "broadcast": broadcast,
    "all_to_all": all_to_all,
    "disagree": disagree,
}


class Trial:
    """A worker of each host makes calls, over views whose connections break.

    After the last call all make a barrier, which may fail: then all have made the calls.
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

    def run(self) -> dict[int, Any]:
        results = run_threads(
            {worker: lambda worker=worker: self._script(worker) for worker in self._workers}
        )
        for each in (*self._views, *self._workers.values()):
            each.close()
        return results

    def _script(self, worker: int) -> tuple[list[Any], list[int]]:
        entrances = iter([view.entrances[worker] for view in self._views])
        kept = self._workers[worker]
        communicator = next(entrances).enter(kept)
        position = self._plan.workers.index(worker)
        results: list[Any] = []
        repeated: list[int] = []
        while len(results) < len(self._names):
            try:
                results.append(CALLS[self._names[len(results)]](communicator, self._plan, position))
            except PeerLostError:
                repeated.append(len(results))
                communicator.close()
                communicator = next(entrances).enter(kept)
        try:
            communicator.barrier()
        except PeerLostError:
            communicator.close()
            communicator = next(entrances, None)
        else:
            communicator.close()
        return results, repeated


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
    step = max(1, end // 40)
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
