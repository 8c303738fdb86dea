"""The process of the coordinator of a job over hosts: begins the job, or takes it over.

A coordinator that takes over asks the agents for their standing. It continues from the newest record of the
job that an agent has, and then receives the reports that the record does not contain.
"""

import math
import os
import select
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TypeVar

import msgspec
import psutil

from lockstep.checkpoint.mirror import open_leased
from lockstep.checkpoint.object_store import SHORT_RETRY_SECONDS
from lockstep.coordinator.admin_socket import AdminSocket
from lockstep.coordinator.coordinator import HOLDERS, Coordinator, ShowLife
from lockstep.coordinator.host_agent import HostAgent
from lockstep.coordinator.job_record import HostRecord, JobRecord, decode_record, newest, without_excess
from lockstep.coordinator.notifications import notified
from lockstep.coordinator.requests import WAITS
from lockstep.errors import (
    CheckpointError,
    ConfigError,
    LockstepError,
    SupersededError,
    UnfitError,
    with_code,
)
from lockstep.hosts.gathering import Stopped
from lockstep.hosts.leadership import Leader
from lockstep.hosts.standby import continues_at, is_led_at
from lockstep.observability.bus import Bus, PublishedEvent, Subscriber
from lockstep.observability.console import Console
from lockstep.observability.event_log import recorded
from lockstep.observability.events import OrderRecorded
from lockstep.observability.exports import Exports, exported
from lockstep.parameter_server.order import ReceivedOrders
from lockstep.protocol.admin import (
    AdminRequest,
    Refused,
    Reply,
    Status,
    StatusRequest,
    StopChannel,
    StopRequest,
)
from lockstep.protocol.channel import Attachment, Channel, PeerGone, Unreadable
from lockstep.protocol.coordinator import (
    Coordinate,
    CoordinatorCommand,
    CoordinatorReport,
    HostChannel,
    HostDropped,
    JobEnded,
    JobEnds,
    RecordMade,
)
from lockstep.protocol.host import (
    ALIVE_EVERY,
    LEFT_OUT,
    MOST_QUEUED,
    SILENCE,
    AgentStanding,
    HostEnded,
    HostReport,
    Instruction,
    KeepAlive,
    KeepRecord,
    RepeatReports,
    ShowNote,
    StartView,
    TakeOver,
)
from lockstep.protocol.job_spec import JobSpec
from lockstep.system.clock import SystemClock
from lockstep.system.event_loop import EventLoop, wait_for
from lockstep.system.exit_status import STOP_SIGNALS, signal_name
from lockstep.system.notes import note
from lockstep.system.output import Sink
from lockstep.system.paths import RunPaths
from lockstep.transport.local_channel import LocalChannel
from lockstep.transport.packet_channel import PacketChannel
from lockstep.transport.stream_channel import StreamChannel

_PATIENCE = 10.0
"""Seconds that the keeper has to take a record."""
_PAUSE = 2.0
"""Seconds from one try to write to the store to the next."""

AgentChannel = Channel[Instruction, HostReport]
Message = TypeVar("Message", Coordinate, HostChannel)
Result = TypeVar("Result")


def stand(channels: Mapping[int, AgentChannel], term: int, clock: SystemClock) -> dict[int, AgentStanding]:
    """Begin a term: return the standing of each agent that answers before it counts as silent.

    Reports that arrive meanwhile are not lost: agents send them again.
    """
    waits = dict(channels)
    for channel in channels.values():
        channel.send(TakeOver(term))
    standings: dict[int, AgentStanding] = {}
    until = clock.now() + SILENCE
    while waits and (left := until - clock.now()) > 0:
        wait_for([channel.fileno() for channel in waits.values()], left)
        for host, channel in list(waits.items()):
            while (report := channel.receive()) is not None:
                match report:
                    case AgentStanding() if report.term == term:
                        standings[host] = report
                        del waits[host]
                        break
                    case PeerGone() | Unreadable():
                        del waits[host]
                        break
    return standings


