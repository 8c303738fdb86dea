"""The contract of a launcher, which starts workers, and the launcher for this host."""

import contextlib
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from lockstep.launcher.fork_server import ForkServer, ForkServerPlan
from lockstep.launcher.import_scan import NOTHING
from lockstep.protocol.channel import Channel
from lockstep.protocol.worker import AgentMessage, WorkerMessage
from lockstep.system.child_process import connected
from lockstep.transport.packet_channel import PacketChannel

AgentChannel = Channel[AgentMessage, WorkerMessage]
"""The agent's end of the channel to a worker."""


@dataclass(frozen=True)
class Launch:
    """One worker to start.

    Attributes:
        worker: its id.
        environment: returns its whole environment, given the number of its control descriptor in this
            process.
    """

    worker: int
    environment: Callable[[int], Mapping[str, str]]


class Handle(Protocol):
    """A running worker.

    Attributes:
        pid: its process id.
        exited: a descriptor that becomes readable when the worker has ended.
        channel: the agent's end of the channel to it.
    """

    pid: int
    exited: int
    channel: AgentChannel

    def poll(self) -> int | None:
        """Return the exit status (negative for a signal), `UNKNOWN_STATUS`, or None while the worker runs."""

    def send_signal(self, number: int) -> None:
        """Send a signal to its main process, unless that has ended."""

    def close(self) -> None:
        """Close the descriptors."""


class PipedHandle(Handle, Protocol):
    """A worker that was started.

    Attributes:
        stdout: read end of its stdout; does not block.
        stderr: read end of its stderr, likewise.
    """

    stdout: int
    stderr: int


class Launcher(Protocol):
    """Starts workers."""

    def prepare(self) -> int | None:
        """Prepare to start workers.

        Returns:
            A descriptor that becomes readable when `prepare` should be called again; None if `start` can be
            called now.

        Raises:
            OSError: the fork server cannot be started.
        """

    def start(self, launch: Launch) -> PipedHandle:
        """Start one worker.

        Raises:
            OSError: the process cannot be started.
        """

    def close(self) -> None:
        """Start no more workers, and release everything that starting them needs."""


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
        """Send a signal through the pidfd, which never refers to another process."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.exited, number)

    def close(self) -> None:
        """Close the descriptors."""
        for descriptor in (self.stdout, self.stderr, self.exited):
            os.close(descriptor)
        self.channel.close()


class LocalLauncher:
    """Starts workers as children of this process, which must adopt orphans.

    They are forked from a fork server that has imported the modules that they need. If the server ends before
    it is ready, a new one does not import modules; if it ends later, a new one imports the same modules.

    Args:
        plan: the settings that the workers share.
    """

    def __init__(self, plan: ForkServerPlan) -> None:
        self._plan = plan
        self._server: ForkServer | None = None

    def prepare(self) -> int | None:
        """Start the fork server, or check whether it is ready.

        Raises:
            OSError: the process cannot be started.
        """
        if self._server is not None and self._server.has_ended():
            ready = self._server.ready
            self.close()
            if not ready and self._plan.scan == NOTHING:
                raise OSError("the fork server failed to start")
            if not ready:
                self._plan = self._plan.without_imports()
        if self._server is None:
            self._server = ForkServer.begin(self._plan)
        return None if self._server.ready else self._server.fileno()

    def start(self, launch: Launch) -> LocalHandle:
        """Start one worker in a new session, without a terminal."""
        assert self._server is not None
        with connected() as (mine, theirs), contextlib.ExitStack() as undo:
            stdout, out = os.pipe()
            stderr, err = os.pipe()
            for descriptor in (stdout, stderr):
                undo.callback(os.close, descriptor)
                os.set_blocking(descriptor, False)
            try:
                descriptors = (out, err, theirs.fileno())
                pid = self._server.fork(launch.environment(theirs.fileno()), descriptors)
                exited = os.pidfd_open(pid)
            finally:
                os.close(out)
                os.close(err)
            undo.pop_all()
        return LocalHandle(pid, exited, stdout, stderr, PacketChannel(mine, WorkerMessage))

    def close(self) -> None:
        """End the fork server."""
        if self._server is not None:
            self._server.close()
            self._server = None
