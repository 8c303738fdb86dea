"""A terminal that shows a picture and reads keys. It is restored at the end, and while the program stops."""

import contextlib
import os
import signal
import socket
import sys
import termios
import tty
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from lockstep.system.event_loop import wait_for
from lockstep.system.exit_status import STOP_SIGNALS

_HEARD = (*STOP_SIGNALS, signal.SIGTSTP, signal.SIGWINCH)
_WAKE = 0


class Input(NamedTuple):
    """The input of a terminal since the last wait.

    Attributes:
        typed: the characters that the user has typed.
        ended: the signal that tells the program to end, if any; SIGHUP if the terminal is gone.
    """

    typed: str = ""
    ended: int | None = None


class PictureTerminal:
    """The terminal of stdin and stdout, on its alternate screen, without echo, within a `with` block.

    Signals that end the program are reported by `wait`. Ctrl-Z stops it and restores the terminal. This class
    is for the main thread.

    Args:
        console: the console of stdout, which is a terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._keys = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._saved: Any = None
        self._handlers: dict[int, Any] = {}
        self._woken, self._wake = socket.socketpair()

    def __enter__(self) -> Self:
        for end in (self._woken, self._wake):
            end.setblocking(False)
        self._before = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        for number in _HEARD:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, _no_op)
        try:
            self._take()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._give_back()
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._before)
            self._woken.close()
            self._wake.close()

    @property
    def size(self) -> tuple[int, int]:
        """The present width and height in characters."""
        return self._console.size

    def show(self, lines: Iterable[tuple[str, str]]) -> None:
        """Replace the picture; each line is a text and its style."""
        if self._live is not None:
            text = Text("\n", no_wrap=True, end="").join(Text(line, style=style) for line, style in lines)
            self._live.update(text, refresh=True)

    def wake(self) -> None:
        """End the current or the next `wait`; for any thread."""
        with contextlib.suppress(OSError):
            self._wake.send(bytes([_WAKE]))

    def wait(self, seconds: float) -> Input:
        """Wait for a key, a signal or `wake`, for at most so many seconds."""
        watched = [self._woken.fileno()] + ([self._keys] if self._keys is not None else [])
        ready = wait_for(watched, seconds)
        ended = None
        with contextlib.suppress(BlockingIOError):
            numbers = self._woken.recv(4096)
            ended = next((number for number in numbers if number in STOP_SIGNALS), None)
            if ended is None and signal.SIGTSTP in numbers:
                self._stop()
        typed = b""
        if self._keys in ready and self._keys is not None:
            with contextlib.suppress(OSError):
                typed = os.read(self._keys, 4096)
            if not typed:
                # The terminal is gone.
                self._keys, ended = None, ended or signal.SIGHUP
        return Input(typed.decode(errors="ignore"), ended)

    def _take(self) -> None:
        if self._keys is not None:
            self._saved = termios.tcgetattr(self._keys)
            tty.setcbreak(self._keys)
        self._live = Live(
            console=self._console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def _give_back(self) -> None:
        live, self._live = self._live, None
        try:
            if live is not None:
                live.stop()
        finally:
            if self._keys is not None and self._saved is not None:
                with contextlib.suppress(termios.error):
                    termios.tcsetattr(self._keys, termios.TCSADRAIN, self._saved)
            self._saved = None

    def _stop(self) -> None:
        """Stop this process as Ctrl-Z does, until it is continued."""
        self._give_back()
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, handler)
        self._take()


def _no_op(number: int, frame: FrameType | None) -> None:
    """Do nothing, because a signal arrives through the wakeup descriptor."""
