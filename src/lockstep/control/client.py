"""The worker's end of the socket to its agent."""

import select
import socket
from typing import Any

from lockstep.control.messages import Failed, Finished, Report, Started, Waiting, WorkerMessage, encode

_PATIENCE = 1.0


class Client:
    """Tells the agent what happens in this worker; safe to call from any thread.

    Nothing here raises, and nothing blocks longer than a second: a worker does not depend on being heard.
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

    def _send(self, message: WorkerMessage, patience: float) -> None:
        try:
            packet = encode(message)
            if patience:
                select.select([], [self._connection], [], patience)
            self._connection.send(packet, socket.MSG_DONTWAIT)
        except (OSError, ValueError, RecursionError):
            # The agent is gone (then this process is about to be), behind, or the fields cannot be told.
            return