def continued(
    record: HostRecord, channel: AgentChannel, standing: AgentStanding | None, kept: KeepRecord | None
) -> HostAgent:
    """Return the agent of a host as a coordinator continues with it.

    Args:
        record: the record of the host.
        channel: the channel to its agent.
        standing: the standing of the agent; None if it did not answer.
        kept: the newest record, in the form for agents; None if this agent does not keep it.
    """
    # Four numbers decide how to go on. The record has two: how many reports of the agent the state contains,
    # and how many instructions the agent was sent. The agent has two: how many instructions it has taken
    # (`standing.received`), and how many reports it no longer has (`standing.acknowledged`).
    agent = HostAgent(
        channel,
        record.name,
        record.peer,
        remote=True,
        received=record.received,
        sent=record.sent,
        outbox=deque(record.outbox),
    )
    if record.lost:
        agent.ended = HostEnded()
    elif standing is None or standing.received > record.sent:
        # An agent that has more instructions than the newest record contains cannot follow it.
        agent.channel = gone()
    else:
        if kept is not None and kept != standing.kept:
            # As always, the record precedes the instructions that follow from it.
            channel.send(kept)
        agent.received = max(record.received, standing.acknowledged)
        channel.send(RepeatReports(agent.received))
        agent.take_over(standing.received)
    return agent


def gone() -> AgentChannel:
    """Return a channel whose other end is closed."""
    closed, its_end = LocalChannel.pair()
    its_end.close()
    return closed


