"""The worker's end of the channel to its agent."""

import select

from lockstep.errors import InternalError
from lockstep.observability.bus import PublishedEvent
from lockstep.observability.events import WorkerEvent
from lockstep.protocol.channel import Channel, PeerGone, Unreadable
from lockstep.protocol.worker import (
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
)

_PATIENCE = 1.0


class AgentClient:
    """Tells the agent what happens in this worker, from any thread, and hears what it decides.

    Telling never raises, and never blocks longer than a second: a worker does not depend on being heard.
    """

    def __init__(self, channel: Channel[WorkerMessage, AgentMessage]) -> None:
        self._channel = channel

    def started(self) -> None:
        """Say that the script is about to run."""
        self._channel.send(Started(), _PATIENCE)

    def report(self, published: PublishedEvent) -> None:
        """Pass on an event of this worker, which its agent publishes again."""
        assert isinstance(published.event, WorkerEvent)
        self._channel.send(EventReport(published.event), _PATIENCE)

    def waiting(self, what: str, workers: tuple[int, ...], seconds: float) -> None:
        """Say for whom this worker waits; lost if the agent is behind, the next one will do."""
        self._channel.send(WaitReport(what, workers, seconds))

    def writes(self, path: str, line: str) -> None:
        """Say that a line of the program opens a file to write to it."""
        self._channel.send(FileOpened(path, line), _PATIENCE)

    def failed(self, status: int, summary: str, traceback: str, *, blames: bool, prints: bool) -> bool:
        """Say that the script raised; return whether the agent hears of it."""
        return self._channel.send(Failed(status, summary, traceback, blames, prints), _PATIENCE)

    def finished(self, status: int = 0) -> None:
        """Say that the script came to its end, or left with a status of its own."""
        self._channel.send(Finished(status), _PATIENCE)

    def wait_for_end(self) -> None:
        """Wait until the agent is gone; reads nothing."""
        poll = select.poll()
        poll.register(self._channel.fileno(), 0)
        poll.poll()

    def asks(self, *, whole: bool) -> None:
        """Say that this worker joins, and how far it is."""
        self._channel.send(JoinRequest(whole), _PATIENCE)

    def given(self, reply: StateReply) -> None:
        """Give the state, or the position."""
        self._channel.send(reply, _PATIENCE)

    def next_view(self, seconds: float) -> AgentMessage | None:
        """Wait for what the agent decides about a view that is over; for the main thread.

        Returns:
            The newest view, that the job is over, or that this worker leaves; None if nothing has come in
            `seconds`.
        """
        newest = self.receive(seconds)
        while isinstance(newest, NewView):
            newer = self.receive(0.0)
            if newer is None:
                break
            newest = newer
        return newest

    def receive(self, seconds: float | None) -> AgentMessage | None:
        """Wait for what the agent says; for the main thread.

        Returns:
            A message; that the job is over, where the agent is gone; None if nothing has come in `seconds`.
        """
        if not select.select([self._channel.fileno()], [], [], seconds)[0]:
            return None
        message = self._channel.receive()
        if isinstance(message, PeerGone):
            return JobOver("the agent has ended")
        if isinstance(message, Unreadable):
            raise InternalError(f"cannot read a message from the agent: {message.error}")
        return message
