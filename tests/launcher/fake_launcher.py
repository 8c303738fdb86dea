"""Fake workers without processes."""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from lockstep.launcher.launcher import AgentChannel, Launch
from lockstep.protocol.worker import AgentMessage, WorkerMessage
from lockstep.transport.packet_channel import PacketChannel, encode


def end_by_signal(worker: "FakeHandle", number: int) -> None:
    """End like a process without signal handlers."""
    worker.end(-number)


@dataclass
class FakeHandle:
    """A fake worker; `Handle` for the agent.

    Attributes:
        launch: the arguments of its start.
        environment: the variables that it received.
        signals: the signals that it received, in order.
        react: handles a signal.
        reaped: whether its exit status is lost because another part has reaped it.
    """

    launch: Launch
    environment: dict[str, str]
    pid: int
    exited: int
    stdout: int
    stderr: int
    channel: AgentChannel
    react: Callable[["FakeHandle", int], None]
    signals: list[int] = field(default_factory=list)
    reaped: bool = False
    _status: int | None = None
    _ends: tuple[int, int, int] = (-1, -1, -1)
    _socket: socket.socket | None = None

    def poll(self) -> int | None:
        """Return the status given to `end`."""
        if self.reaped:
            raise ChildProcessError
        return self._status

    def send_signal(self, number: int) -> None:
        """Record the signal, and react."""
        if self._status is None:
            self.signals.append(number)
            self.react(self, number)

    def close(self) -> None:
        """Close the agent's ends, and the worker's if it has not ended."""
        self.end(0)
        for descriptor in (self.exited, self.stdout, self.stderr):
            os.close(descriptor)
        self.channel.close()

    def receive(self) -> list[AgentMessage]:
        """Return the messages of the agent since the last call."""
        assert self._socket is not None
        channel: PacketChannel[WorkerMessage, AgentMessage] = PacketChannel(self._socket, AgentMessage)
        messages = []
        while isinstance(message := channel.receive(), AgentMessage):
            messages.append(message)
        return messages

    def send(self, message: WorkerMessage) -> None:
        """Send a message to the agent."""
        self.send_packet(encode(message))

    def send_packet(self, packet: bytes) -> None:
        """Send any packet to the agent."""
        assert self._socket is not None
        self._socket.send(packet)

    def write(self, stdout: bytes = b"", stderr: bytes = b"") -> None:
        """Write no more than a pipe holds."""
        os.write(self._ends[1], stdout)
        os.write(self._ends[2], stderr)

    def end(self, status: int) -> None:
        """End, once."""
        if self._status is None:
            self._status = status
            assert self._socket is not None
            self._socket.close()
            for descriptor in self._ends:
                os.close(descriptor)


class FakeLauncher:
    """Starts fake workers.

    Args:
        play: called with each started worker; raises OSError if the start fails.
        react: handles the signals of workers.
    """

    def __init__(
        self,
        play: Callable[[FakeHandle], None],
        react: Callable[[FakeHandle, int], None] = end_by_signal,
    ) -> None:
        self.started: list[FakeHandle] = []
        self._play = play
        self._react = react

    def prepare(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def start(self, launch: Launch) -> FakeHandle:
        """Start one worker."""
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pipes = [os.pipe() for _ in range(3)]
        for reading, _ in pipes:
            os.set_blocking(reading, False)
        (exited, alive), (stdout, out), (stderr, err) = pipes
        handle = FakeHandle(
            launch=launch,
            environment=dict(launch.environment(theirs.fileno())),
            pid=1_000_000_000 + launch.worker,
            exited=exited,
            stdout=stdout,
            stderr=stderr,
            channel=PacketChannel(mine, WorkerMessage),
            react=self._react,
            _ends=(alive, out, err),
            _socket=theirs,
        )
        self.started.append(handle)
        try:
            self._play(handle)
        except OSError:
            handle.close()
            raise
        return handle
