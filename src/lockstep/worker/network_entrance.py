"""How a worker enters the exchange of a view whose members are on several hosts."""

import atexit
import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lockstep.collectives.contract import WaitObserver, WaitPolicy
from lockstep.collectives.network.communicator import NetworkCommunicator, ViewOfJob
from lockstep.collectives.network.lane import Link
from lockstep.collectives.network.last_call import LastCall
from lockstep.collectives.network.memory import NetworkBuffers
from lockstep.collectives.plan import HostPlan
from lockstep.collectives.shared.control_segment import ControlSegment
from lockstep.collectives.shared.pool import SharedPool
from lockstep.errors import LockstepError, NetworkError, PeerStuckError
from lockstep.protocol.credentials import Credentials
from lockstep.protocol.greeting import ConnectionKind, Greeting
from lockstep.protocol.worker import AgentMessage, HostMembers, NetworkEndpoint, PeerConnected
from lockstep.system.environment import WorkerIdentity
from lockstep.system.notes import GATHERING_NOTE_EVERY
from lockstep.topology import View
from lockstep.transport.addresses import join_address
from lockstep.transport.dial import accept, dial
from lockstep.worker.agent_client import AgentClient

_LOOK_EVERY = 0.2


class _Abandoned(Exception):
    """The view ended before the connections were complete."""


