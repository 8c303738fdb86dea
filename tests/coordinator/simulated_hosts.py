"""A job on many hosts in one process and in virtual time: the real coordinator, and agents that only answer.

Channels have the contract of those between hosts, and count the bytes of messages as these encode them. Each
host has one worker. Nothing waits: time passes when all have nothing to do.
"""

import heapq
import itertools
import os
import random
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agent_reports import exited, said, script_ended

from lockstep.coordinator.coordinator import Coordinator
from lockstep.coordinator.host_agent import HostAgent, PeerAddress
from lockstep.hosts.coordinator_session import CoordinatorSession
from lockstep.hosts.gathering import AwaitedHost
from lockstep.hosts.keeper import ConnectedHost
from lockstep.hosts.newcomers import Newcomers
from lockstep.observability.bus import Bus
from lockstep.observability.console import Console
from lockstep.observability.event_log import EventLog
from lockstep.observability.events import (
    RUN_EVENTS,
    DistributionBegan,
    JoinRequested,
    StrategyInstalled,
    WorkerReady,
    WorkerStarted,
)
from lockstep.protocol.channel import PeerGone
from lockstep.protocol.host import (
    ALIVE_EVERY,
    UNNUMBERED,
    AskMembers,
    BeginJob,
    EndHost,
    HostEnded,
    HostFacts,
    KeepAlive,
    KillWorker,
    Prepare,
    SendPosition,
    SendState,
    SignalWorker,
    StartView,
    StartWorker,
    StateArrived,
    WorkerSaid,
)
from lockstep.protocol.job_spec import JobHost, JobLimits, JobSpec
from lockstep.protocol.worker import EventReport, Notice, StateGiven, StateSource
from lockstep.supervisor.state import JobSize, State, TimeLimits
from lockstep.system.event_loop import EventLoop
from lockstep.system.output import Sink
from lockstep.system.paths import RunPaths
from lockstep.transport.local_channel import LocalChannel
from lockstep.transport.packet_channel import encode
from virtual_clock import VirtualClock

LATENCY = 1e-3
"""Seconds that a message takes."""
STEP = 0.05
"""Seconds of a step."""
STATE = 11_000_000
"""Bytes of the state."""
BANDWIDTH = 1e9
"""Bytes per second from the host of the chief, for all that fetch the state."""
STARTING = (2.0, 6.0)
"""Seconds from the start of a worker until it asks for the position."""
CATCHING_UP = (1.0, 2.0)
"""Seconds from the position until it asks to join."""
_FIRST_DESCRIPTOR = 1 << 20


@dataclass
class Traffic:
    """What the coordinator has sent and received, and the processor time that it has used.

    Attributes:
        sent: the number of messages of each type to agents.
        sent_bytes: their bytes.
        received: the number of messages of agents.
        seconds: processor time of the coordinator; each message is encoded once.
    """

    sent: Counter[str] = field(default_factory=Counter)
    sent_bytes: Counter[str] = field(default_factory=Counter)
    received: int = 0
    seconds: float = 0.0


class VirtualLoop(EventLoop):
    """An event loop in virtual time, for channels of `Network`.

    Attributes:
        clock: of all.
        traffic: since the last `take_traffic`.
    """

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self.clock = clock
        self.traffic = Traffic()
        self._handlers: dict[int, Callable[[], object]] = {}
        self._channels: dict[int, CoordinatorEnd] = {}
        self._ready: dict[int, None] = {}
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self._in_coordinator_since = time.process_time()
        self._sized: tuple[Any, int] = (None, 0)

    def size_of(self, message: Any) -> int:
        """Return the bytes of a message, which may be the last one."""
        if message is not self._sized[0]:
            self._sized = message, len(encode(message))
        return self._sized[1]

    def take_traffic(self) -> Traffic:
        """Return the traffic since the last call."""
        self._note_time()
        taken, self.traffic = self.traffic, Traffic()
        return taken

    def _note_time(self) -> None:
        now = time.process_time()
        self.traffic.seconds += now - self._in_coordinator_since
        self._in_coordinator_since = now

    def watch(self, descriptor: int, call: Callable[[], object], *, writes: bool = False) -> None:
        self._handlers.setdefault(descriptor, call)
        if descriptor in self._channels and self._channels[descriptor].is_readable:
            self.set_ready(descriptor)

    def unwatch(self, descriptor: int) -> None:
        self._handlers.pop(descriptor, None)

    def after(self, seconds: float, call: Callable[[], object]) -> None:
        """Call `call` when so much time has passed."""
        heapq.heappush(self._queue, (self.clock.now() + seconds, next(self._order), call))

    def add(self, channel: "CoordinatorEnd") -> None:
        self._channels[channel.fileno()] = channel

    def set_ready(self, descriptor: int) -> None:
        self._ready[descriptor] = None

    def turn(self, seconds: float | None) -> None:
        limits = [limit for call in self._before if (limit := call()) is not None]
        limits += [] if seconds is None else [seconds]
        until = self.clock.now() + max(0.0, min(limits)) if limits else float("inf")
        self._note_time()
        if not self._ready:
            self._let_time_pass(until)
        self._in_coordinator_since = time.process_time()
        for descriptor in list(self._ready):
            if descriptor in self._handlers:
                self._handlers[descriptor]()
            if descriptor not in self._handlers or not self._channels[descriptor].is_readable:
                self._ready.pop(descriptor, None)

    def _let_time_pass(self, until: float) -> None:
        assert self._queue or until < float("inf"), "the job waits forever"
        at = min(until, self._queue[0][0] if self._queue else until)
        self.clock.advance(max(0.0, at - self.clock.now()))
        while self._queue and self._queue[0][0] <= at:
            heapq.heappop(self._queue)[2]()


