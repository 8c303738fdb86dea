"""The end of an engine's socket in a process that it has started: an agent, or the coordinator of a job."""

import math
import os
import socket
import time
from typing import TypeVar

from lockstep.errors import UnfitError
from lockstep.protocol.channel import Channel, PeerGone
from lockstep.protocol.engine import (
    CoordinatorListens,
    CoordinatorMoved,
    EndKnown,
    EngineCommand,
    EngineReport,
    LeaseOver,
    LeaseRenewed,
    Retire,
    StartAgent,
    StartCoordinator,
    WorkersFound,
)
from lockstep.protocol.host import LEFT_OUT
from lockstep.system.descendants import LinuxDescendants
from lockstep.system.environment import take_engine
from lockstep.system.event_loop import EventLoop, wait_for
from lockstep.system.notes import note
from lockstep.system.prctl import die_with
from lockstep.transport.keys import JobKey
from lockstep.transport.packet_channel import PacketChannel

_PATIENCE = 60.0

Start = TypeVar("Start", StartAgent, StartCoordinator)


class EngineLink:
    """Receives the messages of an engine to this process.

    Args:
        channel: the channel to the engine.
        start: its first message.

    Attributes:
        start: the first message.
        key: the key of the job.
        coordinator: HOST:PORT of the coordinator, if the engine has reported it.
        workers: the number of workers that fit on the hosts of the engine.
        retires: why this host is about to leave, if the engine has reported that; otherwise empty.
    """

    LIFELINE = 0
    """The descriptor of the engine's pipe, at whose end all processes of the job on this host end."""

    def __init__(
        self, channel: Channel[EngineReport, EngineCommand], start: StartAgent | StartCoordinator
    ) -> None:
        self.start = start
        self.key = JobKey.parse(start.key, "the message of the engine")
        self.coordinator = start.coordinator if isinstance(start, StartAgent) else ""
        self.workers = 0
        self.retires = ""
        lease = start.lease if isinstance(start, StartCoordinator) else None
        self._lease = math.inf if lease is None else lease
        self._channel = channel

    @classmethod
    def inherited(cls, kind: type[Start]) -> "EngineLink | None":
        """Return the link of a process that an engine has started, or None for other processes.

        Raises:
            UnfitError: the engine does not send its first message.
        """
        descriptor = take_engine()
        if descriptor is None:
            return None
        # The lifeline does not end a process that is stopped.
        die_with(os.getppid())
        channel: PacketChannel[EngineReport, EngineCommand] = PacketChannel(
            socket.socket(fileno=descriptor), EngineCommand
        )
        wait_for([channel.fileno()], _PATIENCE)
        start = channel.receive()
        if not isinstance(start, kind):
            raise UnfitError(f"the engine that has started this process sends no first message: {start}")
        return cls(channel, start)

    def tell_address(self, address: str) -> None:
        """Tell the engine where the coordinator, this process, listens."""
        self._channel.send(CoordinatorListens(address))

    def tell_end(self, status: int) -> None:
        """Tell the engine that the job has ended with this exit status."""
        self._channel.send(EndKnown(status))

    def watch(self, loop: EventLoop) -> None:
        """Let `loop` receive the messages of the engine, and end this process when its lease is over."""

        def hear() -> None:
            while (message := self._channel.receive()) is not None:
                match message:
                    case CoordinatorMoved(address):
                        self.coordinator = address
                    case WorkersFound(workers):
                        self.workers = workers
                    case Retire(reason):
                        self.retires = reason
                    case LeaseRenewed(until):
                        self._lease = until
                    case PeerGone():
                        # The lifeline ends this process.
                        loop.unwatch(self._channel.fileno())
                        return

        def left() -> float:
            """Return the seconds of the lease."""
            if time.monotonic() > self._lease:
                # The lease may have been renewed in the meantime.
                hear()
            if (seconds := self._lease - time.monotonic()) < 0:
                self._give_up()
            return seconds

        loop.watch(self._channel.fileno(), hear)
        if self._lease < math.inf:
            loop.before_each_wait(left)
            # The engine may have started another coordinator while this process was stopped.
            loop.before_each_handler(left)

    def _give_up(self) -> None:
        """End this process without a message to the agents, which wait for another coordinator."""
        note(
            "the cluster's control store does not answer: the coordinator ends, and hosts pause until it does"
        )
        # A coordinator process that outlives its connections would consider all hosts lost.
        LinuxDescendants().end(grace=0)
        self._channel.send(LeaseOver())
        os._exit(LEFT_OUT)