@dataclass
class CoordinatorProcess:
    """Runs one coordinator.

    Attributes:
        keeper: the channel to the process that keeps the connections of the job.
        loop: serves everything.
    """

    keeper: Channel[CoordinatorReport, CoordinatorCommand]
    loop: EventLoop
    _late: deque[tuple[HostChannel, HostAgent]] = field(default_factory=deque)
    _turned: bool = False
    _announced: bool = False
    _alive_due: float = 0.0
    _old_stops: int = 0
    _leader: Leader | None = None
    _contested: bool = False
    _leads: bool = False
    _patience: float = 0.0
    _grace: float = 0.0
    _clock: SystemClock = field(default_factory=SystemClock)
    _postponed: deque[tuple[CoordinatorCommand | Unreadable, float]] = field(default_factory=deque)
    _requests: AdminSocket | None = None
    _unanswered: UnfitError | None = None
    _requested: tuple[StopRequest, float] | None = None

    def run(self) -> int:
        """Coordinate the job to its end; return its exit status.

        Raises:
            UnfitError: it cannot continue the job.
            Stopped: the user has stopped it before it could know whether it leads the job.
            SystemExit: the keeper has ended.
        """
        first = self._next(Coordinate)
        hosts = [self._next(HostChannel) for _ in range(first.hosts)]
        channels = {host.host: _channel(host) for host in hosts}
        first_kept = msgspec.structs.replace(first.kept, record=first.record.content())
        # Other records of the job name the same store.
        spec = _decoded(first_kept).spec
        self._contested = bool(spec.standby) and first.kept.term > 0
        self._leader = leader = self._leader_of(spec, first.address)
        if (listener := _listener(first.requests)) is not None:
            answer = partial(self._answer, first, _decoded(first_kept))
            try:
                self._requests = AdminSocket.over(listener, answer)
            except UnfitError as error:
                self._unanswered = error

        def show_life() -> StopRequest | None:
            self.keeper.send(KeepAlive())
            for channel in channels.values():
                channel.send(KeepAlive())
            if self._requests is not None:
                self._requests.serve()
            return None

        if leader is not None:
            term = self._persist(partial(leader.look, first.term), show_life)
            first = msgspec.structs.replace(first, term=term)
        standings = stand(channels, first.term, SystemClock()) if first.term > 1 else {}
        kept = newest((first_kept, *(standing.kept for standing in standings.values())))
        assert kept is not None
        record, has_begun = _decoded(kept), kept.term > 0
        self._old_stops = record.stops
        # Hosts that have joined since then come after those of the record.
        late = tuple(HostRecord(host.name, host.peer) for host in hosts[len(record.hosts) :])
        sent, holders = without_excess(kept), range(HOLDERS) if has_begun else range(0)
        agents = [
            continued(host_record, channels[host], standings.get(host), sent if host in holders else None)
            if first.term > 1
            else HostAgent(channels[host], host_record.name, host_record.peer, remote=True)
            for host, host_record in enumerate((*record.hosts, *late))
        ]
        if leader is not None and has_begun:
            following = [host for host, agent in enumerate(agents) if host in standings and not agent.is_gone]
            self._persist(partial(leader.take_over, first.term, following), show_life)
        elif leader is not None:
            # The standby may have taken over the job since the command began.
            if leader.other == spec.standby:
                leads = partial(is_led_at, spec.standby, encrypted=not spec.plain)
                if self._persist(leads, show_life):
                    raise ConfigError(continues_at(spec.standby))
            self._persist(partial(leader.begin, first.term), show_life)
        self._leads, self._contested = True, leader is not None
        begins = len(record.hosts)
        self._late.extend(zip(hosts[begins:], agents[begins:], strict=True))
        clock = SystemClock(record.at) if has_begun else SystemClock()
        return self._coordinate(first, record, agents[:begins], clock, has_begun)

    def leaves(self, error: Exception) -> bool:
        """Return whether another coordinator leads, or may lead, the job after an error of this one."""
        if not self._contested or (self._leader is not None and self._leader.is_replaced):
            return False
        return isinstance(error, CheckpointError) or not self._leads

    def _answer(self, first: Coordinate, record: JobRecord, request: AdminRequest) -> Reply:
        """Answer another terminal before this process can know whether it leads the job."""
        match request:
            case StopRequest():
                self._requested = self._requested or (request, self._clock.now())
            case StatusRequest():
                pass
            case _:
                return Refused(WAITS)
        assert self._requests is not None
        state, pid = record.state, psutil.Process(os.getppid()).ppid()
        return Status(
            job=self._requests.name,
            script=record.spec.target,
            pid=pid,
            run_dir=str(Path(first.run_dir).absolute()),
            since=record.since or psutil.Process(pid).create_time(),
            replicas=record.spec.replicas,
            workers=state.members,
            joining=state.joiners,
            wanted=state.size.wanted,
            where=record.doing,
        )

    def _next(self, kind: type[Message]) -> Message:
        while True:
            wait_for([self.keeper.fileno()])
            match message := self.keeper.receive():
                case PeerGone():
                    sys.exit(1)
                case _ if isinstance(message, kind):
                    return message

    def _coordinate(
        self,
        first: Coordinate,
        record: JobRecord,
        agents: list[HostAgent],
        clock: SystemClock,
        has_begun: bool,
    ) -> int:
        spec = replace(record.spec, run_dir=Path(first.run_dir))
        paths = RunPaths(spec.run_dir.absolute())
        console = Console(Sink(1), Sink(2), spec.tee, record.state.view.chief)
        user, command = LocalChannel.pair()
        events = Bus(clock, complain=console.say)
        events.subscribe(_taken_into(ReceivedOrders(paths.orders)), OrderRecorded)
        members, exports = record.state.view.workers, _exports(first)
        with (
            recorded(events, paths, console.say),
            exported(events, exports, spec.labels, len(members), note),
            notified(events, exports.notifier, paths, spec.replicas, members),
        ):
            coordinator = Coordinator(
                spec=spec,
                paths=paths,
                # The keeper is a child of the command.
                pid=psutil.Process(os.getppid()).ppid(),
                agents=agents,
                command=command,
                loop=self.loop,
                console=console,
                events=events,
                clock=clock,
                state=record.state,
                before_loss=self._end_without_keeper,
                when_lost=self._drop,
                keep=self._keep,
                announce=self._begin_view if self._leader is not None else None,
                notifies=first.notifies,
                term=first.term,
                record=record if has_begun else None,
                requests=self._requests or self._unanswered,
            )
            self.loop.before_each_wait(lambda: self._tend(coordinator, user))
            self.loop.watch(self.keeper.fileno(), lambda: self._hear(coordinator, user))
            return coordinator.run()

    def _keep(self, made: KeepRecord) -> None:
        # A packet is in the kernel when this returns: it outlives this process.
        kept = msgspec.structs.replace(made, record=b"")
        self.keeper.send(RecordMade(kept, Attachment.holding(made.record)), _PATIENCE)

    def _leader_of(self, spec: JobSpec, address: str) -> Leader | None:
        """Return what decides whether this coordinator leads the job; None if there can be no other one."""
        lease = spec.checkpoints.store if spec.checkpoints is not None else None
        if not spec.standby or lease is None:
            return None
        self._patience, self._grace = spec.limits.timeout, spec.limits.grace
        return Leader(open_leased(lease, SHORT_RETRY_SECONDS), lease.job, address)

    def _begin_view(self, view: StartView, show_life: ShowLife, limit: float) -> StopRequest | None:
        assert self._leader is not None
        hosts = [members.host for members in view.hosts]

        def all_alive() -> StopRequest | None:
            self.keeper.send(KeepAlive())
            return show_life()

        try:
            self._persist(partial(self._leader.begin_view, view.term, view.number, hosts), all_alive, limit)
        except Stopped as stopped:
            return StopRequest(stopped.signal)
        return None

    def _persist(self, act: Callable[[], Result], show_life: ShowLife, limit: float = math.inf) -> Result:
        """Write to the store, or read from it, until it answers or the limit has passed; return the result.

        Args:
            act: writes or reads; called in a thread.
            show_life: called every second; returns a stop that another terminal has requested.
            limit: the seconds that are left to a job that the user has stopped already; infinite otherwise.
                A job that the user stops during this or an earlier wait has `--grace` for all of them, and
                ends at the second signal.

        Raises:
            CheckpointError: the store has not answered in time; SupersededError if another one leads the job.
            Stopped: the user has stopped the job, and the store has not answered.
        """
        clock, told = self._clock, set[str]()
        begun = clock.now()
        # These are the end of the grace period, and the signals of the user.
        until, signals = begun + limit, [int(signal.SIGTERM)] if limit < math.inf else []

        def tell(why: str) -> None:
            if why not in told and not signals:
                told.add(why)
                note(f"{why}; the next change of workers waits for it, for up to {self._patience:g} s")

        def heed(stop: StopRequest, since: float) -> None:
            nonlocal until
            signals.append(stop.signal)
            until = min(until, since - stop.waited + self._grace)

        def look() -> None:
            self._end_without_keeper()
            before = len(signals)
            if (requested := show_life()) is not None and not signals and self._requested is None:
                self._requested = requested, clock.now()
            if self._requested is not None and not signals:
                heed(*self._requested)
            if not told and clock.now() - begun >= SILENCE:
                tell(f"the object store has not answered for {SILENCE:g} s")
            for stop, since in self._postpone():
                heed(stop, since)
            if signals and not before:
                note(
                    f"stopping ({signal_name(signals[0])}): waiting up to "
                    f"{max(0.0, round(until - clock.now(), 1)):g} s for the object store, which decides "
                    "whether this coordinator leads the job; Ctrl-C again ends the job at once"
                )
            if len(signals) > 1:
                raise Stopped(signals[-1])
            if clock.now() >= until:
                raise Stopped(signals[0])

        for message, since in self._postponed:
            if isinstance(message, StopRequest):
                heed(message, since)
        if self._requested is not None and not signals:
            heed(*self._requested)

        while True:
            done: Future[Result] = Future()
            threading.Thread(target=_settle, args=(done, act), daemon=True).start()
            while not wait([done], ALIVE_EVERY).done:
                look()
            try:
                return done.result()
            except SupersededError:
                raise
            except CheckpointError as error:
                if (waited := clock.now() - begun) >= self._patience:
                    raise CheckpointError(
                        f"for {waited:.0f} s, this coordinator cannot know whether it leads the job, and "
                        f"ends: {error}"
                    ) from None
                tell(str(error))
                look()
                wait_for([self.keeper.fileno()], _PAUSE)

    def _postpone(self) -> list[tuple[StopRequest, float]]:
        """Keep the keeper's messages for later; return the new stops, and the time of each."""
        stops, now = [], self._clock.now()
        while (message := self.keeper.receive()) is not None:
            if isinstance(message, PeerGone):
                sys.exit(1)
            self._postponed.append((message, now))
            if isinstance(message, StopRequest):
                stops.append((message, now))
        return stops

    def _drop(self, host: int) -> None:
        self.keeper.send(HostDropped(host))

    def _end_without_keeper(self) -> None:
        """End this process if the keeper, and so all connections, have ended.

        In this case, no host is lost, and the job has not ended: another coordinator may take it over.
        """
        poll = select.poll()
        poll.register(self.keeper.fileno(), 0)
        if poll.poll(0):
            sys.exit(1)

    def _hear(self, coordinator: Coordinator, user: StopChannel) -> None:
        while True:
            now = self._clock.now()
            message, since = self._postponed.popleft() if self._postponed else (self.keeper.receive(), now)
            match message:
                case None:
                    return
                case HostChannel():
                    agent = HostAgent(_channel(message), message.name, message.peer, remote=True)
                    self._late.append((message, agent))
                case ShowNote(text):
                    coordinator.console.say(text)
                case StopRequest() if self._old_stops:
                    # The record contains it.
                    self._old_stops -= 1
                case StopRequest():
                    user.send(message.after(now - since))
                case PeerGone():
                    sys.exit(1)

    def _tend(self, coordinator: Coordinator, user: StopChannel) -> float:
        """Admit hosts that have joined, report when no more can join, and show that this process is alive."""
        if not self._turned:
            # The first turn of the loop finds losses, which came before.
            self._turned = True
            return 0.0
        if self._postponed:
            self._hear(coordinator, user)
        if self._requested is not None:
            (stop, since), self._requested = self._requested, None
            coordinator.stop_for_terminal(stop.after(self._clock.now() - since))
            return 0.0
        while self._late:
            host, agent = self._late.popleft()
            coordinator.add_host(agent, host.workers, host.cores)
        if coordinator.is_over and not self._announced:
            self._announced = True
            self.keeper.send(JobEnds())
        if (now := coordinator.clock.now()) >= self._alive_due:
            self._alive_due = now + ALIVE_EVERY
            self.keeper.send(KeepAlive())
        return self._alive_due - now


