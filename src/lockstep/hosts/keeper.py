"""Keeps the connections of a job over hosts, and runs its coordinator in a separate process.

The agents of other hosts are connected to this process, and the agent of this host runs in it. If the
coordinator is lost, this process starts another one, which takes over. No worker notices.
"""

import contextlib
import os
import socket
import subprocess
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from lockstep.coordinator.admin_socket import take_name
from lockstep.errors import UnfitError
from lockstep.hosts.coordinator_session import CoordinatorSession
from lockstep.observability.console import Console
from lockstep.observability.exports import NO_EXPORTS, Exports
from lockstep.protocol.admin import StopChannel, StopRequest
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
    EndHost,
    HostReport,
    Instruction,
    KeepAlive,
    KeepRecord,
    PeerAddress,
    ShowNote,
)
from lockstep.system.child_process import command_of, connected
from lockstep.system.clock import Clock
from lockstep.system.event_loop import EventLoop
from lockstep.system.exit_status import describe_exit
from lockstep.transport.packet_channel import PacketChannel
from lockstep.transport.stream_channel import StreamChannel

_PATIENCE = 10.0
"""Seconds that a new coordinator has to take what it is sent."""
_STUCK = 30.0
"""Seconds without a heartbeat of the coordinator until it is killed and replaced; disks may be slow."""
_MOST_LOSSES = 20
_WITHIN = 60.0
"""A coordinator that is lost more than `_MOST_LOSSES` times within these seconds is not started again."""
_LAST_MESSAGES = 1.0
"""Seconds for the last messages of a lost agent to reach the coordinator."""


@dataclass
class ConnectedHost:
    """A host of the job.

    Attributes:
        name: the name of the host.
        peer: the address for workers of other hosts.
        workers: the number of workers that it should have.
        cores: number of its cores.
        agent: the channel to its agent, or the session of the agent in this process; None after its loss.
    """

    name: str
    peer: PeerAddress | None
    workers: int
    cores: int
    agent: Channel[Instruction, HostReport] | CoordinatorSession | None
    _up: StreamChannel[HostReport, Instruction] | None = None


