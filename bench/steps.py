"""Programs that report each step, and a watch that starts them and observes the loss of a process.

All processes of a program write one line per step to one named pipe. When the watch ends, all processes that
it has started, and their children, have ended.
"""

import functools
import itertools
import os
import select
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from turns import LOOK_SECONDS, STOP_SECONDS, FailedError, stop

PIPE = "BENCH_STEPS"
PATIENCE_SECONDS = 300.0
LOG_LINES = 30


class Step(NamedTuple):
    """The end of a step in one process; `time` is of the monotonic clock, which all processes share."""

    worker: int
    pid: int
    number: int
    view: int
    time: float


@functools.cache
def _pipe() -> int:
    # If the reader has ended, this raises an error instead of waiting.
    descriptor = os.open(os.environ[PIPE], os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(descriptor, True)
    return descriptor


def report_step(worker: int, number: int, view: int = 0) -> None:
    """Report the end of a step of this process."""
    # A write of less than PIPE_BUF bytes is atomic: lines of several processes do not mix.
    os.write(_pipe(), f"{worker} {os.getpid()} {number} {view} {time.monotonic()!r}\n".encode())


class StepReports:
    """A Keras callback without its base class: reports each step."""

    def __init__(self, worker: int, steps: int, view: Callable[[], int] = int) -> None:
        super().__init__()
        self._worker = worker
        self._steps = steps
        self._view = view
        self.epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        report_step(self._worker, self.epoch * self._steps + batch, self._view())


class Watch:
    """Starts the processes of one program and receives their reports.

    Attributes:
        variables: environment variables of the processes.
        steps: the steps reported so far.
    """

    def __init__(self, folder: Path, variables: dict[str, str]) -> None:
        path = folder / "steps"
        os.mkfifo(path)
        # Also opened for writing, so that it does not end while no process writes.
        self._pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._rest = b""
        self._log = folder / "log"
        self.variables = variables | {PIPE: str(path), "TMPDIR": str(folder)}
        self.steps: list[Step] = []
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, command: Any) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                command, env=os.environ | self.variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.processes.append(process)
        return process

    def restart(self) -> None:
        """End all processes, and start them again."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        commands = [process.args for process in self.processes]
        self.processes.clear()
        for command in commands:
            self.start(command)

    def receive(self, seconds: float) -> list[Step]:
        """Wait for reports, at most for `seconds`; return the new ones."""
        if not select.select([self._pipe], [], [], seconds)[0]:
            return []
        *lines, self._rest = (self._rest + os.read(self._pipe, 2**16)).split(b"\n")
        reports = [parse(line) for line in lines]
        self.steps += reports
        return reports

    def receive_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.receive(left)

    def until(self, reached: Callable[[], bool], what: str) -> None:
        """Receive reports until `reached()`; raise FailedError if a process ends earlier."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not reached():
            self.receive(LOOK_SECONDS)
            if any(process.poll() is not None for process in self.processes):
                raise FailedError(f"{what}: a process ended early\n{self._end_of_log()}")
            if time.monotonic() > deadline:
                raise FailedError(
                    f"{what}: not reached within {PATIENCE_SECONDS:.0f} s\n{self._end_of_log()}"
                )

    def have_taken(
        self, processes: int, least: int, which: Callable[[Step], bool] = lambda step: True
    ) -> bool:
        """Whether at least `processes` processes have taken `least` of the steps that `which` selects."""
        counts = Counter(step.pid for step in self.steps if which(step))
        return sum(count >= least for count in counts.values()) >= processes

    def end(self) -> None:
        """End all processes and their children."""
        children = [child for process in self.processes for child in descendants(process.pid)]
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            stop(process)
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, STOP_SECONDS)
        os.close(self._pipe)

    def _end_of_log(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-LOG_LINES:])


@contextmanager
def watching(folder: Path, variables: dict[str, str]) -> Iterator[Watch]:
    watch = Watch(folder, variables)
    try:
        yield watch
    finally:
        watch.end()


def parse(line: bytes) -> Step:
    worker, pid, number, view, when = line.split()
    return Step(int(worker), int(pid), int(number), int(view), float(when))


def descendants(pid: int) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        found += psutil.Process(pid).children(recursive=True)
    return found


def of(pid: int, steps: Iterable[Step]) -> list[Step]:
    return [step for step in steps if step.pid == pid]


def gaps(steps: Iterable[Step]) -> list[float]:
    """Return the seconds between the ends of consecutive steps of one process."""
    times = [step.time for step in steps]
    return [after - before for before, after in itertools.pairwise(times)]


def usual(steps: Iterable[Step]) -> float:
    """Return how long a step usually takes, in seconds."""
    return statistics.median(gaps(steps))
