"""The process of an agent on a host other than that of the coordinator.

An agent whose `ssh` connection ends kills all processes of the job on its host, and so does the process that
watches it. In a job with a standby, the agent looks for a coordinator there instead. Slurm tasks share a
terminal, so only the coordinator writes notes there. The tasks get signals at the same time, so an agent
leaves the end to the coordinator, whose last checkpoint needs the workers of all hosts.
"""

import contextlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar, cast

import msgspec

from lockstep.agent.agent import Agent
from lockstep.agent.starter import LocalStarter
from lockstep.agent.worker_output import ForwardedOutput
from lockstep.errors import ConfigError
from lockstep.hosts.agent_place import AgentPlace
from lockstep.hosts.coordinator_session import MOST_KEPT, CoordinatorSession
from lockstep.hosts.engine_link import EngineLink
from lockstep.hosts.facts import own_facts
from lockstep.hosts.gathering import heed_stop
from lockstep.hosts.host_listener import HostListener
from lockstep.hosts.joining import CoordinatorAddress, CoordinatorDialer
from lockstep.hosts.shared_checkpoints import AgentCheckpoints
from lockstep.hosts.standby import Standby
from lockstep.hosts.where import GATHERING
from lockstep.launcher.fork_server import ForkServerPlan
from lockstep.launcher.gpu_assignment import spread
from lockstep.launcher.launcher import LocalLauncher
from lockstep.local_job.composition import LocalHost, start_agent
from lockstep.observability.console import Console
from lockstep.protocol.admin import StopChannel, StopRequest
from lockstep.protocol.channel import Channel, PeerGone, Unreadable
from lockstep.protocol.host import (
    ALIVE_EVERY,
    LEFT_OUT,
    SILENCE,
    BeginJob,
    CheckpointPart,
    HostFacts,
    HostOffer,
    HostReport,
    HostRetires,
    HostStopped,
    Instruction,
    KeepAlive,
    Prepare,
    RemoteInstruction,
    RemoteReport,
    RunningJob,
    SendCheckpoint,
    TakeCheckpoint,
)
from lockstep.protocol.job_spec import JobSpec
from lockstep.protocol.rendezvous import Arrival, KeepWaiting, Rejected
from lockstep.system.clock import Clock
from lockstep.system.descendants import LinuxDescendants
from lockstep.system.environment import shared_variables, take_environment, visible_gpus
from lockstep.system.event_loop import EventLoop
from lockstep.system.notes import note
from lockstep.system.output import Sink
from lockstep.system.paths import RunPaths
from lockstep.system.run_folder import empty_folder, gone_if_refused
from lockstep.transport.stream_channel import StreamChannel

_BEHIND = 1 << 20
"""Bytes in the queue of the coordinator beyond which workers wait with their output."""

_REPEAT = 60.0
"""Seconds from one note that training waits to the next."""

_STARTING = 60.0
"""Seconds that the coordinator may take to start on a busy host before a note says that it is silent."""

_GIVEN_UP = 10.0
"""Seconds of silence after which the agents of a job with a standby leave their coordinator."""

_UNTIL_ENDED = 5.0
"""Seconds from the last checkpoint of a stopped job to its end."""

_REFUSED = (
    "the coordinator closed the connection after the greeting: it has another key or another version of "
    "Lockstep, only one side has --plain, or it has just ended; its terminal says which"
)
_MOVED = "the engine has started another coordinator"
_PLAIN = "; use one version of Lockstep on all hosts, and --plain for all commands of the job or for none"

Message = TypeVar("Message", Prepare, BeginJob)


class CoordinatorGone(Exception):
    """The connection to the coordinator has ended or is silent, or this agent was stopped in the job."""


class HostRefused(CoordinatorGone):
    """The coordinator closed the connection before it sent anything."""


class LeftBehind(CoordinatorGone):
    """The job continues, or begins, without this host, which may join it as a new host."""


class LeftOut(ConfigError):
    """The job does not let this host join now; it may try again later."""


class HostWorkers(Protocol):
    """How an agent gets the workers of its host."""

    def facts(self, prepare: Prepare, address: str, port: int) -> HostFacts:
        """Return the facts of this host, which accepts connections at an address and a port."""

    def begin(self, begin: BeginJob, output: ForwardedOutput) -> LocalHost:
        """Return a `LocalHost` with which the agent gets workers; its network does not matter."""

    def need_coordinator(self) -> bool:
        """Return whether this host should wait for a coordinator that was lost."""


