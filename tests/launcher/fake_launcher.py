"""Workers without processes, for tests: they do what they are told, at once."""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from lockstep.launcher.launcher import AgentChannel, Launch
from lockstep.protocol.worker import AgentMessage, WorkerMessage
from lockstep.transport.packet_channel import PacketChannel, encode


def end_by_signal(worker: "FakeHandle", number: int) -> None:
    """Do what a process without handlers does."""
    worker.end(-number)


@dataclass
class FakeHandle:
    """A worker that a test plays; `Handle` for the agent.

    Attributes:
        launch: how it was started.
        environment: what it was given.
        signals: what it was sent, in order.
        react: what it does about a signal.
        reaped: whether its exit status was taken elsewhere, and is lost.
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
    _mouth: socket.socket | None = None

    def poll(self) -> int | None:
        """Return the status given to `end`."""
        if self.reaped:
            raise ChildProcessError
        return self._status

    def send_signal(self, number: int) -> None:
        """Note the signal, and react."""
        if self._status is None:
            self.signals.append(number)
            self.react(self, number)

    def close(self) -> None:
        """Close the agent's ends, and the worker's if it was not ended."""
        self.end(0)
        for descriptor in (self.exited, self.stdout, self.stderr):
            os.close(descriptor)
        self.channel.close()

    def hear(self) -> list[AgentMessage]:
        """Return what the agent has sent since the last time."""
        assert self._mouth is not None
        channel: PacketChannel[WorkerMessage, AgentMessage] = PacketChannel(self._mouth, AgentMessage)
        messages = []
        while isinstance(message := channel.receive(), AgentMessage):
            messages.append(message)
        return messages

    def say(self, message: WorkerMessage) -> None:
        """Send a message to the agent."""
        self.say_raw(encode(message))

    def say_raw(self, packet: bytes) -> None:
        """Send any packet to the agent."""
        assert self._mouth is not None
        self._mouth.send(packet)

    def write(self, stdout: bytes = b"", stderr: bytes = b"") -> None:
        """Write; little enough for a pipe."""
        os.write(self._ends[1], stdout)
        os.write(self._ends[2], stderr)

    def end(self, status: int) -> None:
        """End, once."""
        if self._status is None:
            self._status = status
            assert self._mouth is not None
            self._mouth.close()
            for descriptor in self._ends:
                os.close(descriptor)


class FakeLauncher:
    """Starts workers that a test plays.

    Args:
        play: called with each worker that was started; raises OSError for one that cannot be.
        react: what workers do about a signal.
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
        """Nothing has to be made ready."""

    def close(self) -> None:
        """Nothing is there only to start workers."""

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
            _mouth=theirs,
        )
        self.started.append(handle)
        try:
            self._play(handle)
        except OSError:
            handle.close()
            raise
        return handle
