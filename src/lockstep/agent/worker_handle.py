"""A worker as seen by its agent."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from lockstep.agent.worker_output import WorkerLog
from lockstep.launcher.launcher import AgentChannel, Handle
from lockstep.observability.console import Write
from lockstep.protocol.admin import StackReply
from lockstep.protocol.host import WorkerEvidence
from lockstep.system.exit_status import UNKNOWN_STATUS
from lockstep.worker.stack_dump import STACK_SIGNAL, innermost

_PIECE = 64 * 1024
_MOST_PIECES = 64
_LOG_LINES = 20
_FRAMES = 10
_SHOWN_FRAMES = 30
_STACK_PATIENCE = 2.0
_STACK_PAUSE = 0.05
"""Seconds without a new byte after which a stack is complete: it is written in pieces."""


@dataclass
class OutputPipe:
    """The pipe of a worker's stdout or stderr."""

    descriptor: int
    log: WorkerLog
    show: Write
    ended: bool = False

    def read(self) -> bool:
        """Forward one piece of output; return whether more may be available now."""
        try:
            data = os.read(self.descriptor, _PIECE)
        except BlockingIOError:
            return False
        self.log.write(data)
        self.show(data)
        self.ended = not data
        return bool(data)

    def drain(self) -> None:
        """Forward the available output up to a limit, because a process of the worker may write endlessly."""
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
        killed: whether the agent has killed it.
        said: the exit status that it has announced; `UNKNOWN_STATUS` if it has not.
        gpus: the names of its GPUs; empty if the job does not choose them.
        entrance: the address at which it answers workers of other hosts; empty if it takes no connections.
    """

    worker: int
    slot: int
    handle: Handle
    log: WorkerLog | None
    streams: tuple[OutputPipe, ...]
    stack: Path
    gpus: tuple[str, ...] = ()
    ready: bool = False
    exited: bool = False
    killed: bool = False
    said: int = UNKNOWN_STATUS
    entrance: bytes = b""
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
        """Ask the worker for its stack, if it is ready: the signal kills a worker that is not."""
        if self.ready:
            self._stack_start = self.stack_size()
            self.handle.send_signal(STACK_SIGNAL)

    def begin_stack(self, now: float) -> "StackDump | str":
        """Ask the worker for its stack; return where it will appear, or why the worker cannot be asked."""
        if self.exited:
            return "it has ended"
        if not self.ready:
            return "it has not reached its script yet"
        dump = StackDump(self, self.stack_size(), now)
        self.handle.send_signal(STACK_SIGNAL)
        return dump

    def stack_since(self, start: int, frames: int) -> tuple[str, ...]:
        """Return the innermost frames of the stack that the worker has written since then, if any."""
        try:
            dump = self.stack.read_bytes()[start:]
        except OSError:
            return ()
        return tuple(innermost(dump.decode(errors="replace"), frames))

    def evidence(self) -> WorkerEvidence:
        """Return its evidence."""
        log = tuple(self.log.tail(_LOG_LINES)) if self.log is not None else ()
        return WorkerEvidence(self.worker, self.log is not None, log, self._requested_stack())

    def described_stack(self) -> str:
        """Return lines for the log about the stack that was requested as evidence, if any."""
        if self._stack_start is None:
            return ""
        frames = self._requested_stack()
        heading = "was here (most recent call first):" if frames else "sent no stack"
        return "".join(f"{line}\n" for line in (f"lockstep: worker {self.worker} {heading}", *frames))

    def _requested_stack(self) -> tuple[str, ...]:
        return self.stack_since(self._stack_start, _FRAMES) if self._stack_start is not None else ()

    def close(self) -> None:
        """Close its descriptors and log, and remove its stack file if that is empty."""
        self.handle.close()
        if self.log is not None:
            self.log.close()
        with contextlib.suppress(OSError):
            if self.stack_size() == 0:
                self.stack.unlink(missing_ok=True)

    def stack_size(self) -> int:
        """Return the size of the file of its stacks, in bytes."""
        try:
            return self.stack.stat().st_size
        except OSError:
            return 0


@dataclass
class StackDump:
    """A stack that a worker writes to its file on request.

    Attributes:
        worker: the worker that writes it.
        start: the size of the file before.
        began: the time of the request.
    """

    worker: WorkerHandle
    start: int
    began: float
    _size: int = 0
    _grew: float = 0.0

    def look(self, now: float) -> StackReply | None:
        """Return None until the stack is complete, and then the stack, or why there is none."""
        size = self.worker.stack_size() - self.start
        if size > self._size:
            self._size, self._grew = size, now
        if size > 0 and now - self._grew >= _STACK_PAUSE:
            frames = self.worker.stack_since(self.start, _SHOWN_FRAMES)
            return StackReply(self.worker.worker, frames, "" if frames else "it runs no line of the script")
        if self.worker.exited:
            return StackReply(self.worker.worker, (), "it has ended")
        if now - self.began >= _STACK_PATIENCE:
            waited = f"it has not responded within {_STACK_PATIENCE:g} s"
            why = "its process is stopped, or waits in the kernel"
            return StackReply(self.worker.worker, (), f"{waited}: {why}")
        return None
