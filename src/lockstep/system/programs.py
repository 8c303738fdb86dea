"""Programs that may crash, hang or write any output. Each runs in its own process, with a time limit."""

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Self

import psutil

from lockstep.system.child_process import ending_with_this_process
from lockstep.system.descendants import LinuxDescendants, children_now
from lockstep.system.exit_status import describe_exit
from lockstep.system.load import PROC, process_counters
from lockstep.system.prctl import adopt_orphans

_POLL_SECONDS = 0.05
_REPORT_SECONDS = 5.0
_MOST_DELAY = 240.0
"""By how many seconds a time limit grows at most while programs wait for a core."""
_READ_SIZE = 2**16
_MAX_KEPT = 2**20
"""Bytes to keep of the beginning of a program's output, and of its end."""
_MAX_LINE = 300


@dataclass(frozen=True)
class ProgramResult:
    """How a program ended.

    Attributes:
        status: its exit status, negative for a signal; None if it timed out or was not started.
        output: its stdout; only the beginning and the end of a long output.
        errors: its stderr, likewise cut.
        seconds: the time for which it ran.
        fault: why it could not be started; empty if it could.
    """

    status: int | None
    output: str
    errors: str
    seconds: float
    fault: str = ""

    def how(self) -> str:
        """Describe how the program ended, as the end of a sentence."""
        if self.fault:
            return f"could not be started: {self.fault}"
        if self.status is None:
            return f"was still running after {self.seconds:.0f} s"
        how = describe_exit(self.status)
        line = self._last_line()
        return f"{how}: {line}" if line else how

    def _last_line(self) -> str:
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        return lines[-1][-_MAX_LINE:] if lines else ""


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
        """Start a program in a new session, so that it can be ended with its children.

        Args:
            command: the program's path and its arguments.
            environment: its variables.
            grace: the seconds that it has after SIGTERM to end its children.

        Raises:
            OSError: the program cannot be started.
        """
        # Otherwise a hanging program would outlive a command that is killed.
        process = subprocess.Popen(
            ending_with_this_process(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        return cls(process, time.monotonic(), grace)

    def result(self, deadline: float) -> ProgramResult:
        """Wait for the end, at most until `deadline` as in `results`, and return the result.

        Call this once.
        """
        return results([self], deadline)[0]

    def end(self) -> None:
        """End the program, if it runs, and the remaining processes of its session."""
        if self._has_ended:
            return
        self._has_ended = True
        children: list[psutil.Process] = []
        if self._process.poll() is None:
            children = self._children()
            if self._grace:
                # On SIGTERM, `lockstep run` ends its workers, which have their own sessions.
                self._process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(self._grace)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for process in children:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.wait()

    def collect(self, status: int | None, seconds: float) -> ProgramResult:
        """Return the result of the program, which has ended."""
        output, errors = (stream.rest() for stream in self.streams)
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        return ProgramResult(status, output, errors, seconds)

    def seconds(self) -> float:
        """Return the time for which the program has been running."""
        return time.monotonic() - self._begun

    def status(self) -> int | None:
        """Return its exit status, or None while it runs."""
        return self._process.poll()

    def delay(self) -> float:
        """Return the most seconds for which one of its threads was ready to run and had no core.

        Its other threads may also have used the cores.
        """
        pids = [self._process.pid, *(child.pid for child in self._children())]
        counters = filter(None, (process_counters(pid, PROC) for pid in pids))
        return max((max(each.delays.values(), default=0.0) for each in counters), default=0.0)

    def _children(self) -> list[psutil.Process]:
        children: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(self._process.pid).children(recursive=True)
        return children


def results(
    programs: Sequence[ProbeProgram],
    deadline: float,
    say: Callable[[Sequence[int], float], object] = lambda indices, seconds: None,
) -> list[ProgramResult]:
    """Wait for all programs, and return their results.

    Args:
        programs: the programs to wait for.
        deadline: the time on the monotonic clock at which this gives up. It is delayed by the time for which
            the programs wait for a core, up to `_MOST_DELAY`.
        say: called every few seconds with the indices of running programs and the seconds waited so far.
    """
    begun = reported = time.monotonic()
    delay = 0.0
    ends: dict[int, tuple[int | None, float]] = {}
    # Output must neither fill the memory nor block the program.
    with selectors.PollSelector() as selector:
        for stream in (stream for program in programs for stream in program.streams):
            selector.register(stream.descriptor, selectors.EVENT_READ, stream)
        while True:
            for index, program in enumerate(programs):
                if index not in ends and (status := program.status()) is not None:
                    ends[index] = status, program.seconds()
                    program.end()
            now = time.monotonic()
            left = deadline + delay - now
            if left <= 0 and len(ends) < len(programs):
                delay = max(program.delay() for index, program in enumerate(programs) if index not in ends)
                delay = min(delay, _MOST_DELAY)
                left = deadline + delay - now
            if left <= 0 or len(ends) == len(programs):
                break
            if now - reported >= _REPORT_SECONDS:
                reported = now
                say([index for index in range(len(programs)) if index not in ends], now - begun)
            for key, _ in selector.select(min(left, _POLL_SECONDS)):
                if not key.data.read():
                    selector.unregister(key.fd)
    for index, program in enumerate(programs):
        ends.setdefault(index, (None, program.seconds()))
    for program in programs:
        program.end()
    return [program.collect(*ends[index]) for index, program in enumerate(programs)]


@contextmanager
def ending_descendants() -> Iterator[None]:
    """End all processes that were started within the block, in any session, even after SIGTERM and SIGHUP."""
    earlier = children_now()
    with contextlib.suppress(OSError):
        adopt_orphans()
    handled = [
        number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL
    ]

    def leave(number: int, frame: FrameType | None) -> None:
        for each in handled:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in handled:
        signal.signal(number, leave)
    try:
        yield
    finally:
        LinuxDescendants(earlier).end(grace=0)


class _ProbeOutput:
    """The output of a program to a pipe: its beginning and its end."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self._start = bytearray()
        self._end = bytearray()
        self._has_lost = False

    def read(self) -> bool:
        """Read the available data; return whether more may follow."""
        try:
            part = os.read(self.descriptor, _READ_SIZE)
        except BlockingIOError:
            return True
        room = _MAX_KEPT - len(self._start)
        self._start += part[:room]
        self._end += part[room:]
        if len(self._end) > 2 * _MAX_KEPT:
            del self._end[:-_MAX_KEPT]
            self._has_lost = True
        return bool(part)

    def rest(self) -> str:
        """Read the rest of the pipe, and return the kept output."""
        # A process that was not ended may still write, so this reads at most the content of the pipe.
        for _ in range(_MAX_KEPT // _READ_SIZE):
            if not self.read():
                break
        gap = b"\n...\n" if self._has_lost else b""
        return bytes(self._start + gap + self._end).decode("utf-8", "replace")
