"""The worker's end of the socket to its agent."""

import os
import select
import socket
from typing import Any

from lockstep.control.messages import (
    MAX_PACKET,
    Failed,
    Finished,
    NewView,
    Over,
    Report,
    Started,
    Waiting,
    WorkerMessage,
    decode,
    encode,
)

_PATIENCE = 1.0


class Client:
    """Tells the agent what happens in this worker, from any thread, and hears what it decides.

    Telling never raises, and never blocks longer than a second: a worker does not depend on being heard.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def started(self) -> None:
        """Say that the script is about to run."""
        self._send(Started(), _PATIENCE)

    def report(self, event: str, **fields: Any) -> None:
        """Note an event of `events.jsonl`."""
        self._send(Report(event, fields), _PATIENCE)

    def waiting(self, what: str, workers: tuple[int, ...], seconds: float) -> None:
        """Say for whom this worker waits; lost if the agent is behind, the next one will do."""
        self._send(Waiting(what, workers, seconds), 0.0)

    def failed(self, status: int, summary: str, traceback: str, blames: bool) -> None:
        """Say that the script raised."""
        self._send(Failed(status, summary, traceback, blames), _PATIENCE)

    def finished(self) -> None:
        """Say that the script came to its end."""
        self._send(Finished(), _PATIENCE)

    def next_view(self, seconds: float) -> tuple[NewView, int] | Over | None:
        """Wait for what the agent decides about a view that is over; for the main thread.

        Returns:
            The newest view and the descriptor of its memory, which the caller has to close; or that the job
            is over; or None if nothing has come in `seconds`.
        """
        answer: tuple[NewView, int] | Over | None = None
        while not isinstance(answer, Over):
            ready, _, _ = select.select([self._connection], [], [], 0.0 if answer else seconds)
            if not ready:
                break
            packet, descriptors, _, _ = socket.recv_fds(self._connection, MAX_PACKET, 1)
            if isinstance(answer, tuple):
                os.close(answer[1])
            message = decode(packet) if packet else Over("the agent is gone")
            answer = (message, descriptors[0]) if isinstance(message, NewView) else None
            if isinstance(message, Over):
                answer = message
        return answer

    def _send(self, message: WorkerMessage, patience: float) -> None:
        try:
            packet = encode(message)
            if patience:
                select.select([], [self._connection], [], patience)
            self._connection.send(packet, socket.MSG_DONTWAIT)
        except (OSError, ValueError, RecursionError):
            # The agent is gone (then this process is about to be), behind, or the fields cannot be told.
            return
