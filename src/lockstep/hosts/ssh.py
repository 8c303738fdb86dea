"""Agents that the command starts on other hosts with the user's own `ssh`."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from lockstep.errors import UnfitError
from lockstep.protocol.host import RemoteInstruction, RemoteReport
from lockstep.system.child_process import command_of
from lockstep.system.event_loop import EventLoop
from lockstep.transport.stream_channel import StreamChannel

_OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20")
_PIECE = 4096
_ENDS_WITHIN = 5.0
"""Seconds from the end of its output in which ssh ends."""
_NOT_FOUND = 127


@dataclass
class SshAgent:
    """An agent on another host; its channel consists of the pipes of an `ssh` process.

    Attributes:
        name: the name of the host, for `ssh`.
        process: the `ssh` process.
        channel: the channel to the agent.
    """

    name: str
    process: "subprocess.Popen[bytes]"
    channel: StreamChannel[RemoteInstruction, RemoteReport]
    _said: bytes = b""
    _lines: list[str] = field(default_factory=list)

    @classmethod
    def start(cls, name: str, most_queued: int) -> "SshAgent":
        """Start `ssh`, and with it the agent.

        The program on the other host is the Python of this process, at the same path.

        Raises:
            UnfitError: `ssh` cannot be started.
        """
        agent = shlex.join(command_of("lockstep", "agent", "--stdio"))
        command = ("ssh", *_OPTIONS, "--", name, f"exec {agent}")
        pipe = subprocess.PIPE
        try:
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)
        except OSError as error:
            raise UnfitError(f"--hosts needs ssh, which cannot be started: {error.strerror}") from None
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        reading, writing = os.dup(process.stdout.fileno()), os.dup(process.stdin.fileno())
        process.stdout.close()
        process.stdin.close()
        os.set_blocking(process.stderr.fileno(), False)
        channel: StreamChannel[RemoteInstruction, RemoteReport] = StreamChannel(
            RemoteReport, reading, writing, most_queued=most_queued
        )
        return cls(name, process, channel)

    def watch(self, loop: EventLoop, say: Callable[[str], None], children: set[int]) -> None:
        """Show each line that `ssh` and the agent write to stderr, until `ssh` ends and leaves `children`."""
        assert self.process.stderr is not None
        descriptor = self.process.stderr.fileno()
        ended = os.pidfd_open(self.process.pid)

        def reap() -> None:
            loop.unwatch(ended)
            os.close(ended)
            self.process.wait()
            children.discard(self.process.pid)

        loop.watch(ended, reap)

        def read() -> None:
            try:
                data = os.read(descriptor, _PIECE)
            except BlockingIOError:
                return
            if not data:
                loop.unwatch(descriptor)
            *lines, self._said = (self._said + data).split(b"\n")
            for line in lines:
                text = line.decode(errors="replace").rstrip().removeprefix("lockstep: ")
                say(f"{self.name}: {text}")

        loop.watch(descriptor, read)

    def why_lost(self) -> str:
        """Return why the channel ended before the agent answered."""
        try:
            status = self.process.wait(_ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            return "ssh has closed its output but not ended"
        install = "Lockstep must be installed there, with Python at the same path"
        if status == _NOT_FOUND:
            return f"it has no {sys.executable}; {install}"
        return (
            f"ssh exited with status {status}; `ssh {self.name} true` must work without a question; {install}"
        )
