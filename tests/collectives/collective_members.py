"""Worlds that run one script on every member of a view: threads of this process, or processes."""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import os
import queue
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any, Protocol

from lockstep.collectives.contract import Communicator, PeerWait, WaitObserver, WaitPolicy
from lockstep.collectives.loopback import LoopbackCommunicator
from lockstep.collectives.network.communicator import NetworkCommunicator, ViewOfJob
from lockstep.collectives.network.lane import Link
from lockstep.collectives.network.last_call import LastCall
from lockstep.collectives.network.memory import NetworkBuffers
from lockstep.collectives.plan import HostPlan, ReducePlan
from lockstep.collectives.shared.buffers import Buffers
from lockstep.collectives.shared.communicator import SharedCommunicator
from lockstep.collectives.shared.control_segment import ControlSegment
from lockstep.collectives.shared.pool import SharedPool
from lockstep.system.clock import Clock, SystemClock
from lockstep.system.memory import available_memory
from lockstep.topology import View, place
from thread_hub import Hub

DEADLINE = 300.0


class TickingClock(SystemClock):
    """Advances by `step` seconds with every reading."""

    def __init__(self, step: float) -> None:
        self._step = step
        self._now = 0.0

    def now(self) -> float:
        self._now += self._step
        return self._now


@dataclasses.dataclass
class Member:
    """The argument of a script.

    Attributes:
        communicator: of this member.
        plan: of the view.
        rank: of this member among the view's workers.
        releases: how often the script has waited for a release.
    """

    communicator: Communicator
    plan: ReducePlan
    rank: int
    _await_release: Callable[[], object]
    releases: int = 0

    def proceed(self) -> None:
        """Wait until the test releases this member; each call needs a release of its own."""
        self._await_release()
        self.releases += 1


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a script ended on one member.

    Attributes:
        value: what the script returned.
        error: what it raised, if anything.
        message: of the error.
        waits: the reports on waits of this member.
        releases: how often the script waited for a release.
    """

    value: Any = None
    error: type[BaseException] | None = None
    message: str = ""
    waits: tuple[PeerWait, ...] = ()
    releases: int = 0


class Control(Protocol):
    """What a test can do to running members."""

    def release(self, rank: int) -> None: ...

    def abort(self, reason: str) -> None: ...

    def post_notice(self, notice: int) -> None: ...

    def signal(self, rank: int, number: int) -> None: ...


Listener = Callable[[Control, int, PeerWait], None]
Script = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of all members.

    Attributes:
        policy: how they wait.
        timeout_without: workers, and the timeout of all waits from the first one for exactly these on.
        clock_step: how far each reading advances the clock of the members; None for the system's clock.
        available: the bytes of memory that are available; None for those of the machine.
    """

    policy: WaitPolicy = dataclasses.field(default_factory=lambda: WaitPolicy(timeout=600.0))
    timeout_without: tuple[tuple[int, ...], float] | None = None
    clock_step: float | None = None
    available: int | None = None

    def note_wait(self, wait: PeerWait) -> None:
        """Shorten the timeout if the others have arrived."""
        if self.timeout_without is not None and wait.workers == self.timeout_without[0]:
            self.policy.timeout = self.timeout_without[1]


def plan_of(replicas: int, workers: Sequence[int] | int) -> ReducePlan:
    ids = tuple(range(workers)) if isinstance(workers, int) else tuple(workers)
    return ReducePlan.of(place(replicas, ids))


def _release_last(control: Control, plan: ReducePlan, ended: Collection[int], absent: Sequence[int]) -> None:
    if set(range(plan.members)) - set(ended) == set(absent):
        for rank in absent:
            control.release(rank)


def _check_releases(control: "_ReleaseCount", outcomes: dict[int, Outcome]) -> None:
    """Raise an error if a member was released more often than its script waited for it.

    A member process would read the surplus message as its next task.
    """
    for rank, outcome in outcomes.items():
        if outcome.error is not ProcessLookupError and outcome.releases != control.releases[rank]:
            raise AssertionError(
                f"member {rank} was released {control.releases[rank]} times, "
                f"but waited {outcome.releases} times"
            )


def perform(script: Script, member: Member, args: Sequence[Any], waits: list[PeerWait]) -> Outcome:
    try:
        value = script(member, *args)
    except BaseException as error:
        return Outcome(None, type(error), str(error), tuple(waits), member.releases)
    return Outcome(value, None, "", tuple(waits), member.releases)


