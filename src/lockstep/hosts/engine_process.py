"""A process of a job that an actor starts on its node; it ends with the actor."""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import IO

from lockstep.protocol.channel import PeerGone, Unreadable
from lockstep.protocol.engine import EngineCommand, EngineReport
from lockstep.system.child_process import command_of, connected
from lockstep.system.environment import ENGINE, for_engine_process
from lockstep.system.event_loop import wait_for
from lockstep.system.exit_status import shell_status
from lockstep.transport.packet_channel import PacketChannel

_CHUNK = 64 * 1024
_END = 3.0


class EngineProcess:
    """A command of Lockstep in a process group of its own, connected by a socket and a pipe.

    All processes of the command end when the pipe, its stdin, closes, even if this process is killed.

    Args:
        words: the arguments of `lockstep`.
        start: the first message.
        folder: its working folder.
        environment: the variables of the user that can change the results of a script.
        show: called in threads with its output: the number of the stream (1 for stdout, 2 for stderr), and
            the bytes. None to write to the streams of this process.
        inherited: descriptors that it inherits with the same numbers.
        program: the module that it runs; its arguments are the words.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self,
        words: Sequence[str],
        start: EngineCommand,
        folder: str,
        environment: dict[str, str],
        show: Callable[[int, bytes], None] | None = None,
        inherited: Sequence[int] = (),
        program: str = "lockstep",
    ) -> None:
        stream = subprocess.PIPE if show is not None else None
        # Ray lowers the priority of its processes; training counts as the node's main work.
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        with connected() as (ours, theirs):
            self._channel: PacketChannel[EngineCommand, EngineReport] = PacketChannel(ours, EngineReport)
            self._channel.send(start)
            self.process = subprocess.Popen(
                command_of(program, *words),
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=stream,
                pass_fds=(theirs.fileno(), *inherited),
                env=for_engine_process(environment) | {ENGINE: str(theirs.fileno())},
                cwd=folder,
                start_new_session=True,
            )
        self._readers = []
        if show is not None:
            for number, pipe in ((1, self.process.stdout), (2, self.process.stderr)):
                assert pipe is not None
                reader = threading.Thread(target=_pass_on, args=(pipe, number, show), daemon=True)
                reader.start()
                self._readers.append(reader)

    def send(self, message: EngineCommand) -> None:
        """Send the process a message."""
        self._channel.send(message)

    def receive(self, patience: float) -> EngineReport | None:
        """Return the next report of the process, or None after `patience` seconds, or if it has ended."""
        if not wait_for([self._channel.fileno()], patience):
            return None
        report = self._channel.receive()
        return None if isinstance(report, PeerGone | Unreadable) else report

    @property
    def status(self) -> int | None:
        """The exit status, after all output has been passed on, or None before."""
        status = self.process.poll()
        if status is None or any(reader.is_alive() for reader in self._readers):
            return None
        return shell_status(status)

    @property
    def was_killed(self) -> bool:
        """Whether a signal has ended the process."""
        return self.process.returncode is not None and self.process.returncode < 0

    def signal(self, number: int) -> None:
        """Pass a signal on."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def end(self) -> None:
        """End the process and all its descendants."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(_END)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._channel.close()


def _pass_on(pipe: IO[bytes], number: int, show: Callable[[int, bytes], None]) -> None:
    with pipe:
        while data := os.read(pipe.fileno(), _CHUNK):
            show(number, data)
