"""Programs that may crash, hang or write anything: each runs in its own process, with a time limit."""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Self

import psutil

from lockstep.system.descendants import LinuxDescendants, children_now
from lockstep.system.exit_status import signal_name
from lockstep.system.prctl import adopt_orphans

_ENDING = 1.0
_LOOK_EVERY = 0.05
_SAY_EVERY = 5.0
_PART = 2**16
_MOST_KEPT = 2**20
"""Bytes to keep of the beginning of a program's output, and as many of its end."""
_SHOWN = 300


@dataclass(frozen=True)
class Ended:
    """How a program ended.

    Attributes:
        status: its exit status, negative for a signal; None if it timed out or was not started.
        output: what it wrote to stdout; of a long output, the beginning and the end.
        errors: what it wrote to stderr; likewise.
        seconds: how long it ran.
        fault: why it could not be started; empty if it could.
    """

    status: int | None
    output: str
    errors: str
    seconds: float
    fault: str = ""

    def how(self) -> str:
        """Describe how it ended, as the end of a sentence."""
        if self.fault:
            return f"could not be started: {self.fault}"
        if self.status is None:
            return f"was still running after {self.seconds:.0f} s"
        how = f"exited with status {self.status}"
        if self.status < 0:
            how = f"was killed by {signal_name(-self.status)}"
        line = self._last_line()
        return f"{how}: {line}" if line else how

    def _last_line(self) -> str:
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        return lines[-1][-_SHOWN:] if lines else ""


class ProbeProgram:
    """A running process that is killed when this one ends."""

    def __init__(self, process: "subprocess.Popen[bytes]", begun: float, grace: float) -> None:
        self._process = process
        self._begun = begun
        self._grace = grace
        self._has_ended = False
        assert process.stdout is not None
        assert process.stderr is not None
        self.streams = (_ProbeOutput(process.stdout.fileno()), _ProbeOutput(process.stderr.fileno()))

    @classmethod
    def start(cls, command: Sequence[str], environment: Mapping[str, str], grace: float = 0.0) -> Self:
        """Start it in a new session, so that it can be ended with its children.

        Args:
            command: the program's path and its arguments.
            environment: its variables.
            grace: seconds that it has after SIGTERM to end its children.

        Raises:
            OSError: the machine cannot.
        """
        # Otherwise a hanging program would outlive a killed command.
        bound = [sys.executable, "-P", "-m", "lockstep.doctor.bound", str(os.getpid())]
        process = subprocess.Popen(
            [*bound, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        return cls(process, time.monotonic(), grace)

    def result(self, deadline: float, say: Callable[[float], object] = lambda seconds: None) -> Ended:
        """Wait for the end, until `deadline` on the monotonic clock, and return how it ended; call this once.

        `say` is called every few seconds with the seconds waited so far.
        """
        return results([self], deadline, lambda places, seconds: say(seconds))[0]

    def end(self) -> None:
        """End it, if it runs, and the remaining processes of its session."""
        if self._has_ended:
            return
        self._has_ended = True
        below = []
        if self._process.poll() is None:
            with contextlib.suppress(psutil.Error):
                below = psutil.Process(self._process.pid).children(recursive=True)
            if self._grace:
                # `lockstep run` then ends its workers, which have their own sessions.
                self._process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(self._grace)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for process in below:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.wait()

    def told(self, status: int | None, seconds: float) -> Ended:
        """Return how it ended, once it has."""
        output, errors = (stream.rest() for stream in self.streams)
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        return Ended(status, output, errors, seconds)

    def seconds(self) -> float:
        """Return how long it has been running."""
        return time.monotonic() - self._begun

    def status(self) -> int | None:
        """Return its exit status; None if it runs."""
        return self._process.poll()


def results(
    programs: Sequence[ProbeProgram],
    deadline: float,
    say: Callable[[Sequence[int], float], object] = lambda places, seconds: None,
) -> list[Ended]:
    """Wait for all at once, and return how each ended.

    Args:
        programs: to wait for.
        deadline: on the monotonic clock.
        say: called every few seconds with the indices of those that still run and the seconds waited so far.
    """
    begun = reported = time.monotonic()
    ways: dict[int, tuple[int | None, float]] = {}
    # The output of a program must neither fill the memory nor block the program.
    with selectors.PollSelector() as selector:
        for stream in (stream for program in programs for stream in program.streams):
            selector.register(stream.descriptor, selectors.EVENT_READ, stream)
        while True:
            for place, program in enumerate(programs):
                if place not in ways and (status := program.status()) is not None:
                    ways[place] = status, program.seconds()
                    program.end()
            now = time.monotonic()
            left = deadline - now
            if left <= 0 or len(ways) == len(programs):
                break
            if now - reported >= _SAY_EVERY:
                reported = now
                say([place for place in range(len(programs)) if place not in ways], now - begun)
            for key, _ in selector.select(min(left, _LOOK_EVERY)):
                if not key.data.read():
                    selector.unregister(key.fd)
    for place, program in enumerate(programs):
        ways.setdefault(place, (None, program.seconds()))
    for program in programs:
        program.end()
    return [program.told(*ways[place]) for place, program in enumerate(programs)]


@contextmanager
def nothing_left() -> Iterator[None]:
    """End all processes started within, in any session, also after SIGTERM and SIGHUP."""
    spare = children_now()
    with contextlib.suppress(OSError):
        adopt_orphans()
    heard = [
        number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL
    ]

    def leave(number: int, frame: FrameType | None) -> None:
        for each in heard:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in heard:
        signal.signal(number, leave)
    try:
        yield
    finally:
        LinuxDescendants(spare).end(grace=0)


class _ProbeOutput:
    """The beginning and the end of a program's output to a pipe."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self._start = bytearray()
        self._end = bytearray()
        self._has_lost = False

    def read(self) -> bool:
        """Read the available data; return whether more may come."""
        try:
            part = os.read(self.descriptor, _PART)
        except BlockingIOError:
            return True
        room = _MOST_KEPT - len(self._start)
        self._start += part[:room]
        self._end += part[room:]
        if len(self._end) > 2 * _MOST_KEPT:
            del self._end[:-_MOST_KEPT]
            self._has_lost = True
        return bool(part)

    def rest(self) -> str:
        """Read the rest of the pipe, and return all kept output."""
        # An escaped process may still write: this reads no more than a pipe holds.
        for _ in range(_MOST_KEPT // _PART):
            if not self.read():
                break
        gap = b"\n...\n" if self._has_lost else b""
        return bytes(self._start + gap + self._end).decode("utf-8", "replace")