class _ReleaseCount:
    """Counts the releases of each member."""

    def __init__(self) -> None:
        self.releases: Counter[int] = Counter()


class Threads:
    """Members are threads of this process, connected by a `Hub`; a single one needs none."""

    name = "loopback"

    def run(
        self,
        plan: ReducePlan,
        script: Script,
        *args: Any,
        settings: Settings | None = None,
        listen: Listener | None = None,
        absent: Sequence[int] = (),
    ) -> list[Outcome]:
        """Run `script` on all members; release the `absent` ones when the others have ended.

        Raises:
            AssertionError: a member was released more often than its script waited for it.
        """
        settings = settings or Settings()
        events: queue.Queue[tuple[int, PeerWait | Outcome]] = queue.Queue()
        rank_of = threading.local()
        waits: list[list[PeerWait]] = [[] for _ in plan.workers]

        def observe(waiting: PeerWait) -> None:
            settings.note_wait(waiting)
            waits[rank_of.value].append(waiting)
            events.put((rank_of.value, waiting))

        clock = TickingClock(settings.clock_step) if settings.clock_step else None
        control = _ThreadControl(Hub(plan, settings.policy, observe, clock))

        def serve_member(rank: int) -> None:
            rank_of.value = rank
            communicator = LoopbackCommunicator(plan) if plan.members == 1 else control.hub.member(rank)
            member = Member(communicator, plan, rank, control.gate(rank).acquire)
            events.put((rank, perform(script, member, args, waits[rank])))

        threads = [
            threading.Thread(target=serve_member, args=(rank,), daemon=True) for rank in range(plan.members)
        ]
        for thread in threads:
            thread.start()
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < plan.members:
            rank, event = events.get(timeout=DEADLINE)
            if isinstance(event, Outcome):
                outcomes[rank] = event
                _release_last(control, plan, outcomes, absent)
            elif listen:
                listen(control, rank, event)
        for thread in threads:
            thread.join()
        _check_releases(control, outcomes)
        return [outcomes[rank] for rank in range(plan.members)]

    def close(self) -> None:
        pass


class _ThreadControl(_ReleaseCount):
    def __init__(self, hub: Hub) -> None:
        super().__init__()
        self.hub = hub
        self._gates: dict[int, threading.Semaphore] = {}

    def gate(self, rank: int) -> threading.Semaphore:
        return self._gates.setdefault(rank, threading.Semaphore(0))

    def release(self, rank: int) -> None:
        self.releases[rank] += 1
        self.gate(rank).release()

    def abort(self, reason: str) -> None:
        self.hub.abort(reason)

    def post_notice(self, notice: int) -> None:
        self.hub.post_notice(notice)

    def signal(self, rank: int, number: int) -> None:
        raise NotImplementedError("threads receive no signals")


class Processes:
    """Members are processes that live as long as the world and join one view after another."""

    name = "shared memory"

    def __init__(self) -> None:
        self._members: list[tuple[subprocess.Popen[bytes], Connection]] = []

    def run(
        self,
        plan: ReducePlan,
        script: Script,
        *args: Any,
        settings: Settings | None = None,
        listen: Listener | None = None,
        absent: Sequence[int] = (),
    ) -> list[Outcome]:
        """Run `script` on all members; release the `absent` ones when the others have ended.

        Raises:
            AssertionError: a member was released more often than its script waited for it.
        """
        while len(self._members) < plan.members:
            self._members.append(_start())
        members = self._members[: plan.members]
        with contextlib.ExitStack() as stack:
            segments = []
            for host, ids in enumerate(self._hosts(plan)):
                segment, pool = ControlSegment.create(len(ids)), SharedPool.create()
                stack.callback(segment.close)
                stack.callback(pool.close)
                segments.append(segment)
                for worker in ids:
                    rank = plan.workers.index(worker)
                    process, connection = members[rank]
                    place = self._place(plan, host, rank)
                    connection.send((plan, rank, place, settings or Settings(), script, args))
                    send_handle(connection, segment.fd, process.pid)
                    send_handle(connection, pool.fd, process.pid)
            self._connect(plan, members)
            try:
                return self._listen(_ProcessControl(segments, members), plan, listen, absent)
            except BaseException:
                self.close()
                raise

    def _hosts(self, plan: ReducePlan) -> Sequence[Sequence[int]]:
        return [plan.workers]

    def _place(self, plan: ReducePlan, host: int, rank: int) -> "OnHost | None":
        return None

    def _connect(self, plan: ReducePlan, members: Sequence[tuple[Any, Connection]]) -> None:
        pass

    def _listen(
        self,
        control: "_ProcessControl",
        plan: ReducePlan,
        listen: Listener | None,
        absent: Sequence[int],
    ) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        end = time.monotonic() + DEADLINE
        while len(outcomes) < plan.members:
            running = {self._members[at][1]: at for at in range(plan.members) if at not in outcomes}
            ready = wait(list(running), timeout=end - time.monotonic())
            if not ready:
                raise TimeoutError(f"members {sorted(running.values())} do not end")
            for connection in ready:
                rank = running[connection]
                try:
                    event = connection.recv()
                except (EOFError, ConnectionResetError):
                    event = Outcome(error=ProcessLookupError, message="killed")
                    self._replace(rank)
                if isinstance(event, Outcome):
                    outcomes[rank] = event
                    control.spread_abort()
                    _release_last(control, plan, outcomes, absent)
                elif listen:
                    listen(control, rank, event)
        _check_releases(control, outcomes)
        return [outcomes[rank] for rank in range(plan.members)]

    def _replace(self, rank: int) -> None:
        process, connection = self._members[rank]
        process.wait()
        connection.close()
        self._members[rank] = _start()

    def close(self) -> None:
        for process, connection in self._members:
            process.kill()
            process.wait()
            connection.close()
        self._members.clear()