class CoordinatorEnd:
    """The coordinator's end of a channel to the agent of a host."""

    def __init__(self, loop: VirtualLoop, descriptor: int, deliver: Callable[[Any], None]) -> None:
        self._loop = loop
        self._descriptor = descriptor
        self._deliver = deliver
        self._inbox: deque[Any] = deque()
        self._gone = False
        loop.add(self)

    @property
    def is_readable(self) -> bool:
        return bool(self._inbox) or self._gone

    def send(self, message: Any, patience: float = 0.0) -> bool:
        if self._gone:
            return False
        kind, traffic = type(message).__name__, self._loop.traffic
        traffic.sent[kind] += 1
        traffic.sent_bytes[kind] += self._loop.size_of(message)
        self._loop.after(LATENCY, lambda: self._deliver(message))
        return True

    def receive(self) -> Any:
        if self._inbox:
            self._loop.traffic.received += 1
            return self._inbox.popleft()
        return PeerGone() if self._gone else None

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        self._gone = True

    def put(self, message: Any) -> None:
        """Let a message of the agent arrive."""
        if not self._gone:
            self._inbox.append(message)
            self._loop.set_ready(self._descriptor)

    def break_off(self) -> None:
        """Let the connection end."""
        self._gone = True
        self._loop.set_ready(self._descriptor)


