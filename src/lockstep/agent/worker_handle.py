"""A worker as seen by its agent."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from lockstep.agent.worker_output import WorkerLog
from lockstep.launcher.launcher import AgentChannel, Handle
from lockstep.observability.console import Write
from lockstep.protocol.host import WorkerEvidence
from lockstep.system.exit_status import UNKNOWN_STATUS
from lockstep.worker.stack_dump import STACK_SIGNAL, innermost

_PIECE = 64 * 1024
_MOST_PIECES = 64
_LOG_LINES = 20
_FRAMES = 10


@dataclass
class OutputPipe:
    """The pipe of a worker's stdout or stderr."""

    descriptor: int
    log: WorkerLog
    show: Write
    ended: bool = False

    def read(self) -> bool:
        """Forward one piece; return whether more may be available now."""
        try:
            data = os.read(self.descriptor, _PIECE)
        except BlockingIOError:
            return False
        self.log.write(data)
        self.show(data)
        self.ended = not data
        return bool(data)

    def drain(self) -> None:
        """Forward the available output, up to a limit: a process of the worker may write endlessly."""
        pieces = 0
        while pieces < _MOST_PIECES and not self.ended and self.read():
            pieces += 1


@dataclass
class WorkerHandle:
    """A worker of this agent.

    Attributes:
        worker: its id.
        slot: its index in `TF_CONFIG` and in the list of devices.
        handle: its process.
        log: its log; None if it writes to its own terminal.
        streams: its stdout and stderr; empty if it writes to its own terminal.
        stack: the file to which it writes its stack on request.
        ready: whether it has reached its script.
        exited: whether its process has ended.
        said: the exit status that it has announced; `UNKNOWN_STATUS` if none.
    """

    worker: int
    slot: int
    handle: Handle
    log: WorkerLog | None
    streams: tuple[OutputPipe, ...]
    stack: Path
    ready: bool = False
    exited: bool = False
    said: int = UNKNOWN_STATUS
    _stack_start: int | None = None

    @property
    def channel(self) -> AgentChannel:
        """The channel to it."""
        return self.handle.channel

    def log_only(self, text: str) -> None:
        """Append a text to the log, after the worker's output so far, without showing it on the terminal."""
        for stream in self.streams:
            stream.drain()
        if self.log is not None:
            self.log.write(text.encode(errors="backslashreplace"))

    def ask_for_stack(self) -> None:
        """Ask the worker for its stack, if it is ready: before, the signal would kill it."""
        if self.ready:
            self._stack_start = self._stack_size()
            self.handle.send_signal(STACK_SIGNAL)

    def evidence(self) -> WorkerEvidence:
        """Return its evidence."""
        log = tuple(self.log.tail(_LOG_LINES)) if self.log is not None else ()
        return WorkerEvidence(self.worker, self.log is not None, log, tuple(self._innermost_frames()))

    def _innermost_frames(self) -> list[str]:
        if self._stack_start is None:
            return []
        try:
            dump = self.stack.read_bytes()[self._stack_start :]
        except OSError:
            return []
        return innermost(dump.decode(errors="replace"), _FRAMES)

    def close(self) -> None:
        """Close its descriptors and log, and remove its stack file if that is empty."""
        self.handle.close()
        if self.log is not None:
            self.log.close()
        with contextlib.suppress(OSError):
            if self._stack_size() == 0:
                self.stack.unlink(missing_ok=True)

    def _stack_size(self) -> int:
        try:
            return self.stack.stat().st_size
        except OSError:
            return 0
