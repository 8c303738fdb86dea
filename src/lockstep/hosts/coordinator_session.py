"""The agent's end of its connections to the coordinators of its job, one after the other."""

import os
import select
from collections import deque
from itertools import islice

from lockstep.protocol.channel import Channel, PeerGone, Unreadable
from lockstep.protocol.host import (
    UNNUMBERED,
    AgentStanding,
    HostReport,
    Instruction,
    KeepAlive,
    KeepRecord,
    OutputWritten,
    RepeatReports,
    StartView,
    TakeOver,
)
from lockstep.protocol.rendezvous import KeepWaiting, Rejected
from lockstep.system.clock import Clock, SystemClock
from lockstep.transport.packet_channel import encode

MOST_KEPT = 16 << 20
"""Bytes of output in reports that are kept, beyond which workers wait with their output."""


class CoordinatorSession:
    """Delivers each report exactly once, even if another coordinator takes over; a `Channel`.

    Reports have numbers, and are kept until the coordinator has acknowledged them. A coordinator that takes
    over receives the record of the job that this end keeps, and the reports that the record does not contain.

    Args:
        clock: the clock of the host.

    Attributes:
        term: the term of the coordinator.
        lost: why the connection ended; empty while there is one.
        rejected: why a coordinator does not take this agent back; empty if no coordinator has rejected it.
        kept: the newest record of the job that the agent has; None before the first.
        leads: whether the coordinator of this connection leads the job: a record or a view of its term has
            arrived. A coordinator that takes over repeats older ones before it knows that.
        output: number of bytes of output in the reports that are kept.
        received: number of numbered instructions that have arrived.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self.term = 1
        self.lost = "there was no connection yet"
        self.rejected = ""
        self.kept: KeepRecord | None = None
        self.leads = False
        self.output = 0
        self.received = 0
        self._channel: Channel[HostReport, Instruction | KeepWaiting | Rejected] | None = None
        self._ended = False
        # The descriptor of this end stays the same.
        self._events = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._events.register(self._wake, select.EPOLLIN)
        self._reports: deque[HostReport] = deque()
        self._acknowledged = 0
        self._waits = False

    def attach(self, channel: Channel[HostReport, Instruction | KeepWaiting | Rejected]) -> None:
        """Use another connection instead of the previous one; it now belongs to this session."""
        self._detach("")
        self._channel, self.leads = channel, False
        self._events.register(channel.fileno(), select.EPOLLIN)

    def leave(self, why: str) -> None:
        """Close the connection, because its coordinator is not the newest one."""
        self._detach(why)

    def give_up(self) -> None:
        """Stop waiting for a coordinator: `receive` returns `PeerGone` from now on."""
        self._detach("given up")
        if not self._ended:
            self._ended = True
            os.eventfd_write(self._wake, 1)

    def keep_alive(self) -> None:
        """Tell the coordinator that this process is alive, and which instructions it has."""
        self.send(KeepAlive(self.received, self._clock.now()))

    def send(self, message: HostReport, patience: float = 0.0) -> bool:
        """Send a report now, or when a coordinator takes over; return False only if it is too large."""
        if isinstance(message, UNNUMBERED):
            return self._channel is not None and self._channel.send(message, patience)
        channel = None if self._waits else self._channel
        if channel is None or not channel.send(message, patience):
            try:
                encode(message)
            except (ValueError, RecursionError):
                return False
            if channel is not None:
                # A later report must not get the number of this one.
                self._detach("the coordinator does not take reports")
        self._reports.append(message)
        if isinstance(message, OutputWritten):
            self.output += len(message.data)
        return True

    def receive(self) -> Instruction | Unreadable | PeerGone | None:
        """Return the next instruction; see `Channel`. After a lost connection, `lost` says why it ended."""
        while self._channel is not None:
            match message := self._channel.receive():
                case None:
                    return None
                case PeerGone():
                    self._detach("the connection to the coordinator ended")
                case Unreadable(error):
                    self._detach(f"the coordinator sent an invalid message: {error}")
                case KeepAlive(received):
                    self._forget(received)
                    return message
                case KeepRecord():
                    self.kept = message
                    self.leads = self.leads or message.term == self.term
                case TakeOver(term):
                    self.term, self._waits, self.leads = term, True, False
                    self._channel.send(AgentStanding(term, self.received, self._acknowledged, self.kept))
                case RepeatReports(after):
                    self._replay(after)
                case Rejected(reason):
                    self.rejected = reason
                    self._detach(reason)
                case KeepWaiting():
                    pass
                case _ if isinstance(message, UNNUMBERED):
                    return message
                case _:
                    self.received += 1
                    if isinstance(message, StartView):
                        self.leads = self.leads or message.term == self.term
                        # The record contains the large instructions that agents have not acknowledged.
                        self.keep_alive()
                    return message
        return PeerGone() if self._ended else None

    def fileno(self) -> int:
        """Return a descriptor that is readable when `receive` has something to return, or to do."""
        return -1 if self._events.closed else self._events.fileno()

    def close(self) -> None:
        """Close the connection; safe to call more than once."""
        self._detach("closed")
        if not self._events.closed:
            self._events.close()
            os.close(self._wake)

    def _forget(self, received: int) -> None:
        while self._acknowledged < received and self._reports:
            report = self._reports.popleft()
            self._acknowledged += 1
            if isinstance(report, OutputWritten):
                self.output -= len(report.data)

    def _replay(self, after: int) -> None:
        assert self._channel is not None
        self._waits = False
        for report in islice(self._reports, max(0, after - self._acknowledged), None):
            self._channel.send(report)

    def _detach(self, why: str) -> None:
        channel, self._channel = self._channel, None
        if channel is not None and channel.fileno() >= 0:
            self._events.unregister(channel.fileno())
        if channel is not None:
            channel.close()
        self.lost = why
