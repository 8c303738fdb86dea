"""Programs that may crash, hang or write anything: each is a process of its own, with a time limit."""

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
"""Bytes of the beginning, and as many of the end, of what a program writes."""
_SHOWN = 300


@dataclass(frozen=True)
class Ended:
    """How a program has ended.

    Attributes:
        status: its exit status, negative for a signal; None if the time was over, or it was not started.
        output: what it wrote to stdout; of very much the beginning and the end.
        errors: what it wrote to stderr; the same.
        seconds: how long it has had.
        fault: why it could not be started; empty if it could.
    """

    status: int | None
    output: str
    errors: str
    seconds: float
    fault: str = ""

    def how(self) -> str:
        """Say how it has ended, as the end of a sentence."""
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
    """A process that runs, and is killed with this one."""

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
        """Start it, in a session of its own, so that all of it can be ended.

        Args:
            command: the program's path and its arguments.
            environment: its variables.
            grace: seconds that it has after SIGTERM to end what it has started.

        Raises:
            OSError: the machine cannot.
        """
        # Else what hangs would outlive a command that is killed.
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
        """Wait for the end, until `deadline` on the monotonic clock, and tell how it was; call it once.

        `say` hears every few seconds for how long this has waited.
        """
        return results([self], deadline, lambda places, seconds: say(seconds))[0]

    def end(self) -> None:
        """End it, if it runs, and what it has left in its session."""
        if self._has_ended:
            return
        self._has_ended = True
        below = []
        if self._process.poll() is None:
            with contextlib.suppress(psutil.Error):
                below = psutil.Process(self._process.pid).children(recursive=True)
            if self._grace:
                # `lockstep run` ends its workers then, which have sessions of their own.
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
        """Return how it was, once it has ended."""
        output, errors = (stream.rest() for stream in self.streams)
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        return Ended(status, output, errors, seconds)

    def seconds(self) -> float:
        """Return for how long it has been there."""
        return time.monotonic() - self._begun

    def status(self) -> int | None:
        """Return its exit status, None if it runs."""
        return self._process.poll()


def results(
    programs: Sequence[ProbeProgram],
    deadline: float,
    say: Callable[[Sequence[int], float], object] = lambda places, seconds: None,
) -> list[Ended]:
    """Wait for all at once, and tell of each how it has ended.

    Args:
        programs: to wait for.
        deadline: on the monotonic clock.
        say: hears every few seconds at which places those are that still run, and how long this has waited.
    """
    begun = said = time.monotonic()
    ways: dict[int, tuple[int | None, float]] = {}
    # Nobody reads for a program that waits: what it writes must never fill the memory, nor hold it up.
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
            if now - said >= _SAY_EVERY:
                said = now
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
    """End all that was started within, also what has left its session, and also after SIGTERM and SIGHUP."""
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
    """What a program writes to a pipe: the beginning and the end of it."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self._start = bytearray()
        self._end = bytearray()
        self._has_lost = False

    def read(self) -> bool:
        """Read what is there; return whether more may come."""
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
        """Read what the pipe still holds, and return all that was kept."""
        # A process that has escaped may still write: no more than a pipe holds is waited for.
        for _ in range(_MOST_KEPT // _PART):
            if not self.read():
                break
        gap = b"\n...\n" if self._has_lost else b""
        return bytes(self._start + gap + self._end).decode("utf-8", "replace")