class SimulatedHost:
    """The agent of a host, and its worker."""

    def __init__(self, job: "ManyHosts", number: int) -> None:
        self._job = job
        self._number = number
        self.name = f"host{number}"
        self.channel = CoordinatorEnd(job.loop, _FIRST_DESCRIPTOR + number, self._obey)
        self.address = PeerAddress(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", 40000, number + 1)
        self.view: StartView | None = None
        self.worker: int | None = None
        self.alive = True
        self.silent = False
        self._notice = Notice.NOTHING
        self._states = 0
        self._report_due = False
        self._received = 0
        job.loop.after(job.dice.uniform(0.0, ALIVE_EVERY), self._keep_alive)

    def _keep_alive(self) -> None:
        if self.alive:
            if not self.silent:
                self.channel.put(KeepAlive(self._received))
            self._job.loop.after(ALIVE_EVERY, self._keep_alive)

    def die(self) -> None:
        """End with all processes."""
        self.alive = False
        self.channel.break_off()

    def fall_silent(self) -> None:
        """Be cut off."""
        self.alive = False

    def tell(self, report: Any, after: float = LATENCY) -> None:
        def arrive() -> None:
            if self.alive:
                self.channel.put(report)

        self._job.loop.after(after, arrive)

    def _obey(self, message: Any) -> None:
        if not self.alive:
            return
        self._received += not isinstance(message, (*UNNUMBERED, Prepare, BeginJob))
        match message:
            case Prepare():
                self.tell(facts(self))
            case StartView():
                self.tell(KeepAlive(self._received))
                self._start_view(message)
            case StartWorker(worker, joins):
                self.worker = worker
                self.tell(EventReport(WorkerStarted(worker, 1)))
                self.tell(said(WorkerReady(worker)))
                if joins:
                    starting = self._job.dice.uniform(*STARTING)
                    self.tell(said(JoinRequested(worker, whole=False)), starting)
                else:
                    self.tell(WorkerSaid(worker, EventReport(StrategyInstalled("none"))))
                    self.tell(WorkerSaid(worker, EventReport(DistributionBegan())))
            case SendPosition(worker):
                catching_up = self._job.dice.uniform(*CATCHING_UP)
                self.tell(said(JoinRequested(worker, whole=True)), catching_up)
            case AskMembers(notice):
                self._notice = notice
                self._report_at_step_end()
            case SendState(host, source):
                self.tell(StateArrived(host, source.view), self._job.transfer_seconds(source.size))
            case SignalWorker(worker, number):
                self.tell(exited(worker, -number))
            case KillWorker(worker):
                self.tell(exited(worker, -signal.SIGKILL))
            case EndHost():
                self.tell(HostEnded())

    def _start_view(self, view: StartView) -> None:
        self.view, self._notice, self._states = view, view.notice, 0
        self._job.begun(self, view)
        self._report_at_step_end()

    def _report_at_step_end(self) -> None:
        if not self._report_due and self.view is not None and self.worker == self.view.workers[0]:
            self._report_due = True
            self._job.loop.after(STEP, self._report_state)

    def _report_state(self) -> None:
        self._report_due = False
        if self.alive and self._notice is not Notice.NOTHING and self.view is not None:
            whole = self._notice is Notice.CHANGE
            self._states += 1
            size = STATE if whole else 1000
            source = StateSource(self.view.number, self._states, size, self._number, *self.address[:2])
            self.tell(StateGiven(self.view.number, whole, source=source))


def facts(host: SimulatedHost) -> HostFacts:
    address, port, incarnation = host.address
    return HostFacts(host.name, "3.11", "x86_64", {}, 1, "script", address, port, incarnation)


class ManyHosts:
    """A job on `count` hosts, of which `members` are there from the beginning.

    Attributes:
        hosts: all hosts that have ever been there.
        loop: serves all.
        coordinator: the real one.
        views: the numbers of the views that the coordinator has begun, and when.
        dice: draws times.
    """

    def __init__(self, folder: Path, count: int, members: int) -> None:
        self.dice = random.Random(0)
        self.clock = VirtualClock(1000.0)
        self.loop = VirtualLoop(self.clock)
        self.hosts = [SimulatedHost(self, number) for number in range(members)]
        self.views: dict[int, float] = {}
        self._ends: list[Callable[[], object]] = []
        self._fetching = 0.0
        names = tuple(JobHost(host.name, 1) for host in self.hosts)
        spec = JobSpec(
            target="a.py",
            workers=members,
            replicas=count,
            threads=1,
            run_dir=folder,
            hosts=names,
            limits=JobLimits(max_restarts=count),
        )
        agents = [HostAgent(host.channel, host.name, host.address, remote=True) for host in self.hosts]
        command, self._command = LocalChannel.pair()
        null = os.open(os.devnull, os.O_WRONLY)
        console = Console(Sink(null), Sink(null), "chief", 0)
        bus = Bus(self.clock)
        log = EventLog.open(RunPaths(folder).events, print)
        bus.subscribe(log.append, *RUN_EVENTS)
        state = State.of(
            spec.view,
            TimeLimits(),
            JobSize.of(members, 1, count),
            names=tuple(host.name for host in self.hosts),
        )
        # As if the hosts that are not there had been lost.
        state = replace(state, size=JobSize.of(count, 1, count))
        self.coordinator = Coordinator(
            spec, RunPaths(folder), os.getpid(), agents, command, self.loop, console, bus, self.clock, state
        )
        prepare = Prepare(bytes(16), "", True, "a.py", False, (), None, "", {})
        self._newcomers = Newcomers(spec, prepare, facts(self.hosts[0]), console.say, self.loop, self.clock)
        self.coordinator.when_lost = self._newcomers.note_loss
        self._newcomers.serve(self._admit, lambda: self.coordinator.is_over)
        self._ends = [log.close, self._command.close, lambda: os.close(null), self.loop.close]

    def _admit(self, host: ConnectedHost) -> None:
        assert not isinstance(host.agent, CoordinatorSession | None)
        agent = HostAgent(host.agent, host.name, host.peer, remote=True)
        self.coordinator.add_host(agent, host.workers, host.cores)

    def arrive(self, seconds: float) -> None:
        """Let one more host join after `seconds`."""

        def connect() -> None:
            host = SimulatedHost(self, len(self.hosts))
            self.hosts.append(host)
            self._newcomers.consider(AwaitedHost(host.name, host.channel, lambda: "it was lost"), 1)

        self.loop.after(seconds, connect)

    def begun(self, host: SimulatedHost, view: StartView) -> None:
        """Note that a host has received a view."""
        self.views.setdefault(view.number, self.clock.now())

    def transfer_seconds(self, size: int) -> float:
        """Return when the host of the chief has sent the state once more."""
        now = self.clock.now()
        self._fetching = max(self._fetching, now) + size / BANDWIDTH
        return self._fetching - now

    def run(self, scenario: Iterator[Callable[[], bool]]) -> int:
        """Run the job to its end; return its exit status.

        Args:
            scenario: continues at the end of the turn in which what it has yielded holds.
        """
        awaited: list[Callable[[], bool]] = [next(scenario)]

        def advance() -> None:
            while awaited and awaited[0]():
                awaited[:] = itertools.islice(scenario, 1)

        self.loop.before_each_wait(advance)
        try:
            return self.coordinator.run()
        finally:
            for end in self._ends:
                end()

    def has(self, workers: int) -> bool:
        """Whether the newest view has so many workers, and all living hosts have it."""
        newest = self.coordinator.state.view
        return len(newest.workers) == workers and all(
            host.view is not None and host.view.number == newest.number for host in self.hosts if host.alive
        )

    def finish(self) -> None:
        """Let the script end on all workers."""
        for host in self.hosts:
            if host.alive and host.worker is not None:
                host.tell(script_ended(host.worker))
                host.tell(exited(host.worker, 0), 2 * LATENCY)
