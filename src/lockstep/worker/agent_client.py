"""The worker's end of the socket to its agent."""

import os
import select
import socket

from lockstep.errors import InternalError
from lockstep.observability.bus import PublishedEvent
from lockstep.observability.events import WorkerEvent
from lockstep.protocol.worker import (
    MAX_PACKET,
    AgentMessage,
    EventReport,
    Failed,
    FileOpened,
    Finished,
    JobOver,
    JoinRequest,
    NewView,
    Started,
    StateReply,
    WaitReport,
    WorkerMessage,
    decode,
    encode,
)

_PATIENCE = 1.0
_MOST_DESCRIPTORS = 2


class AgentClient:
    """Tells the agent what happens in this worker, from any thread, and hears what it decides.

    Telling never raises, and never blocks longer than a second: a worker does not depend on being heard.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def started(self) -> None:
        """Say that the script is about to run."""
        self._send(Started(), _PATIENCE)

    def report(self, published: PublishedEvent) -> None:
        """Pass on an event of this worker, which its agent publishes again."""
        assert isinstance(published.event, WorkerEvent)
        self._send(EventReport(published.event), _PATIENCE)

    def waiting(self, what: str, workers: tuple[int, ...], seconds: float) -> None:
        """Say for whom this worker waits; lost if the agent is behind, the next one will do."""
        self._send(WaitReport(what, workers, seconds), 0.0)

    def writes(self, path: str, line: str) -> None:
        """Say that a line of the program opens a file to write to it."""
        self._send(FileOpened(path, line), _PATIENCE)

    def failed(self, status: int, summary: str, traceback: str, *, blames: bool, prints: bool) -> bool:
        """Say that the script raised; return whether the agent hears of it."""
        return self._send(Failed(status, summary, traceback, blames, prints), _PATIENCE)

    def finished(self, status: int = 0) -> None:
        """Say that the script came to its end, or left with a status of its own."""
        self._send(Finished(status), _PATIENCE)

    def wait_for_end(self) -> None:
        """Wait until the agent is gone; reads nothing."""
        poll = select.poll()
        poll.register(self._connection, 0)
        poll.poll()

    def asks(self, *, whole: bool) -> None:
        """Say that this worker joins, and how far it is."""
        self._send(JoinRequest(whole), _PATIENCE)

    def given(self, given: StateReply, *descriptors: int) -> None:
        """Give the memory that holds the state, or the position."""
        self._send(given, _PATIENCE, *descriptors)

    def next_view(self, seconds: float) -> tuple[AgentMessage, list[int]] | None:
        """Wait for what the agent decides about a view that is over; for the main thread.

        Returns:
            The newest view, that the job is over, or that this worker leaves; None if nothing has come in
            `seconds`.
        """
        newest = self.receive(seconds)
        while newest is not None and isinstance(newest[0], NewView):
            newer = self.receive(0.0)
            if newer is None:
                break
            _close(newest[1])
            newest = newer
        return newest

    def receive(self, seconds: float | None) -> tuple[AgentMessage, list[int]] | None:
        """Wait for what the agent says; for the main thread.

        Returns:
            A message and its descriptors, which the caller has to close; that the job is over, where the
            agent is gone; None if nothing has come in `seconds`.
        """
        ready, _, _ = select.select([self._connection], [], [], seconds)
        if not ready:
            return None
        packet, descriptors, _, _ = socket.recv_fds(
            self._connection, MAX_PACKET, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        message = decode(packet) if packet else JobOver("the agent has ended")
        if isinstance(message, AgentMessage):
            return message, descriptors
        raise InternalError(f"the agent sent a {type(message).__name__}, which is not a message for workers")

    def _send(self, message: WorkerMessage, patience: float, *descriptors: int) -> bool:
        try:
            packet = encode(message)
            if patience:
                select.select([], [self._connection], [], patience)
            socket.send_fds(self._connection, [packet], descriptors, socket.MSG_DONTWAIT)
        except (OSError, ValueError, RecursionError):
            # The agent is gone (then this process is about to be), behind, or the fields cannot be told.
            return False
        return True


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
