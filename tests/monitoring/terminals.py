"""Commands in a terminal of their own, which tests type into and read."""

import contextlib
import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_DEADLINE = 180.0
_ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|[()][A-Z0-9]|[=>])")

# A shell of one command: in a session with this terminal, it runs the command in the foreground, and says how
# it ends and when it stops. A line `fg` to the pipe continues it.
_SHELL = """
import fcntl, os, signal, sys, termios

os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
say, hear = (int(number) for number in sys.argv[1:3])
before = termios.tcgetattr(0)
child = os.fork()
if child == 0:
    os.setpgid(0, 0)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    os.tcsetpgrp(0, os.getpid())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    os.close(say), os.close(hear)
    os.execvp(sys.argv[3], sys.argv[3:])
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
os.write(say, b"pid %d\\n" % child)
while True:
    _, status = os.waitpid(child, os.WUNTRACED)
    same = termios.tcgetattr(0)[:4] == before[:4]
    os.tcsetpgrp(0, os.getpgrp())
    how = b"stopped" if os.WIFSTOPPED(status) else b"ended %d" % os.waitstatus_to_exitcode(status)
    os.write(say, how + (b" restored\\n" if same else b" raw\\n"))
    if not os.WIFSTOPPED(status):
        break
    os.read(hear, 100)
    os.tcsetpgrp(0, child)
    os.kill(child, signal.SIGCONT)
"""


class Terminal:
    """A terminal, and a command that runs in it.

    Attributes:
        shown: everything that the command has shown so far, without escape sequences.
        raw: the same with them.
        pid: of the command.
    """

    def __init__(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str], size: tuple[int, int]
    ) -> None:
        self._end, theirs = os.openpty()
        self.resize(*size)
        self._said, say = os.pipe()
        hear, self._tell = os.pipe()
        # TERM decides whether a program shows pictures.
        variables = {**environment, "TERM": "xterm-256color"}
        shell = [sys.executable, "-c", _SHELL, str(say), str(hear), *command]
        self._process = subprocess.Popen(
            shell,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=folder,
            env=variables,
            pass_fds=(say, hear),
        )
        for descriptor in (theirs, say, hear):
            os.close(descriptor)
        self.raw = ""
        self._report = ""
        self.pid = int(self.reported("pid (.*)\n")[1])

    @property
    def shown(self) -> str:
        return _ESCAPES.sub("", self.raw)

    def resize(self, width: int, height: int) -> None:
        """Set the size in characters."""
        fcntl.ioctl(self._end, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def type(self, text: str) -> None:
        """Type a text; `\\x03` and `\\x1a` are Ctrl-C and Ctrl-Z."""
        os.write(self._end, text.encode())

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait until the command has shown this since the last call; return the match."""
        return self._wait(lambda: re.search(pattern, self.shown), pattern)

    def forget(self) -> None:
        """Let `wait_for` find only what follows."""
        self._read(0)
        self.raw = ""

    def reported(self, pattern: str) -> re.Match[str]:
        """Wait for a report of the shell: `stopped ...` or `ended STATUS ...`, with the terminal's mode."""
        found = self._wait(lambda: re.search(pattern, self._report), pattern)
        self._report = self._report[found.end() :]
        return found

    def foreground(self) -> None:
        """Continue the command, as `fg` does."""
        os.write(self._tell, b"fg")

    def close(self) -> None:
        """End everything."""
        # A command whose terminal is gone ends.
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        for descriptor in (self._end, self._said, self._tell):
            os.close(descriptor)

    def _wait(self, find, pattern: str):  # type: ignore[no-untyped-def]
        deadline = time.monotonic() + _DEADLINE
        while (found := find()) is None:
            left = deadline - time.monotonic()
            assert left > 0, f"{pattern!r} is missing in {self._report!r} and {self.shown[-3000:]!r}"
            self._read(left)
        return found

    def _read(self, seconds: float) -> None:
        ready, _, _ = select.select([self._end, self._said], [], [], seconds)
        if self._end in ready:
            try:
                self.raw += os.read(self._end, 65536).decode(errors="replace")
            except OSError:
                # No process has the terminal any more; what the shell says follows.
                self._report += os.read(self._said, 4096).decode()
        elif self._said in ready:
            self._report += os.read(self._said, 4096).decode()