def _channel(host: HostChannel) -> AgentChannel:
    if host.channel is None:
        return gone()
    connection = socket.socket(fileno=host.channel.take())
    return StreamChannel.over(connection, HostReport, None, accepted=False, most_queued=MOST_QUEUED)


def _settle(done: "Future[Result]", act: Callable[[], Result]) -> None:
    try:
        done.set_result(act())
    except BaseException as error:
        done.set_exception(error)


def _decoded(kept: KeepRecord) -> JobRecord:
    try:
        return decode_record(kept.record)
    except ValueError as error:
        raise UnfitError(f"no other coordinator can take over: {error}") from None


def _listener(requests: Attachment | None) -> socket.socket | None:
    return None if requests is None or requests.is_missing else socket.socket(fileno=requests.take())


def _exports(first: Coordinate) -> Exports:
    def taken(descriptor: Attachment | None) -> int | None:
        return None if descriptor is None or descriptor.is_missing else descriptor.take()

    folder = None if first.tensorboard is None else Path(first.tensorboard)
    return Exports(folder, taken(first.metrics), taken(first.notifier))


def _no_op(number: int, frame: FrameType | None) -> None:
    """Do nothing, because the keeper passes on the signals that the user sends."""


def main(descriptor: int) -> int:
    """Run the coordinator whose keeper is at the other end of the socket `descriptor`."""
    for number in STOP_SIGNALS:
        signal.signal(number, _no_op)
    keeper: PacketChannel[CoordinatorReport, CoordinatorCommand] = PacketChannel(
        socket.socket(fileno=descriptor), CoordinatorCommand
    )
    with EventLoop() as loop:
        process = CoordinatorProcess(keeper, loop)
        try:
            ended = JobEnded(process.run())
        except (LockstepError, OSError) as error:
            note(with_code(error))
            ended = JobEnded(LEFT_OUT if process.leaves(error) else 2, with_code(error))
        except Stopped as stopped:
            text = f"stopped by {signal_name(stopped.signal)} while the store did not answer"
            note(text)
            ended = JobEnded(128 + stopped.signal, text)
    keeper.send(ended)
    return ended.status


def _taken_into(orders: ReceivedOrders) -> Subscriber:
    """Return a function that writes parts of orders as they arrive."""

    def take(published: PublishedEvent) -> None:
        assert isinstance(published.event, OrderRecorded)
        orders.append(published.event.name, published.event.number, published.event.data)

    return take


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