@dataclasses.dataclass(frozen=True)
class OnHost:
    """A member of a view over hosts.

    Attributes:
        view: the view.
        host: the index of its host.
        local: its index among the workers of its host.
        certificate: the path of a certificate and its key, if its connections use TLS.
    """

    view: View
    host: int
    local: int
    certificate: str

    @property
    def plan(self) -> HostPlan:
        return HostPlan.of(self.view, self.host)

    @property
    def peers(self) -> list[tuple[int, int]]:
        """The other hosts that this member has connections to, and the worker there."""
        if self.local >= self.plan.lanes:
            return []
        return [(host, self.view.hosts[host][self.local]) for host in self.plan.others]

    def communicator(
        self,
        segment: ControlSegment,
        pool: SharedPool,
        links: dict[int, Link],
        policy: WaitPolicy,
        observe: WaitObserver,
        clock: Clock | None,
        buffers: NetworkBuffers | None = None,
        last: LastCall | None = None,
    ) -> NetworkCommunicator:
        count = len(self.view.hosts)
        job = ViewOfJob(
            b"a job in a test.",
            1,
            self.view.number,
            tuple(range(100, 100 + count)),
            tuple(f"host {at}" for at in range(count)),
        )
        return NetworkCommunicator(
            segment,
            buffers or NetworkBuffers(pool),
            last or LastCall(),
            self.local,
            self.plan,
            job,
            links,
            policy,
            observe,
            clock,
        )


class Hosts(Processes):
    """Members are processes of several hosts, with a connection between each two that share a lane.

    Args:
        processes: the world whose processes become the members.
        spread: for a number of members, the number on each host.
        certificate: the path of a certificate and its key, if the connections use TLS.
    """

    name = "hosts"

    def __init__(
        self, processes: Processes, spread: Callable[[int], Sequence[int]], *, certificate: str = ""
    ) -> None:
        super().__init__()
        self._members = processes._members
        self._spread = spread
        self._certificate = certificate

    def _hosts(self, plan: ReducePlan) -> Sequence[Sequence[int]]:
        counts = self._spread(plan.members)
        assert sum(counts) == plan.members
        ends = list(itertools.accumulate(counts))
        return [plan.workers[end - count : end] for count, end in zip(counts, ends, strict=True)]

    def _place(self, plan: ReducePlan, host: int, rank: int) -> OnHost:
        hosts = tuple(tuple(ids) for ids in self._hosts(plan))
        local = hosts[host].index(plan.workers[rank])
        return OnHost(view_of(plan, hosts), host, local, self._certificate)

    def _connect(self, plan: ReducePlan, members: Sequence[tuple[Any, Connection]]) -> None:
        places = {}
        for host, ids in enumerate(self._hosts(plan)):
            for worker in ids:
                places[worker] = self._place(plan, host, plan.workers.index(worker))
        pairs = {(worker, peer): tcp_pair() for worker, at in places.items() for _, peer in at.peers}
        for worker, at in places.items():
            process, connection = members[plan.workers.index(worker)]
            for _, peer in at.peers:
                send_handle(connection, pairs[worker, peer][0].fileno(), process.pid)
                send_handle(connection, pairs[peer, worker][1].fileno(), process.pid)
        for pair in pairs.values():
            for each in pair:
                each.close()