@dataclass
class StartedWorkers:
    """Workers that the agent starts; a `HostWorkers`.

    Attributes:
        folder: an existing folder for files that the workers of this host share.
        loop: serves the terminal.
        shows: whether the terminal of this process shows their output too.
        inherited: descriptors that they inherit; they get the numbers as last arguments.
        children: process ids of the children of this process that are not workers.
    """

    folder: Path
    loop: EventLoop
    shows: bool = False
    inherited: tuple[int, ...] = ()
    children: set[int] = field(default_factory=set)

    def facts(self, prepare: Prepare, address: str, port: int) -> HostFacts:
        """Take the environment and the folder of the job, and return the facts of this host."""
        problem = ""
        take_environment({**dict.fromkeys(shared_variables()), **prepare.environment})
        try:
            if prepare.folder:
                os.chdir(prepare.folder)
        except OSError as error:
            problem = (
                f"the folder {prepare.folder} cannot be used: {error.strerror}; the job runs in the same "
                "folder on every host"
            )
        return own_facts(prepare, address, port, problem)

    def begin(self, begin: BeginJob, output: ForwardedOutput) -> LocalHost:
        """Return a starter of processes."""
        name, here = begin.here
        first = begin.first_slot
        spec = replace(
            begin.spec,
            run_dir=self.folder,
            devices=spread(visible_gpus(), here),
            inherited=self.inherited,
            arguments=(*begin.spec.arguments, *map(str, self.inherited)),
        )
        paths = RunPaths(self.folder)
        empty_folder(paths.sources)
        launcher = LocalLauncher(ForkServerPlan.of(spec))
        launcher.prepare()
        if self.shows:
            output.console = console = Console(Sink(1), Sink(2), "chief" if here == 1 else "all", first)
            self.loop.before_each_wait(lambda: self._watch(console))
        starter = LocalStarter(
            spec=spec,
            paths=paths,
            pid=os.getpid(),
            launcher=launcher,
            output=output,
            first_slot=first,
            host=name,
        )
        return LocalHost(output, starter, LinuxDescendants(self.children))

    def need_coordinator(self) -> bool:
        """Return True, because the next coordinator decides on lost workers."""
        return True

    def _watch(self, console: Console) -> None:
        for sink in console.sinks:
            self.loop.watch_if(sink.pending > 0, sink.descriptor, sink.flush, writes=True)


@dataclass
class _Silence:
    """Detects that the coordinator has become silent."""

    channel: StreamChannel[RemoteReport, RemoteInstruction]
    clock: Clock
    _received: int = -1
    _heard: float = 0.0

    def use(self, channel: StreamChannel[RemoteReport, RemoteInstruction]) -> None:
        """From now on, listen to another channel."""
        self.channel, self._received = channel, -1

    def seconds(self) -> float:
        """Return the time for which nothing has arrived; exact only if this is called often."""
        now = self.clock.now()
        if self.channel.received != self._received:
            self._received, self._heard = self.channel.received, now
        return now - self._heard

    def check(self, patience: float, error: type[CoordinatorGone] = CoordinatorGone) -> None:
        """Raise `error` if the coordinator has been silent for longer than `patience` seconds.

        Raises:
            CoordinatorGone: nothing has ever arrived from the coordinator.
        """
        if self.seconds() <= patience:
            return
        if not self.channel.received:
            raise CoordinatorGone(
                f"nothing has arrived from the address of the coordinator for {patience:g} s: another "
                "program listens there, or the coordinator is stopped"
            )
        raise error(f"the coordinator has been silent for {patience:g} s")


