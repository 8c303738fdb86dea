"""The worker's end of the channel to its agent."""

import select
import time
from collections import deque
from pathlib import Path

from lockstep.errors import InternalError, PeerLostError
from lockstep.observability.bus import PublishedEvent
from lockstep.observability.digest_records import WorkerDigest
from lockstep.observability.events import (
    JoinRequested,
    OrderRecorded,
    ScriptEnded,
    ScriptFailed,
    WaitReported,
    WorkerEvent,
    WorkerReady,
)
from lockstep.observability.measurements import WorkerMeasurement
from lockstep.protocol.channel import Channel, PeerGone, Unreadable
from lockstep.protocol.worker import (
    AbortExchange,
    AgentMessage,
    AnswersAt,
    EnterView,
    EventReport,
    FailureReport,
    FileOpened,
    LastLineAwaited,
    Leave,
    PeerConnected,
    StateGiven,
    ViewBroken,
    WorkerMessage,
)
from lockstep.system.event_loop import wait_for
from lockstep.system.mounts import is_shared

_PATIENCE = 60.0
"""Seconds that a report waits for an agent that reads nothing. On a busy machine, that takes seconds."""
_SHORT_PATIENCE = 0.2


class AgentClient:
    """Sends the reports of this worker to its agent, from any thread, and receives its messages.

    Supervision depends on most reports, so they wait for an agent whose queue is full. Measurements, digests,
    and reports that later ones replace are dropped instead. Reports do not raise, except for a request to
    join and the state for joiners: without these, another process would wait forever.

    Args:
        channel: the channel to the agent.
        worker: the id of this worker.
    """

    def __init__(self, channel: Channel[WorkerMessage, AgentMessage], worker: int) -> None:
        self._channel = channel
        self._worker = worker
        self._connected: list[PeerConnected] = []
        self._kept: deque[AgentMessage] = deque()

    def started(self) -> None:
        """Report that the script is about to run."""
        self._channel.send(EventReport(WorkerReady(self._worker)), _PATIENCE)

    def report(self, published: PublishedEvent) -> None:
        """Forward an event of this worker, which the coordinator publishes on the bus of the run.

        A measurement is dropped if the agent is slow, because training does not wait for it. Digests, which
        may arrive in large numbers, wait briefly.
        """
        event = published.event
        assert isinstance(event, WorkerEvent | WorkerMeasurement | WorkerDigest | OrderRecorded)
        patience = _PATIENCE
        if isinstance(event, WorkerMeasurement):
            patience = 0.0
        elif isinstance(event, WorkerDigest):
            patience = _SHORT_PATIENCE
        self._channel.send(EventReport(event), patience)

    def waiting(self, call: str, workers: tuple[int, ...], seconds: float) -> None:
        """Report the workers for which this one waits; dropped if the agent is slow: a later one follows."""
        self._channel.send(EventReport(WaitReported(self._worker, call, workers, seconds)))

    def broken(self, view: int, reason: str, *, fatal: bool) -> None:
        """Report that this worker has left the exchange of a view, or cannot enter it."""
        self._channel.send(ViewBroken(self._worker, view, reason, fatal), _PATIENCE)

    def file_opened(self, path: str, line: str, appends: bool, library: str) -> None:
        """Report that a line of the program opens a file for writing or appending, perhaps in a library."""
        self._channel.send(FileOpened(path, line, is_shared(Path(path)), appends, library), _PATIENCE)

    def failed(
        self,
        status: int,
        summary: str,
        traceback: str,
        *,
        blames: bool,
        prints: bool,
        recurs: bool = False,
    ) -> bool:
        """Report that the script raised; return whether the report was sent."""
        event = ScriptFailed(self._worker, summary, traceback)
        return self._channel.send(FailureReport(event, status, blames, prints, recurs), _PATIENCE)

    def finished(self, status: int = 0) -> None:
        """Report that the script has ended, or has exited with its own status."""
        self._channel.send(EventReport(ScriptEnded(self._worker, status)), _PATIENCE)

    def awaits_last_line(self) -> None:
        """Report that this worker has completed its last work, and waits for the last line of the job."""
        self._channel.send(LastLineAwaited(self._worker), _PATIENCE)

    def wait_for_release(self, seconds: float) -> bool:
        """Wait until the job has finished or no longer needs this worker; return False after a timeout."""
        until = time.monotonic() + seconds
        while (message := self.receive(max(0.0, until - time.monotonic()))) is not None:
            if isinstance(message, AbortExchange | Leave):
                return True
        return False

    def wait_for_end(self) -> None:
        """Wait until the agent has ended, without reading messages."""
        self._has_ended(None)

    def answers_at(self, entrance: bytes) -> None:
        """Announce the address at which this worker answers workers of other hosts."""
        self._channel.send(AnswersAt(entrance), _PATIENCE)

    def request_to_join(self, *, whole: bool) -> None:
        """Request the position of the members or, if `whole`, admission with the whole state.

        Raises:
            PeerLostError: the agent does not accept the request in time.
        """
        self._send_needed(EventReport(JoinRequested(self._worker, whole)))

    def send_state(self, report: StateGiven) -> None:
        """Send the state, or the position.

        Raises:
            PeerLostError: the agent does not take it in time.
        """
        self._send_needed(report)

    def next_view(self, seconds: float) -> AgentMessage | None:
        """Wait for the coordinator's decision after a view has ended; for the main thread.

        Returns:
            The newest view, the end of the job, or a request to leave; None without a message in `seconds`.
        """
        newest = self.receive(seconds)
        while isinstance(newest, EnterView):
            newer = self.receive(0.0)
            if newer is None:
                break
            newest = newer
        return newest

    def receive(self, seconds: float | None) -> AgentMessage | None:
        """Wait for a message from the agent, and keep connections that arrive before it; for the main thread.

        Returns:
            The message; the end of the job if the agent has ended; None without a message in `seconds`.
        """
        until = None if seconds is None else time.monotonic() + seconds
        while isinstance(message := self.receive_any(seconds), PeerConnected):
            self._connected.append(message)
            seconds = None if until is None else max(0.0, until - time.monotonic())
        return message

    def newest_view(self) -> EnterView | None:
        """Return the newest announced view, if any, and leave it to `receive`; for the main thread."""
        while not (self._kept and isinstance(self._kept[-1], AbortExchange)):
            if (message := self._take(0.0)) is None:
                break
            self._kept.append(message)
        return next((kept for kept in reversed(self._kept) if isinstance(kept, EnterView)), None)

    def put_back(self, view: EnterView) -> None:
        """Leave a view that was received to the next call of `receive`."""
        self._kept.appendleft(view)

    def connections(self, view: int) -> list[PeerConnected]:
        """Return the connections of a view that were kept, and close those of earlier views."""
        kept, self._connected = self._connected, []
        return [connected for connected in kept if connected.view == view]

    def receive_any(self, seconds: float | None, *wakes: int) -> AgentMessage | None:
        """Wait for a message from the agent, which may be a connection; see `receive`.

        It also returns None if one of the descriptors `wakes` is readable.
        """
        return self._kept.popleft() if self._kept else self._take(seconds, *wakes)

    def _send_needed(self, message: WorkerMessage) -> None:
        until = time.monotonic() + _PATIENCE
        # Reports of other threads may fill the queue again.
        while not self._channel.send(message, max(0.0, until - time.monotonic())):
            if self._has_ended(0.0):
                # The next message shows it.
                return
            if time.monotonic() >= until:
                raise PeerLostError(
                    f"no report of this worker was read for {_PATIENCE:g} s: find out why the agent of "
                    "this host does not run"
                )

    def _has_ended(self, seconds: float | None) -> bool:
        """Return whether the agent ends within this time; None for no limit."""
        poll = select.poll()
        poll.register(self._channel.fileno(), 0)
        return bool(poll.poll(None if seconds is None else 1000 * seconds))

    def _take(self, seconds: float | None, *wakes: int) -> AgentMessage | None:
        channel = self._channel.fileno()
        if channel not in wait_for([channel, *wakes], seconds):
            return None
        message = self._channel.receive()
        if isinstance(message, PeerGone):
            return AbortExchange("the agent has ended")
        if isinstance(message, Unreadable):
            raise InternalError(f"cannot read a message from the agent: {message.error}")
        return message