def view_of(plan: ReducePlan, hosts: tuple[tuple[int, ...], ...]) -> View:
    owners = [worker for worker, span in zip(plan.workers, plan.owned, strict=True) for _ in range(*span)]
    return View(1, hosts, tuple(owners))


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Return the sending and the receiving end of a new connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
    for each in (sender, receiver):
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sender, receiver


def receive_links(connection: Connection, place: OnHost) -> dict[int, Link]:
    streams: dict[tuple[int, bool], socket.socket] = {}
    for host, _ in place.peers:
        for outgoing in (True, False):
            streams[host, outgoing] = socket.socket(fileno=recv_handle(connection))
    if place.certificate:
        streams = encrypt(streams, place.certificate)
    return {host: Link(streams[host, True], streams[host, False]) for host, _ in place.peers}


def encrypt(
    streams: dict[tuple[int, bool], socket.socket], certificate: str
) -> dict[tuple[int, bool], socket.socket]:
    """Make the handshakes of all streams at once: the other end also begins with any of them."""
    with concurrent.futures.ThreadPoolExecutor(max(1, len(streams))) as pool:
        wrapped = {key: pool.submit(_wrap, stream, key[1], certificate) for key, stream in streams.items()}
        return {key: future.result() for key, future in wrapped.items()}


def _wrap(stream: socket.socket, is_client: bool, certificate: str) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if is_client else ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(certificate)
    context.load_verify_locations(certificate)
    if not is_client:
        # The sending end never reads, so tickets would make its close a reset.
        context.num_tickets = 0
    return context.wrap_socket(stream, server_side=not is_client)


class _ProcessControl(_ReleaseCount):
    def __init__(
        self, segments: list[ControlSegment], members: list[tuple[subprocess.Popen[bytes], Connection]]
    ) -> None:
        super().__init__()
        self._segments = segments
        self._members = members

    def release(self, rank: int) -> None:
        self.releases[rank] += 1
        self._members[rank][1].send("proceed")

    def abort(self, reason: str) -> None:
        for segment in self._segments:
            segment.abort(reason)

    def spread_abort(self) -> None:
        """End the view on all hosts if it has ended on one, as the agents do."""
        for reason in filter(None, [segment.reason() for segment in self._segments]):
            self.abort(reason)

    def post_notice(self, notice: int) -> None:
        for segment in self._segments:
            segment.post_notice(notice)

    def signal(self, rank: int, number: int) -> None:
        process, _ = self._members[rank]
        process.send_signal(number)
        if number == signal.SIGKILL:
            # Like the agent, which reaps a dead member before it notifies the others.
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def _start() -> tuple[subprocess.Popen[bytes], Connection]:
    ours, theirs = Pipe()
    code = f"import collective_members; collective_members.serve({theirs.fileno()})"
    inherited = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    folders = [Path(__file__).parent, Path(__file__).parents[1], *inherited]
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code],
        pass_fds=[theirs.fileno()],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))},
    )
    theirs.close()
    return process, ours


def serve(fd: int) -> None:
    """Join one view after another, until the test ends."""
    connection = Connection(fd)
    with contextlib.suppress(EOFError):
        while True:
            _join_view(connection)


def _join_view(connection: Connection) -> None:
    plan, rank, place, settings, script, args = connection.recv()
    segment = ControlSegment.attach(recv_handle(connection))
    pool = SharedPool.attach(recv_handle(connection), lambda: settings.available or available_memory())
    waits: list[PeerWait] = []

    def observe(waiting: PeerWait) -> None:
        settings.note_wait(waiting)
        waits.append(waiting)
        connection.send(waiting)

    clock = TickingClock(settings.clock_step) if settings.clock_step else None
    communicator: Communicator
    if place is None:
        buffers = Buffers(pool)
        communicator = SharedCommunicator(segment, buffers, rank, plan, settings.policy, observe, clock)
    else:
        links = receive_links(connection, place)
        communicator = place.communicator(segment, pool, links, settings.policy, observe, clock)
    member = Member(communicator, plan, rank, connection.recv)
    outcome = perform(script, member, args, waits)
    communicator.close()
    segment.close()
    pool.close()
    connection.send(outcome)
