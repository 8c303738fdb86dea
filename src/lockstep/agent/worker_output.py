"""Where the output of workers goes: logs and a terminal, or messages to the coordinator."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from lockstep.observability.console import Console, Write
from lockstep.protocol.channel import Channel
from lockstep.protocol.host import HostReport, Instruction, OutputWritten
from lockstep.system.output import Log, last_lines
from lockstep.system.paths import RunPaths

_TAIL = 64 * 1024


class WorkerLog(Protocol):
    """Keeps the output of a worker."""

    def write(self, data: bytes) -> None:
        """Append `data`."""

    def tail(self, lines: int) -> list[str]:
        """Return the last lines, safe for a terminal."""

    def close(self) -> None:
        """Release the log."""


class WorkerOutput(Protocol):
    """Takes the output of the workers of an agent.

    Attributes:
        paused: the workers that the coordinator has asked to wait.
    """

    paused: frozenset[int]

    def open(self, worker: int) -> tuple[WorkerLog, Write, Write]:
        """Return the log of a worker, and the outlets that show its stdout and its stderr."""

    def waits(self, worker: int) -> bool:
        """Whether a worker must wait until the reader of its output has caught up."""


@dataclass
class LocalOutput:
    """Logs in the run folder, and the console of this process; a `WorkerOutput`.

    Attributes:
        console: shows the output.
        paths: the paths of the run, absolute.
        paused: as in the contract; the coordinator of the same process never asks for it.
    """

    console: Console
    paths: RunPaths
    paused: frozenset[int] = frozenset()

    def open(self, worker: int) -> tuple[WorkerLog, Write, Write]:
        """Return the log and the outlets of a worker; see `WorkerOutput`."""
        return Log.open(self.paths.log(worker), self.console.say), *self.console.outlets(worker)

    def waits(self, worker: int) -> bool:
        """Whether a slow terminal shows the output. Then the worker waits, as without Lockstep."""
        return self.console.full and not self.console.drops and self.console.shows(worker)


class _Tail:
    """The end of a worker's output, for a log that the coordinator writes; a `WorkerLog`."""

    def __init__(self) -> None:
        self._data = b""

    def write(self, data: bytes) -> None:
        self._data = (self._data + data)[-_TAIL:]

    def tail(self, lines: int) -> list[str]:
        return last_lines(self._data, lines)

    def close(self) -> None:
        pass


class ForwardedOutput:
    """Output that an agent on another host sends to the coordinator; a `WorkerOutput`.

    Args:
        channel: the channel to the coordinator.
        behind: returns whether the channel has more to send than it should.

    Attributes:
        paused: the workers that the coordinator has asked to wait.
        console: shows the output on this host too; None for nothing.
    """

    def __init__(self, channel: Channel[HostReport, Instruction], behind: Callable[[], bool]) -> None:
        self._channel = channel
        self._behind = behind
        self.paused = frozenset[int]()
        self.console: Console | None = None

    def open(self, worker: int) -> tuple[WorkerLog, Write, Write]:
        """Return the log and the outlets that forward the output of a worker; see `WorkerOutput`."""
        shows: tuple[Write, ...] = ()
        if self.console is not None:
            # The only worker of a host may be a replacement.
            self.console.chief = worker
            shows = self.console.outlets(worker)

        def forward(descriptor: int, data: bytes) -> None:
            if data:
                self._channel.send(OutputWritten(worker, descriptor, data))
            for show in shows[descriptor - 1 : descriptor]:
                show(data)

        return _Tail(), lambda data: forward(1, data), lambda data: forward(2, data)

    def waits(self, worker: int) -> bool:
        """Whether the connection is slow, or a terminal that shows the output."""
        shown = self.console is not None and self.console.full and self.console.shows(worker)
        return shown or worker in self.paused or self._behind()