@dataclass
class Keeper:
    """Runs the coordinators of one job, one after the other.

    Attributes:
        kept: the record of the job before it begins, of term 0, or the newest one of a job that agents have
            continued without a coordinator.
        hosts: the hosts of the job, by their index.
        command: the channel over which the job is stopped.
        loop: serves everything.
        clock: for deadlines.
        console: shows notes of this process.
        run_dir: the run folder, as the user wrote it.
        children: process ids of the children of this process that are not workers.
        notifies: whether the agents show notes.
        when_lost: called with the index of each host that is lost.
        exports: the exports of the coordinators.
        address: HOST:PORT to which agents connect; empty if they do not.
        shows_life: whether the agents of other hosts learn that this process is alive. In a job with a
            standby, they leave a silent host, but not one whose coordinator is being replaced.
        is_over: whether the end of the job is decided, so that no host can join.
        leads: whether a coordinator of this process has led the job.
    """

    kept: KeepRecord
    hosts: list[ConnectedHost]
    command: StopChannel
    loop: EventLoop
    clock: Clock
    console: Console
    run_dir: str
    children: set[int]
    notifies: bool = False
    when_lost: Callable[[int], None] = lambda host: None
    exports: Exports = NO_EXPORTS
    address: str = ""
    shows_life: bool = False
    is_over: bool = field(default=False, init=False)
    leads: bool = field(default=False, init=False)
    _process: "subprocess.Popen[bytes] | None" = None
    _coordinator: PacketChannel[CoordinatorCommand, CoordinatorReport] | None = None
    _requests: socket.socket | None = None
    _pidfd: int = -1
    _status: int | None = None
    _stops: list[tuple[StopRequest, float]] = field(default_factory=list)
    _losses: deque[float] = field(default_factory=deque)
    _alive_due: float = 0.0
    _heard: float = 0.0
    _left: bool = False

    def __post_init__(self) -> None:
        self._term = self.kept.term

    def run(self) -> int:
        """Run the job to its end; return its exit status.

        Raises:
            UnfitError: no coordinator can be started, or several are lost in a row.
        """
        self.loop.watch(self.command.fileno(), self._hear_command)
        self.loop.before_each_wait(self._tend)
        # The name of the job outlives a coordinator: its clients wait for the next one. Without the name, the
        # coordinator reports why.
        with contextlib.suppress(UnfitError):
            self._requests = take_name(Path(self.run_dir).absolute().name)
        try:
            self._start()
            while self._status is None and not self._left:
                self.loop.turn(None)
            return self._status if self._status is not None else 1
        except UnfitError as error:
            self._tell_agents(f"the job ends: {error}")
            raise
        finally:
            self._close()

    def add_host(self, host: ConnectedHost) -> None:
        """From now on, let a host take part. Its agent already knows the job."""
        self.hosts.append(host)
        if self._coordinator is not None:
            self._introduce(len(self.hosts) - 1)

    # The coordinator.

    def _start(self) -> None:
        # A coordinator may have a higher term than the one that it was given: see `leadership.py`.
        self._term = max(self._term, self.kept.term) + 1
        self._heard = self.clock.now()
        try:
            with connected() as (ours, theirs):
                command = command_of("lockstep.hosts.coordinator_process", str(theirs.fileno()))
                self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),))
        except OSError as error:
            raise UnfitError(f"no coordinator can be started: {error.strerror}") from None
        self.children.add(self._process.pid)
        self._coordinator = PacketChannel(ours, CoordinatorReport)
        self._pidfd = os.pidfd_open(self._process.pid)
        self.loop.watch(self._pidfd, self._see_exit)
        self.loop.watch(self._coordinator.fileno(), self._hear_coordinator)
        kept, record = msgspec.structs.replace(self.kept, record=b""), Attachment.holding(self.kept.record)
        name = None if self._requests is None else Attachment.copy_of(self._requests.fileno())
        folder, listener = self.exports.tensorboard, self.exports.metrics
        notifier = self.exports.notifier
        self._tell(
            Coordinate(
                kept=kept,
                record=record,
                term=self._term,
                hosts=len(self.hosts),
                run_dir=self.run_dir,
                notifies=self.notifies,
                address=self.address,
                requests=name,
                tensorboard=None if folder is None else str(folder),
                metrics=None if listener is None else Attachment.copy_of(listener),
                notifier=None if notifier is None else Attachment.copy_of(notifier),
            )
        )
        for host in range(len(self.hosts)):
            self._introduce(host)
        for stop, since in self._stops:
            self._tell(stop.after(self.clock.now() - since))

    def _tell(self, message: CoordinatorCommand) -> None:
        assert self._coordinator is not None
        self._coordinator.send(message, _PATIENCE)

    def _introduce(self, index: int) -> None:
        """Give the coordinator a channel to the agent of a host."""
        host = self.hosts[index]
        theirs = self._relay(index) if host.agent is not None else None
        self._tell(HostChannel(index, host.name, host.peer, host.workers, host.cores, theirs))

    def _relay(self, index: int) -> Attachment:
        """Return the coordinator's end of a new channel to the agent of a host."""
        host = self.hosts[index]
        ours, theirs = socket.socketpair()
        up: StreamChannel[HostReport, Instruction] = StreamChannel.over(
            ours, Instruction, None, accepted=True, most_queued=MOST_QUEUED
        )
        if isinstance(host.agent, CoordinatorSession):
            host.agent.attach(up)
        else:
            assert host.agent is not None
            host._up = up
            self.loop.watch(up.fileno(), partial(self._pass_down, host))
            self.loop.watch(host.agent.fileno(), partial(self._pass_up, index))
        return Attachment(theirs.detach())

    def _pass_down(self, host: ConnectedHost) -> None:
        """Pass instructions on to an agent."""
        while host._up is not None and (message := host._up.receive()) is not None:
            if isinstance(message, PeerGone | Unreadable):
                self.loop.unwatch(host._up.fileno())
                return
            if host.agent is not None and not isinstance(host.agent, CoordinatorSession):
                host.agent.send(message)

    def _pass_up(self, index: int) -> None:
        """Pass reports of an agent on to the coordinator."""
        host = self.hosts[index]
        while host._up is not None and not isinstance(host.agent, CoordinatorSession | None):
            match report := host.agent.receive():
                case None:
                    return
                case PeerGone():
                    self._drop(index)
                case Unreadable(error):
                    self._say(f"host {host.name} sent an invalid message: {error}")
                    self._drop(index)
                case _:
                    host._up.send(report)

    def _drop(self, index: int) -> None:
        host = self.hosts[index]
        if host.agent is None:
            return
        if isinstance(host.agent, CoordinatorSession):
            host.agent.give_up()
        else:
            self.loop.unwatch(host.agent.fileno())
            host.agent.close()
        host.agent = None
        if host._up is not None:
            self.loop.unwatch(host._up.fileno())
            host._up.flush(_LAST_MESSAGES)
            host._up.close()
            host._up = None
        self.when_lost(index)

    def _hear_coordinator(self) -> None:
        while self._coordinator is not None:
            match self._coordinator.receive():
                case None:
                    return
                case RecordMade(kept, record) if not record.is_missing:
                    self.kept = msgspec.structs.replace(kept, record=record.content())
                    self.leads = True
                case HostDropped(host):
                    self._drop(host)
                case JobEnds():
                    self.is_over = True
                case JobEnded(status, error):
                    self._status = status
                    # Agents go to the coordinator that leads the job now, or wait for one.
                    self._left = status == LEFT_OUT and not self.is_over
                    if error and not self._left:
                        self._tell_agents(f"the job ends: {error}")
                case KeepAlive():
                    self._heard = self.clock.now()
                case _:
                    self.loop.unwatch(self._coordinator.fileno())
                    return

    def _see_exit(self) -> None:
        assert self._process is not None
        self._hear_coordinator()
        status = self._process.wait()
        self._release()
        if self._status is not None:
            return
        now = self.clock.now()
        self._losses.append(now)
        while now - self._losses[0] > _WITHIN:
            self._losses.popleft()
        loss = f"the coordinator (process {self._process.pid}) {describe_exit(status)}"
        if len(self._losses) > _MOST_LOSSES:
            raise UnfitError(f"{loss}; it was lost {len(self._losses)} times within {_WITHIN:g} s")
        self._say(f"{loss}; another one takes over, and training continues")
        self._start()

    def _release(self) -> None:
        """Close everything that belongs to the ended coordinator."""
        assert self._process is not None
        assert self._coordinator is not None
        self.children.discard(self._process.pid)
        self.loop.unwatch(self._pidfd)
        os.close(self._pidfd)
        self.loop.unwatch(self._coordinator.fileno())
        self._coordinator.close()
        self._coordinator = None
        for host in self.hosts:
            if host._up is not None:
                # Only whole instructions are left there, and the next coordinator sends them again.
                self._pass_down(host)
                self.loop.unwatch(host._up.fileno())
                host._up.close()
                host._up = None
            if host.agent is not None and not isinstance(host.agent, CoordinatorSession):
                self.loop.unwatch(host.agent.fileno())

    def _close(self) -> None:
        if self._coordinator is not None:
            # Without its keeper, a coordinator ends.
            self._coordinator.close()
        if self._requests is not None:
            self._requests.close()
        for host in self.hosts:
            if host.agent is not None and not isinstance(host.agent, CoordinatorSession):
                self.loop.unwatch(host.agent.fileno())
                if not self._left and (self._status is None or not self.is_over):
                    # Otherwise, the agent would wait for another coordinator. If only the command is lost, it
                    # should wait: the same command takes over the job.
                    host.agent.send(EndHost(0.0, status=self._status or LEFT_OUT))
                host.agent.close()

    # The command, and this host.

    def _hear_command(self) -> None:
        match self.command.receive():
            case PeerGone():
                self._left = True
            case StopRequest() as stop:
                self._stops.append((stop, self.clock.now()))
                if self._coordinator is not None:
                    self._tell(stop)

    def _say(self, text: str) -> None:
        self.console.say(text)
        self._tell_agents(text)

    def _tell_agents(self, text: str) -> None:
        """Show a note to the users of other hosts."""
        for host in self.hosts if self.notifies else ():
            if host.agent is not None and not isinstance(host.agent, CoordinatorSession):
                host.agent.send(ShowNote(text))

    def _tend(self) -> float:
        """Show that this process and this host's agent are alive, and end a stuck coordinator."""
        if (now := self.clock.now()) >= self._alive_due:
            if now - self._alive_due > SILENCE / 2:
                # This process was stopped, and probably so was the coordinator.
                self._heard = now
            self._alive_due = now + ALIVE_EVERY
            for host in self.hosts:
                if isinstance(host.agent, CoordinatorSession):
                    host.agent.keep_alive()
                elif host.agent is not None and self.shows_life:
                    host.agent.send(KeepAlive())
            self.console.flush()
            if now - self._heard > _STUCK and not self.is_over and self._process is not None:
                self._say(f"the coordinator has been silent for {now - self._heard:.0f} s, and is killed")
                self._process.kill()
                self._heard = now
        return self._alive_due - now
