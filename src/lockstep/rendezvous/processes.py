"""Workers that a person started: no children of the coordinator, which watches them all the same."""

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterable, Sequence

from lockstep.launcher.launcher import AgentChannel
from lockstep.observability.console import Console
from lockstep.protocol.worker import WorkerMessage
from lockstep.system.exit_status import UNKNOWN_STATUS
from lockstep.system.output import Sink
from lockstep.transport.packet_channel import PacketChannel

_LOOK_EVERY = 0.01
_PATIENCE = 5.0


class ExternalHandle:
    """A process that another one started; `Handle` for the agent.

    Attributes:
        pid: its process id.
        exited: a descriptor that becomes readable when it has ended.
        control: this end of the socket to it; does not block.
        channel: the same, once it is a worker.
        terminal: its stderr, for notes; None if it has none.
    """

    def __init__(self, pid: int, exited: int, control: socket.socket) -> None:
        self.pid = pid
        self.exited = exited
        self.control = control
        self.channel: AgentChannel = PacketChannel(control, WorkerMessage)
        self.terminal: Sink | None = None

    def poll(self) -> int | None:
        """Return `UNKNOWN_STATUS` if the process has ended, and let go of its terminal."""
        if self.is_running:
            return None
        self.leave_terminal()
        return UNKNOWN_STATUS

    @property
    def is_running(self) -> bool:
        """Whether the process lives."""
        poll = select.poll()
        poll.register(self.exited, select.POLLIN)
        return not poll.poll(0)

    def send_signal(self, number: int) -> None:
        """Send a signal through the pidfd, which never means another process."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.exited, number)

    def take_terminal(self, descriptors: Sequence[int]) -> None:
        """Take its stderr over, if it has sent it."""
        for descriptor in descriptors:
            self.terminal = Sink(descriptor)

    def leave_terminal(self) -> None:
        """Let go of its terminal: whoever reads a pipe there waits for its end."""
        if self.terminal is not None:
            os.close(self.terminal.descriptor)
            self.terminal = None

    def close(self) -> None:
        """Close the descriptors."""
        self.leave_terminal()
        self.control.close()
        os.close(self.exited)


class ExternalProcesses:
    """The workers that were adopted; `Descendants` for the agent, though processes below them are not seen.

    Args:
        handles: returns them.
    """

    def __init__(self, handles: Callable[[], Iterable[ExternalHandle]]) -> None:
        self._handles = handles

    def reap(self, owned: frozenset[int]) -> None:
        """They are reaped by whoever started them."""

    def end(self, grace: float) -> tuple[int, ...]:
        """Give all of them `grace` seconds to end, then kill them.

        Returns:
            Process ids that even SIGKILL did not end.
        """
        start = time.monotonic()
        while left := [handle for handle in self._handles() if handle.is_running]:
            waited = time.monotonic() - start
            if waited > grace + _PATIENCE:
                return tuple(sorted(handle.pid for handle in left))
            if waited >= grace:
                for handle in left:
                    handle.send_signal(signal.SIGKILL)
            time.sleep(_LOOK_EVERY)
        return ()


class Terminals(Console):
    """The terminals in which workers were started: each worker writes to its own, and notes go to all.

    Args:
        handles: returns the processes that have them.
    """

    def __init__(self, handles: Callable[[], Iterable[ExternalHandle]]) -> None:
        self.sinks = ()
        self.drops = False
        self.chief = 0
        self._handles = handles
        self._prefixers = []
        self._told = set()

    def shows(self, worker: int) -> bool:
        """A terminal has its worker's output already."""
        return True

    def say(self, text: str) -> None:
        """Show a note, once where several workers have one terminal."""
        seen = set()
        for sink in [handle.terminal for handle in self._handles() if handle.terminal is not None]:
            with contextlib.suppress(OSError):
                status = os.fstat(sink.descriptor)
                if (status.st_dev, status.st_ino) not in seen:
                    seen.add((status.st_dev, status.st_ino))
                    sink.write(f"lockstep: {text}\n".encode(errors="backslashreplace"))