class NetworkEntrance:
    """Enters the exchanges of a job over hosts, one after another, and keeps objects that outlive them.

    Args:
        identity: the identity of this worker.
        job: the id of the job.
        credentials: the credentials of this worker.
        pool: the memory that all workers on this host share.
        client: the connection to the agent.
        policy: how this worker waits for others.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        job: bytes,
        credentials: Credentials,
        pool: SharedPool,
        client: AgentClient,
        policy: WaitPolicy,
    ) -> None:
        self._identity = identity
        self._job = job
        self._credentials = credentials
        self._client = client
        self._policy = policy
        self._buffers = NetworkBuffers(pool)
        self._last = LastCall()
        if not identity.joins:
            self._last.number = 0
        self._current: NetworkCommunicator | None = None
        self._endpoint: NetworkEndpoint | None = None
        # This is never closed, because a thread that connects for an earlier view may still write to it.
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # The others may still be receiving the last bytes of a call that is complete here.
        atexit.register(self._leave, os.getpid())

    def enter(
        self, view: View, endpoint: NetworkEndpoint, segment: ControlSegment, observe: WaitObserver
    ) -> NetworkCommunicator | AgentMessage:
        """Return this worker's end of the exchange of `view`.

        Returns:
            Or the message with which the agent ends the view before all connections are complete.

        Raises:
            NetworkError: another host cannot be reached.
            PeerStuckError: a worker on another host has not connected in time.
        """
        plan, self._endpoint = HostPlan.of(view, endpoint.here), endpoint
        local = plan.workers_here.index(self._identity.worker)
        links: Mapping[int, Link] = {}
        if local < plan.lanes:
            connected = LaneConnector(
                job=self._job,
                credentials=self._credentials,
                endpoint=endpoint,
                view=view.number,
                lane=local,
                arrived=self._client.connections(view.number),
                receive=self._client.receive_any,
                wake=self._wake,
                observe=self._client.waiting,
                patience=self._policy.timeout,
            ).connect()
            if not isinstance(connected, Mapping):
                return connected
            links = connected
        of_job = ViewOfJob(
            self._job,
            endpoint.term,
            view.number,
            tuple(host.incarnation for host in endpoint.hosts),
            tuple(host.name for host in endpoint.hosts),
        )
        self._current = NetworkCommunicator(
            segment=segment,
            buffers=self._buffers,
            last=self._last,
            local=local,
            hosts=plan,
            view=of_job,
            links=links,
            policy=self._policy,
            observe=observe,
        )
        return self._current

    def look_at(self, endpoint: NetworkEndpoint) -> None:
        """Let `dial` connect to the workers of a view that this worker enters later."""
        self._endpoint = endpoint

    def dial(self, worker: int) -> Callable[[], socket.socket] | None:
        """Return a function that connects to a worker of the current view; see `worker.peers.Peers`."""
        assert self._endpoint is not None
        hosts, here = self._endpoint.hosts, self._endpoint.here
        host = next(members for members in hosts if worker in members.workers)
        if host is hosts[here]:
            return None
        greeting = Greeting(
            ConnectionKind.QUESTIONS,
            self._job,
            incarnation=hosts[here].incarnation,
            host=hosts[here].host,
            lane=worker,
            receiver=host.host,
        )
        address = join_address((host.address, host.port))
        return lambda: dial(address, greeting, self._credentials, self._policy.timeout)

    def accept(self, connection: socket.socket) -> socket.socket:
        """Complete a connection from a worker of another host that has used `dial`.

        Raises:
            NetworkError: the worker is not in this job, or does not respond in time.
        """
        return accept(connection, self._credentials, self._policy.timeout)

    def _leave(self, pid: int) -> None:
        # A child that the script has forked has copies of the connections.
        if self._current is not None and os.getpid() == pid:
            self._current.close()


@dataclass
class LaneConnector:
    """Opens the connections of one worker in one view.

    Attributes:
        job: the id of the job.
        credentials: the credentials of this worker.
        endpoint: the endpoint of the view.
        view: its number.
        lane: the lane of this worker.
        arrived: the connections of the view that have arrived.
        receive: waits for a message of the agent, for a number of seconds at most, or until a descriptor is
            readable.
        wake: an eventfd that is never closed.
        observe: called during a long wait, with a description of what it waits for, the workers, and the
            seconds.
        patience: seconds until this gives up.
    """

    job: bytes
    credentials: Credentials
    endpoint: NetworkEndpoint
    view: int
    lane: int
    arrived: Sequence[PeerConnected]
    receive: Callable[[float, int], AgentMessage | None]
    wake: int
    observe: Callable[[str, tuple[int, ...], float], None]
    patience: float
    _results: "queue.SimpleQueue[tuple[int, bool, socket.socket | LockstepError]]" = field(
        default_factory=queue.SimpleQueue
    )
    _abandoned: bool = False

    def connect(self) -> Mapping[int, Link] | AgentMessage:
        """Return the connections to each other host, by its index in the view.

        Returns:
            Or the message with which the agent ends the view before they are complete.

        Raises:
            NetworkError: another host cannot be reached.
            PeerStuckError: a worker on another host has not connected in time.
        """
        hosts, here = self.endpoint.hosts, self.endpoint.here
        ends: dict[int, dict[bool, socket.socket]] = {at: {} for at, _ in enumerate(hosts) if at != here}
        for at in ends:
            self._start(self._dial, at, hosts[at])
        for connected in self.arrived:
            self._take(connected)
        begun = said = time.monotonic()
        try:
            while missing := [at for at, pair in ends.items() if len(pair) < 2]:
                message = self.receive(_LOOK_EVERY, self.wake)
                if isinstance(message, PeerConnected):
                    self._take(message)
                elif message is not None:
                    self._abandon(ends)
                    return message
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self.wake)
                while not self._results.empty():
                    at, outgoing, result = self._results.get()
                    if isinstance(result, LockstepError):
                        raise result
                    ends[at][outgoing] = result
                now = time.monotonic()
                self._check_wait(missing, now - begun)
                if now - said >= GATHERING_NOTE_EVERY:
                    said = now
                    self._report(missing, ends, now - begun)
        except BaseException:
            self._abandon(ends)
            raise
        return {at: Link(outgoing=pair[True], incoming=pair[False]) for at, pair in ends.items()}

    def _take(self, connected: PeerConnected) -> None:
        if connected.view == self.view:
            hosts = enumerate(self.endpoint.hosts)
            at = next(at for at, host in hosts if host.host == connected.host)
            if connected.connection.is_missing:
                raise NetworkError(
                    "a connection from another host was lost, because this worker has too many open files"
                )
            self._start(self._accept, at, socket.socket(fileno=connected.connection.take()))

    def _start(self, act: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=act, args=arguments, name="connect", daemon=True).start()

    def _dial(self, at: int, host: HostMembers) -> None:
        here = self._host_here
        greeting = Greeting(
            kind=ConnectionKind.LANE,
            job=self.job,
            term=self.endpoint.term,
            view=self.view,
            incarnation=here.incarnation,
            host=here.host,
            lane=self.lane,
            receiver=host.host,
        )
        address = join_address((host.address, host.port))
        self._finish(at, True, lambda: dial(address, greeting, self.credentials, self.patience, self._check))

    @property
    def _host_here(self) -> HostMembers:
        return self.endpoint.hosts[self.endpoint.here]

    def _accept(self, at: int, connection: socket.socket) -> None:
        self._finish(at, False, lambda: accept(connection, self.credentials, self.patience, self._check))

    def _finish(self, at: int, outgoing: bool, connect: Callable[[], socket.socket]) -> None:
        try:
            connection = connect()
        except LockstepError as error:
            names = (self._host_here.name, self.endpoint.hosts[at].name)
            text = f"the connection from {names[not outgoing]} to {names[outgoing]} failed: {error}"
            self._results.put((at, outgoing, type(error)(text)))
        except _Abandoned:
            return
        else:
            self._results.put((at, outgoing, connection))
        os.eventfd_write(self.wake, 1)

    def _check(self) -> None:
        if self._abandoned:
            raise _Abandoned

    def _abandon(self, ends: Mapping[int, Mapping[bool, socket.socket]]) -> None:
        self._abandoned = True
        for pair in ends.values():
            for connection in pair.values():
                connection.close()

    def _check_wait(self, missing: list[int], waited: float) -> None:
        if waited >= self.patience:
            names = " and ".join(self.endpoint.hosts[at].name for at in missing)
            raise PeerStuckError(f"no connection to {names} within {self.patience:.0f} s")

    def _report(
        self, missing: list[int], ends: Mapping[int, Mapping[bool, socket.socket]], waited: float
    ) -> None:
        workers = []
        places = []
        for at in missing:
            host = self.endpoint.hosts[at]
            workers.append(host.workers[self.lane])
            if True not in ends[at]:
                address = join_address((host.address, host.port))
                places.append(f"{host.name} at {address} (a firewall must let TCP connections to it through)")
        here = self._host_here
        awaited = (
            f"the connection from {here.name} to {' and '.join(places)}"
            if places
            else f"connections to {here.name}"
        )
        self.observe(awaited, tuple(workers), waited)
