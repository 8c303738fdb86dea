"""Processes that a user starts by hand. The agent watches them, although they are not its children."""

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
    """A process that a user started; a `Handle`.

    Attributes:
        pid: its process id.
        exited: a descriptor that becomes readable when the process has ended.
        control: this end of the socket to it; does not block.
        channel: the channel over that socket, if the process is a worker.
        terminal: its stderr, for notes; None if it has none.
    """

    def __init__(self, pid: int, exited: int, control: socket.socket) -> None:
        self.pid = pid
        self.exited = exited
        self.control = control
        self.channel: AgentChannel = PacketChannel(control, WorkerMessage)
        self.terminal: Sink | None = None

    def poll(self) -> int | None:
        """Return None while the process runs, and then `UNKNOWN_STATUS`, after releasing its terminal."""
        if self.is_running:
            return None
        self.leave_terminal()
        return UNKNOWN_STATUS

    @property
    def is_running(self) -> bool:
        """Whether the process runs."""
        poll = select.poll()
        poll.register(self.exited, select.POLLIN)
        return not poll.poll(0)

    def send_signal(self, number: int) -> None:
        """Send a signal through the pidfd, which cannot reach another process with the same id."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.exited, number)

    def take_terminal(self, descriptors: Sequence[int]) -> None:
        """Use a descriptor of its stderr, if it sent one."""
        for descriptor in descriptors:
            self.terminal = Sink(descriptor)

    def leave_terminal(self) -> None:
        """Release its terminal. If that is a pipe, its reader waits until all processes have closed it."""
        if self.terminal is not None:
            os.close(self.terminal.descriptor)
            self.terminal = None

    def close(self) -> None:
        """Close the descriptors."""
        self.leave_terminal()
        self.control.close()
        os.close(self.exited)


class ExternalProcesses:
    """The workers that a user started; a `Descendants`, without the processes that they start.

    Args:
        handles: returns the workers.
    """

    def __init__(self, handles: Callable[[], Iterable[ExternalHandle]]) -> None:
        self._handles = handles

    def reap(self, owned: frozenset[int]) -> None:
        """Do nothing: their parents reap them."""

    def end(self, grace: float) -> tuple[int, ...]:
        """Give all of them `grace` seconds to end, then kill them; give up after a few seconds.

        Returns:
            Ids of processes that even SIGKILL did not end.
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
    """The terminals of workers that a user started: each worker writes to its own, and notes go to all.

    Args:
        handles: returns the processes whose terminals these are.
    """

    def __init__(self, handles: Callable[[], Iterable[ExternalHandle]]) -> None:
        self.sinks = ()
        self.drops = False
        self.chief = 0
        self._handles = handles
        self._prefixers = []
        self._told = set()
        self.readers = []

    def shows(self, worker: int) -> bool:
        """True, because each worker writes to its own terminal."""
        return True

    def say(self, text: str) -> None:
        """Show a note, once per terminal."""
        for read in self.readers:
            read(text)
        seen = set()
        for sink in [handle.terminal for handle in self._handles() if handle.terminal is not None]:
            with contextlib.suppress(OSError):
                status = os.fstat(sink.descriptor)
                if (status.st_dev, status.st_ino) not in seen:
                    seen.add((status.st_dev, status.st_ino))
                    sink.write(f"lockstep: {text}\n".encode(errors="backslashreplace"))