@dataclass
class AgentProcess:
    """Serves one job on this host.

    Attributes:
        channel: the channel to the coordinator.
        command: the channel to the process that watches this one.
        loop: serves everything.
        clock: for deadlines.
        listen: returns where this process accepts connections of workers of other hosts.
        workers: the workers of this host.
        folder: an existing folder for files that the workers of this host share.
        joined: whether this agent has joined the coordinator over the network.
        waits: called with a text on what the coordinator waits for.
        begins: called when this host takes part in a job.
        say: shows a note to the users of this host.
        address: the address of the coordinator, to connect again; None if that is impossible.
        grace: seconds that the job may take for a checkpoint after a signal, if the coordinator gets each
            signal too and ends the job; None to leave the job at once.
        first: the first process that a user has started on this host by hand; None if this starts workers.
        engine: the engine that has started this process, and tells it the address of the coordinator; None if
            that is fixed.
        patience: seconds that this host waits for a silent coordinator before the job begins.
        again: whether this host has already joined the coordinator. Then silence at its address means that it
            is stopped, not that another program listens there.
        standby: starts another coordinator on this host if the job has a standby; None if it cannot have one.
            Its owner keeps it after `LeftBehind`: the coordinator may be the one that this host joins again.
        begun: whether the job has begun.
    """

    channel: StreamChannel[RemoteReport, RemoteInstruction]
    command: StopChannel
    loop: EventLoop
    clock: Clock
    listen: Callable[[Prepare], HostListener]
    workers: HostWorkers
    folder: Path
    joined: bool = False
    waits: Callable[[str], None] = lambda awaited: None
    begins: Callable[[BeginJob], None] = lambda begin: None
    say: Callable[[str], None] = note
    address: CoordinatorAddress | None = None
    grace: float | None = None
    first: Arrival | None = None
    engine: EngineLink | None = None
    patience: float = GATHERING
    again: bool = False
    standby: Standby | None = None
    begun: bool = field(default=False, init=False)

    def run(self) -> int:
        """Serve the job to its end; return its exit status.

        Raises:
            ConfigError: this host cannot take part; `LeftOut` if it may try again later.
            CoordinatorGone: the connection to the coordinator ended, or this agent was stopped in the job;
                `LeftBehind` if this host may join again, `HostRefused` if it never joined.
            Stopped: this agent was stopped before the job began.
        """
        try:
            prepare = self._receive_one(Prepare)
            with contextlib.closing(self.listen(prepare)) as listener:
                facts = self.workers.facts(prepare, *listener.host_and_port)
                checkpoints = AgentCheckpoints.of(prepare, self.channel, self.loop, self.clock)
                with gone_if_refused(checkpoints.folder), contextlib.closing(checkpoints):
                    checkpoints.describe(facts, prepare.job)
                    begin = checkpoints.placed(self._receive_one(BeginJob, checkpoints))
                self.begun = True
                if self.address is None and begin.spec.standby:
                    # The connection of an agent over ssh cannot be made again.
                    self.address = CoordinatorAddress(begin.spec.standby, listener.credentials, self.loop)
                self.begins(begin)
                return self._serve(begin, prepare, listener)
        finally:
            self.channel.flush(1.0)
            self.channel.close()

    def _receive_one(self, kind: type[Message], checkpoints: AgentCheckpoints | None = None) -> Message:
        """Wait for a message, until the coordinator or this process's command ends.

        Until the hosts are complete, a host that can connect to the coordinator again does so. Later, the
        coordinator would give up the job if a connection ended, so this host keeps the connection.
        """
        self.loop.watch(self.channel.fileno(), lambda: None)
        self.loop.watch(self.command.fileno(), lambda: None)
        silence, due, noted = _Silence(self.channel, self.clock), self.clock.now(), False
        connects = kind is Prepare and self.address is not None
        error = LeftBehind if connects else CoordinatorGone
        try:
            while True:
                match received := self.channel.receive():
                    case PeerGone():
                        if self.joined and not self.channel.received:
                            raise HostRefused(_REFUSED)
                        raise error("the connection to the coordinator ended")
                    case Unreadable(why):
                        hint = _PLAIN if self.joined and kind is Prepare else ""
                        raise CoordinatorGone(f"the coordinator sent an invalid message: {why}{hint}")
                    case Rejected(reason, again):
                        raise LeftOut(reason) if again else ConfigError(reason)
                    case KeepWaiting(awaited):
                        self.waits(awaited)
                    case SendCheckpoint() | TakeCheckpoint() | CheckpointPart() as about if checkpoints:
                        checkpoints.serve(about)
                    case message if isinstance(message, kind):
                        return message
                heed_stop(self.command)
                if self.address is not None and self.coordinator_moved_from(self.address):
                    raise LeftBehind(_MOVED)
                if (now := self.clock.now()) >= due:
                    due = now + ALIVE_EVERY
                    self.channel.send(KeepAlive())
                    leaves = connects and (self.channel.received or not self.again)
                    silence.check(SILENCE if leaves else self.patience, error)
                    if silence.seconds() > SILENCE and not noted and self.address is not None:
                        noted = True
                        self.say(
                            f"the coordinator has been silent for {SILENCE:g} s; this host waits for up "
                            f"to {self.patience:g} s"
                        )
                busy = checkpoints is not None and checkpoints.advance()
                self.loop.turn(0.0 if busy or received is not None else max(0.0, due - now))
        finally:
            self.loop.unwatch(self.channel.fileno())
            self.loop.unwatch(self.command.fileno())

    def coordinator_moved_from(self, address: CoordinatorAddress) -> bool:
        """Return whether the engine has started a coordinator other than the one at an address."""
        return self.engine is not None and self.engine.coordinator != address.address

    def _serve(self, begin: BeginJob, prepare: Prepare, listener: HostListener) -> int:
        loop, channel = self.loop, self.channel
        session = CoordinatorSession(self.clock)
        # From now on, both ends use only these messages.
        session.attach(cast("Channel[HostReport, Instruction]", channel))
        output = ForwardedOutput(session, lambda: channel.queued > _BEHIND or session.output > MOST_KEPT)
        local = replace(
            self.workers.begin(begin, output),
            host=begin.host,
            name=begin.here.name,
            network=listener.network(prepare.job),
        )
        late = begin.host >= len(begin.spec.hosts)
        if (standby := self.standby) is not None:
            standby.follow(prepare, begin, listener.host_and_port[0])
            if lacks := standby.lacks():
                self.say(lacks)

        def say(text: str) -> None:
            if standby is None or not standby.runs:
                # Otherwise, the coordinator of this host shows it.
                self.say(text)

        agent = start_agent(local, begin.spec, session, loop, late=late, say=say)
        loop.watch(self.command.fileno(), lambda: None)
        running, patience = partial(self._offer, session, prepare, begin), begin.spec.limits.timeout
        leaves, retires, stop = math.inf, False, 0
        with (
            contextlib.closing(agent),
            self._take_place(prepare.job, begin.spec) as agent_place,
            contextlib.closing(
                _Contact(self, session, agent, agent_place, patience=patience, offer=running, standby=standby)
            ) as contact,
        ):
            while not agent.ended:
                loop.turn(contact.serve())
                now = self.clock.now()
                if self.engine is not None and self.engine.retires and not retires:
                    reason = f"host {begin.here.name} retires: {self.engine.retires}"
                    retires = session.send(HostRetires(begin.host, reason))
                match self.command.receive():
                    case None:
                        pass
                    case StopRequest(stop) if self.grace is not None and leaves == math.inf:
                        leaves = now + self.grace + _UNTIL_ENDED
                        if standby is not None:
                            # The coordinator of this host gets no signals.
                            standby.stop(stop)
                    case StopRequest(stop):
                        leaves = now
                    case _:
                        leaves = now
                if now >= leaves:
                    if stop:
                        session.send(HostStopped(begin.host, stop))
                    raise CoordinatorGone("this agent was stopped")
            if self.engine is not None and agent.status != LEFT_OUT:
                self.engine.tell_end(agent.status)
            if output.console is not None:
                output.console.end_lines()
                output.console.flush()
            self.channel.see_off(SILENCE)
            if standby is not None:
                standby.see_off()
            return agent.status

    def _take_place(self, job: bytes, spec: JobSpec) -> contextlib.AbstractContextManager[AgentPlace | None]:
        """Return the place of this agent, or None if an engine ensures that a host has only one agent."""
        if self.engine is not None:
            return contextlib.nullcontext()
        decides = spec.checkpoints.location if spec.standby and spec.checkpoints is not None else ""
        return contextlib.closing(AgentPlace(job, self.loop, decides))

    def _offer(self, session: CoordinatorSession, prepare: Prepare, begin: BeginJob) -> HostOffer:
        """Return the offer to a coordinator process that is started again."""
        job = RunningJob(msgspec.structs.replace(prepare, key=""), begin.host, session.kept)
        return HostOffer(begin.here.workers, self.first, running=job)


