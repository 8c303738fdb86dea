"""Programs that tell of every step they take, and what is needed to watch them lose a process.

All processes of a program write a line a step into one named pipe. They are started here, and all of them and
of their children are gone when the watch ends, however it ends.
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
    # An error, not a wait, if whoever listens has gone.
    descriptor = os.open(os.environ[PIPE], os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(descriptor, True)
    return descriptor


def tell(worker: int, number: int, view: int = 0) -> None:
    """Say that this process has just ended a step."""
    # One write of less than PIPE_BUF bytes: lines of several processes do not mix.
    os.write(_pipe(), f"{worker} {os.getpid()} {number} {view} {time.monotonic()!r}\n".encode())


class Steps:
    """A Keras callback, but for its base class: tells of each step."""

    def __init__(self, worker: int, steps: int, view: Callable[[], int] = int) -> None:
        super().__init__()
        self._worker = worker
        self._steps = steps
        self._view = view
        self.epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        tell(self._worker, self.epoch * self._steps + batch, self._view())


class Watch:
    """Starts the processes of one program and hears of their steps.

    Attributes:
        variables: what they find in their environment.
        steps: heard so far.
    """

    def __init__(self, folder: Path, variables: dict[str, str]) -> None:
        path = folder / "steps"
        os.mkfifo(path)
        # For writing too, so that it has no end while nobody writes.
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

    def start_again(self) -> None:
        """End all processes, and start them anew."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        commands = [process.args for process in self.processes]
        self.processes.clear()
        for command in commands:
            self.start(command)

    def hear(self, seconds: float) -> list[Step]:
        """Return steps that have not been heard of, after waiting for one for so long."""
        if not select.select([self._pipe], [], [], seconds)[0]:
            return []
        *lines, self._rest = (self._rest + os.read(self._pipe, 2**16)).split(b"\n")
        heard = [parsed(line) for line in lines]
        self.steps += heard
        return heard

    def hear_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.hear(left)

    def until(self, reached: Callable[[], bool], what: str) -> None:
        """Hear until `reached()`; the processes that were started have to live as long."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not reached():
            self.hear(LOOK_SECONDS)
            if any(process.poll() is not None for process in self.processes):
                raise FailedError(f"{what}: a process ended early\n{self._end_of_log()}")
            if time.monotonic() > deadline:
                raise FailedError(f"{what}: not in {PATIENCE_SECONDS:.0f} s\n{self._end_of_log()}")

    def have_taken(
        self, processes: int, least: int, which: Callable[[Step], bool] = lambda step: True
    ) -> bool:
        """Tell whether so many processes have taken at least `least` steps of these."""
        counts = Counter(step.pid for step in self.steps if which(step))
        return sum(count >= least for count in counts.values()) >= processes

    def end(self) -> None:
        """End all processes, and those that they have started."""
        everybody = [child for process in self.processes for child in descendants(process.pid)]
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            stop(process)
        for child in everybody:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(everybody, STOP_SECONDS)
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


def parsed(line: bytes) -> Step:
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
