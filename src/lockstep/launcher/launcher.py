"""How workers come to life: a seam with one local implementation; `fake_launcher` has another."""

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from lockstep.launcher.fork_server import ForkServer, ForkServerPlan
from lockstep.launcher.import_scan import NOTHING
from lockstep.protocol.channel import Channel
from lockstep.protocol.worker import AgentMessage, WorkerMessage
from lockstep.transport.packet_channel import PacketChannel

AgentChannel = Channel[AgentMessage, WorkerMessage]
"""The agent's end of the channel to a worker."""


@dataclass(frozen=True)
class Launch:
    """One worker to start.

    Attributes:
        worker: its id.
        environment: its whole environment, given the number of its control descriptor in this process.
    """

    worker: int
    environment: Callable[[int], Mapping[str, str]]


class Handle(Protocol):
    """A worker that runs.

    Attributes:
        pid: its process id.
        exited: a descriptor that becomes readable when the worker has ended.
        channel: the agent's end of the channel to it.
    """

    pid: int
    exited: int
    channel: AgentChannel

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal, or `UNKNOWN_STATUS`; None while the worker runs."""

    def send_signal(self, number: int) -> None:
        """Send a signal to its main process; nothing happens if that has ended."""

    def close(self) -> None:
        """Close the descriptors."""


class PipedHandle(Handle, Protocol):
    """A worker that was started.

    Attributes:
        stdout: read end of what it writes there; does not block.
        stderr: likewise.
    """

    stdout: int
    stderr: int


class Launcher(Protocol):
    """Starts workers."""

    def prepare(self) -> int | None:
        """Make ready to start workers.

        Returns:
            A descriptor that becomes readable when it is time to ask again; None where `start` need not wait.

        Raises:
            OSError: the machine cannot.
        """

    def start(self, launch: Launch) -> PipedHandle:
        """Start one worker.

        Raises:
            OSError: the machine cannot.
        """

    def close(self) -> None:
        """Start no more; what is only there to start workers is gone then."""


@dataclass
class LocalHandle:
    """A worker that is a child of this process."""

    pid: int
    exited: int
    stdout: int
    stderr: int
    channel: AgentChannel
    _status: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, and reap the process."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def send_signal(self, number: int) -> None:
        """Send a signal through the pidfd, which never means another process."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.exited, number)

    def close(self) -> None:
        """Close the descriptors."""
        for descriptor in (self.stdout, self.stderr, self.exited):
            os.close(descriptor)
        self.channel.close()


class LocalLauncher:
    """Starts workers as children of this process, which has to be one that adopts orphans.

    They are forked from a parent that has imported what they need. One that ends before that is followed by
    one that imports nothing; one that is lost later by its like.

    Args:
        plan: what the workers have in common.
    """

    def __init__(self, plan: ForkServerPlan) -> None:
        self._plan = plan
        self._parent: ForkServer | None = None

    def prepare(self) -> int | None:
        """Start the parent, or see whether it is ready.

        Raises:
            OSError: the machine cannot.
        """
        if self._parent is not None and self._parent.is_gone():
            ready = self._parent.ready
            self.close()
            if not ready and self._plan.scan == NOTHING:
                raise OSError("the fork server failed to start")
            if not ready:
                self._plan = self._plan.without_imports()
        if self._parent is None:
            self._parent = ForkServer.begin(self._plan)
        return None if self._parent.ready else self._parent.fileno()

    def start(self, launch: Launch) -> LocalHandle:
        """Start one worker in a session of its own, without a terminal."""
        assert self._parent is not None
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stdout, out = os.pipe()
        stderr, err = os.pipe()
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(mine.close)
            for descriptor in (stdout, stderr):
                undo.callback(os.close, descriptor)
                os.set_blocking(descriptor, False)
            try:
                descriptors = (out, err, theirs.fileno())
                pid = self._parent.fork(launch.environment(theirs.fileno()), descriptors)
                exited = os.pidfd_open(pid)
            finally:
                os.close(out)
                os.close(err)
            undo.pop_all()
        return LocalHandle(pid, exited, stdout, stderr, PacketChannel(mine, WorkerMessage))

    def close(self) -> None:
        """End the parent."""
        if self._parent is not None:
            self._parent.close()
            self._parent = None
