"""The process of an agent on another host than the coordinator's: from the first message to the last."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar, cast

from lockstep.agent.agent import Agent
from lockstep.agent.exchange import open_shared
from lockstep.agent.lane_connections import HostNetwork, LaneConnections
from lockstep.agent.starter import LocalStarter
from lockstep.agent.worker_output import ForwardedOutput
from lockstep.collectives.shared.pool import SharedPool
from lockstep.hosts.facts import own_facts
from lockstep.launcher.fork_server import ForkServerPlan
from lockstep.launcher.gpu_assignment import spread
from lockstep.launcher.launcher import LocalLauncher
from lockstep.protocol.channel import Attachment, Channel, PeerGone, Unreadable
from lockstep.protocol.host import (
    ALIVE_EVERY,
    SILENCE,
    BeginJob,
    HostFacts,
    HostReport,
    Instruction,
    KeepAlive,
    Prepare,
    RemoteInstruction,
    RemoteReport,
    Stop,
)
from lockstep.system.clock import Clock
from lockstep.system.descendants import LinuxDescendants
from lockstep.system.environment import shared_variables, take_environment, visible_gpus
from lockstep.system.event_loop import EventLoop
from lockstep.system.notes import note
from lockstep.system.paths import RunPaths
from lockstep.system.run_folder import empty_folder
from lockstep.transport.addresses import split_address
from lockstep.transport.keys import JobKey
from lockstep.transport.listener import Listener
from lockstep.transport.stream_channel import StreamChannel

MOST_QUEUED = 1 << 32
"""Bytes that coordinator and agent keep for each other: a state must fit. Silence ends the wait."""

_BEHIND = 1 << 20
"""Bytes in the queue of the coordinator beyond which workers wait with their output."""


Message = TypeVar("Message", Prepare, BeginJob)


class _CoordinatorGone(Exception):
    """The connection to the coordinator ended, or is silent."""


@dataclass
class _Silence:
    """Notices that nothing arrives from the coordinator any more."""

    channel: StreamChannel[RemoteReport, RemoteInstruction]
    clock: Clock
    _received: int = -1
    _heard: float = 0.0

    def check(self) -> None:
        """Raise _CoordinatorGone if the coordinator has been silent for too long."""
        now = self.clock.now()
        if self.channel.received != self._received:
            self._received, self._heard = self.channel.received, now
        elif now - self._heard > SILENCE:
            raise _CoordinatorGone(f"the coordinator has been silent for {SILENCE:g} s")


@dataclass
class AgentProcess:
    """Serves one job on this host.

    Attributes:
        channel: to the coordinator.
        command: the channel to the process that watches this one.
        loop: serves everything.
        clock: for deadlines.
        address: where to listen for workers of other hosts, at a port of this host that they reach.
        key: of the job; None if the coordinator sends it.
        folder: for what the workers of this host share; exists.
    """

    channel: StreamChannel[RemoteReport, RemoteInstruction]
    command: Channel[Stop, Stop]
    loop: EventLoop
    clock: Clock
    address: str
    key: JobKey | None
    folder: Path

    def run(self) -> int:
        """Serve the job to its end; return the exit status."""
        try:
            prepare = self._receive_one(Prepare)
            with self._network(prepare) as (network, listener):
                host, port = split_address(listener.address)
                self.channel.send(self._facts(prepare, host, port))
                begin = self._receive_one(BeginJob)
                self._serve(begin, network)
                return 0
        except _CoordinatorGone as gone:
            note(str(gone))
            return 1
        finally:
            self.channel.flush(1.0)
            self.channel.close()

    def _receive_one(self, kind: type[Message]) -> Message:
        """Wait for a message, until the coordinator or this process's command ends."""
        self.loop.watch(self.channel.fileno(), lambda: None)
        self.loop.watch(self.command.fileno(), lambda: None)
        silence = _Silence(self.channel, self.clock)
        try:
            while True:
                match self.channel.receive():
                    case PeerGone():
                        raise _CoordinatorGone("the connection to the coordinator ended")
                    case Unreadable(error):
                        raise _CoordinatorGone(f"the coordinator sent an invalid message: {error}")
                    case message if isinstance(message, kind):
                        return message
                if self.command.receive() is not None:
                    raise _CoordinatorGone("this agent was stopped")
                self.loop.turn(ALIVE_EVERY)
                silence.check()
        finally:
            self.loop.unwatch(self.channel.fileno())
            self.loop.unwatch(self.command.fileno())

    @contextlib.contextmanager
    def _network(self, prepare: Prepare) -> Iterator[tuple[HostNetwork, Listener]]:
        """Listen for workers of other hosts."""
        key = self.key or JobKey.parse(prepare.key, "the message of the coordinator")
        connections = LaneConnections()
        credentials = key.mint(encrypted=prepare.encrypted)
        listener = Listener.open(
            self.address, credentials, connections.admit, note, loop=self.loop, clock=self.clock
        )
        with contextlib.closing(listener):
            yield HostNetwork(prepare.job, credentials, connections, listener.enter), listener

    def _facts(self, prepare: Prepare, address: str, port: int) -> HostFacts:
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

    def _serve(self, begin: BeginJob, network: HostNetwork) -> None:
        loop, clock, channel = self.loop, self.clock, self.channel
        first = sum(host.workers for host in begin.spec.hosts[: begin.host])
        here = begin.spec.hosts[begin.host].workers
        spec = replace(begin.spec, run_dir=self.folder, devices=spread(visible_gpus(), here))
        paths = RunPaths(self.folder)
        empty_folder(paths.sources)
        launcher = LocalLauncher(ForkServerPlan.of(spec))
        launcher.prepare()
        # From now on, both ends use only these messages.
        coordinator = cast("Channel[HostReport, Instruction]", channel)
        output = ForwardedOutput(coordinator, lambda: channel.queued > _BEHIND)
        agent = Agent(
            job=self.folder.name,
            coordinator=coordinator,
            loop=loop,
            starter=LocalStarter(spec, paths, os.getpid(), launcher, output, first),
            open_exchange=open_shared,
            pool=Attachment(SharedPool.create().fd),
            output=output,
            descendants=LinuxDescendants(),
            host=begin.host,
            network=network,
        )
        with contextlib.closing(agent):
            due, silence = clock.now(), _Silence(channel, clock)
            while not agent.ended:
                loop.turn(max(0.0, due - clock.now()))
                if self.command.receive() is not None:
                    raise _CoordinatorGone("this agent was stopped")
                if (now := clock.now()) < due:
                    continue
                due = now + ALIVE_EVERY
                channel.send(KeepAlive())
                silence.check()