@dataclass
class _Contact:
    """The contact of an agent with the coordinator of its job, which may be lost and return.

    Attributes:
        process: the process of the agent.
        session: the session with the coordinator.
        agent: the agent of this host.
        agent_place: the place of the agent on its host; None if an engine ensures that a host has one agent.
        patience: seconds without a coordinator after which the job ends on this host.
        offer: returns the first message to a coordinator process that is started again.
        standby: starts another coordinator on this host; None if the job has no standby.
    """

    process: AgentProcess
    session: CoordinatorSession
    agent: Agent
    agent_place: AgentPlace | None
    patience: float
    offer: Callable[[], HostOffer]
    standby: Standby | None = None
    _dialer: CoordinatorDialer | None = None
    _due: float = 0.0
    _noted: bool = False
    _repeat: float = 0.0
    _limit: float = _STARTING
    _starts_after: int = 0
    _moved: bool = False
    _replaces: bool = False

    def __post_init__(self) -> None:
        self._silence = _Silence(self.process.channel, self.process.clock)

    def close(self) -> None:
        """End the attempts to connect."""
        if self._dialer is not None:
            self._dialer.close()

    def serve(self) -> float:
        """Keep the contact; return the seconds until this must be called again.

        Raises:
            CoordinatorGone: there is no coordinator, and none is expected.
        """
        address, engine = self.process.address, self.process.engine
        if address is not None and engine is not None and self.process.coordinator_moved_from(address):
            # The previous coordinator, if it is alive, is not the coordinator any more.
            address.address = engine.coordinator
            self.session.leave(_MOVED)
        if self.session.lost:
            self._seek()
            if self.standby is not None and self.session.lost and self._silence.seconds() > SILENCE:
                self.standby.start(self.process.clock.now())
        if (now := self.process.clock.now()) >= self._due:
            self._due = now + ALIVE_EVERY
            self.session.keep_alive()
            self._judge(now)
            if self.session.lost and not self.process.workers.need_coordinator():
                raise CoordinatorGone("no process remains on this host, and there is no coordinator")
        return self._due - now

    def _judge(self, now: float) -> None:
        seconds, pauses = self._silence.seconds(), self.agent.pauses(now)
        # Notes may precede the start of the coordinator.
        if self.session.lost or self.session.received:
            self._limit = SILENCE
        if seconds <= ALIVE_EVERY and not self.session.lost and not pauses:
            self._noted, self._repeat = False, 0.0
            # An agent over ssh cannot return to a first command that has started another agent here, and must
            # remember that until the standby leads the job.
            returned = self.process.joined or (self._moved and self.session.leads)
            if self.agent_place is not None and returned:
                self.agent_place.is_wanted = False
        if pauses:
            self._note(f"the coordinator has not answered for {self.agent.spec.hold:g} s", seconds)
        if self.agent_place is not None and self.session.leads and not self._replaces:
            self._replaces = True
            self.agent_place.replace_other_jobs()
        if self.agent.spec.standby and not self.session.lost and seconds > self._given_up:
            self.session.leave(f"the coordinator has been silent for {seconds:.0f} s")
        if seconds <= min(self._limit, self.patience):
            if self.session.lost and self.agent.lacks_workers:
                self._note(self.session.lost, seconds)
            return
        if self.agent_place is not None and self.agent_place.is_wanted:
            raise CoordinatorGone("another agent of this host has replaced this one")
        self._note(self.session.lost or f"the coordinator has been silent for {seconds:.0f} s", seconds)
        self._silence.check(self.patience)

    @property
    def _given_up(self) -> float:
        """Seconds of silence after which this agent leaves a coordinator, if there is a standby."""
        if not self.process.channel.received:
            # The host accepts connections, but its process is stopped.
            return SILENCE
        starts = self.session.term == self._starts_after
        return _STARTING if starts else max(self._limit, _GIVEN_UP)

    def _note(self, event: str, seconds: float) -> None:
        """Note that the coordinator is gone: once until it returns, or repeatedly if this host waits.

        Args:
            event: a description of the event.
            seconds: the seconds since something has arrived from the coordinator.
        """
        now = self.process.clock.now()
        if self.agent.spec.hold is None and self.agent.lacks_workers:
            if now < self._repeat:
                return
            self._repeat = now + _REPEAT
            where = f" at {self.process.address.address}" if self.process.address is not None else ""
            standby = self.agent.spec.standby
            again = "run the command of its host, or the tasks there, again"
            if self.standby is not None and self.standby.replaces_command:
                again = f"{standby} takes over"
            elif standby:
                again = f"{standby} takes over, or {again}"
            does = (
                f"a worker is lost too, so training waits for the coordinator{where}: {again} within "
                f"{self.patience - seconds:.0f} s, or the job ends on this host"
            )
        elif self._noted:
            return
        else:
            trains = "continues while no worker is lost"
            if self.agent.spec.hold is not None:
                trains = "pauses until one answers"
            limit = f"{self.patience:g} s without a coordinator"
            does = f"training {trains}, and ends on this host after {limit}"
        self._noted = True
        self.process.say(f"{event}; {does}")

    def _seek(self) -> None:
        """Connect again to the address of the coordinator."""
        process, session = self.process, self.session
        if session.rejected:
            raise LeftBehind(session.rejected)
        if process.address is None:
            # The agent reports this, and ends.
            session.give_up()
            return
        if self._dialer is None:
            self._dialer = process.address.dial()
        if (connection := self._dialer.take()) is None:
            return
        self._dialer.close()
        self._dialer = None
        process.channel.close()
        process.channel = channel = process.address.channel(connection)
        channel.send(self.offer())
        # From now on, both ends use only these messages.
        session.attach(cast("Channel[HostReport, Instruction]", channel))
        self._starts_after, self._moved = session.term, True
        self._silence.use(channel)
