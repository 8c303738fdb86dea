"""Programs that stay alive and take turns, so that each is measured under the same weather.

The driver listens on a Unix socket. Every process of every program connects, says who it is, and then does
one turn of work for each message it gets, answering with what it measured. The driver waits for nothing
without an end: a process that ends early or is silent for too long ends everything, by name.
"""

import hashlib
import json
import os
import select
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memory_regime import Probe

SOCKET = "BENCH_TURNS"
PORTS = "BENCH_PORTS"
"""Two ports of the loopback that nobody listens on, for programs that meet there."""
CONNECT_SECONDS = 300.0
TURN_SECONDS = 300.0
END_SECONDS = 60.0
STOP_SECONDS = 10.0
LOOK_SECONDS = 0.5


class Line:
    """One end of a connection that carries a JSON value a line."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._file = connection.makefile("rw")

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: Any) -> None:
        self._file.write(json.dumps(message) + "\n")
        self._file.flush()

    def receive(self) -> Any:
        """Return the next message, None once the other end is gone."""
        line = self._file.readline()
        return json.loads(line) if line.endswith("\n") else None


class Turns:
    """A process's end: wait for a turn, do it, answer."""

    def __init__(self, program: str, process: int) -> None:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(os.environ[SOCKET])
        self._driver = Line(connection)
        self._driver.send({"program": program, "process": process})

    def wait(self) -> None:
        """Return when it is this process's turn."""
        if self._driver.receive() is None:
            sys.exit("the driver is gone")

    def answer(self, seconds: float, loss: float, weights: Iterable[Any] = ()) -> None:
        """Tell how long the turn took, and what two processes must have in common after it."""
        digest = hashlib.sha256()
        for array in weights:
            digest.update(array.tobytes())
        self.send({"seconds": seconds, "loss": float(loss).hex(), "weights": digest.hexdigest()})

    def send(self, measured: dict[str, Any]) -> None:
        """Tell what was measured in the turn."""
        self._driver.send(measured)


class Epochs:
    """A Keras callback, but for its base class: waits before each epoch, and answers after it."""

    model: Any

    def __init__(self, program: str, process: int) -> None:
        super().__init__()
        self._name = program, process
        self._turns: Turns | None = None
        self._begun = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._turns is None and epoch:
            # The first epoch compiles: it is nobody's turn.
            self._turns = Turns(*self._name)
        if self._turns is not None:
            self._turns.wait()
        self._begun = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        seconds = time.perf_counter() - self._begun
        if self._turns is not None:
            self._turns.answer(seconds, logs["loss"], self.model.get_weights())


class FailedError(Exception):
    """A program ended early, or was silent for too long."""


@dataclass(eq=False)
class Program:
    """Some processes that work together; `answers[turn][process]` is what they measured.

    `commands` start the processes, one each or all at once; `variables` is their own part of the environment.
    """

    name: str
    commands: list[list[str]]
    processes: int
    replicas: int
    variables: dict[str, str] = field(default_factory=dict)
    answers: list[list[dict[str, Any]]] = field(default_factory=list)
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)
    ends: dict[int, Line] = field(default_factory=dict)

    @contextmanager
    def running(self, address: str) -> Iterator[None]:
        """Start the processes, which connect to `address`; they are gone when this ends."""
        meeting = {SOCKET: address, PORTS: " ".join(map(str, free_ports(2)))}
        environment = os.environ | self.variables | meeting
        try:
            for command in self.commands:
                self.children.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL))
            yield
        finally:
            self.stop()

    def stop(self) -> None:
        """End the processes."""
        for process in self.children:
            stop(process)

    def take_turn(self) -> None:
        for process, end in self.ends.items():
            try:
                end.send("go")
            except OSError as error:
                raise FailedError(f"{self.name}: process {process} {self._how_it_ended()}") from error
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + TURN_SECONDS
        while missing := {self.ends[process]: process for process in self.ends.keys() - answers.keys()}:
            # All at once: when one ends early, the others may wait for it without an end.
            for end in select.select(list(missing), [], [], LOOK_SECONDS)[0]:
                answer = end.receive()
                if answer is None:
                    raise FailedError(f"{self.name}: process {missing[end]} {self._how_it_ended()}")
                answers[missing[end]] = answer
            if time.monotonic() > deadline:
                silent = sorted(missing.values())
                raise FailedError(f"{self.name}: no answer from {silent} in {TURN_SECONDS:.0f} s")
        self.answers.append([answers[process] for process in range(self.processes)])

    def finish(self) -> None:
        """Wait until the processes have ended by themselves."""
        statuses = [ended(process, END_SECONDS) for process in self.children]
        if None in statuses:
            raise FailedError(f"{self.name}: does not end after its last turn")
        if any(statuses):
            raise FailedError(f"{self.name}: the processes ended with {statuses}")

    def is_here(self) -> bool:
        """Whether all processes have connected; an error once one that has not cannot any more."""
        here = len(self.ends) == self.processes
        if not here and any(process.poll() is not None for process in self.children):
            raise FailedError(f"{self.name}: could not start; {self._how_it_ended()}")
        return here

    def _how_it_ended(self) -> str:
        statuses = [ended(process, LOOK_SECONDS) for process in self.children]
        return f"ended early (exit statuses {statuses}; None is still alive)"


def ended(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Return the exit status, None if the process is still alive after some time."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    if ended(process, STOP_SECONDS) is None:
        process.kill()
        process.wait()


def pin(*cores: int) -> None:
    """Keep this process on these cores; to be called before a framework counts them."""
    found = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {found[core % len(found)] for core in cores})


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback that nobody listens on at this moment."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [free.getsockname()[1] for free in sockets]


def meet(listener: socket.socket, programs: list[Program]) -> None:
    """Wait until the processes of all programs have connected."""
    deadline = time.monotonic() + CONNECT_SECONDS
    named = {program.name: program for program in programs}
    while missing := [program.name for program in programs if not program.is_here()]:
        if select.select([listener], [], [], LOOK_SECONDS)[0]:
            end = Line(listener.accept()[0])
            hello = end.receive()
            if hello is not None:
                named[hello["program"]].ends[hello["process"]] = end
        if time.monotonic() > deadline:
            raise FailedError(f"not ready after {CONNECT_SECONDS:.0f} s: {', '.join(missing)}")


def take_turns(
    folder: Path,
    programs: list[Program],
    turns: int,
    trial: int = 0,
    choose: Callable[[], list[Program]] | None = None,
) -> list[float]:
    """Start all programs, let each do `turns` turns, one program at a time, in alternating order.

    Args:
        folder: for the socket where they meet.
        programs: to be started.
        turns: of each program.
        trial: turns after which only the programs that `choose` returns go on.
        choose: as told.

    Returns:
        The GB/s that each core could copy before each turn of all.
    """
    # As an error, so that the processes are ended first.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
    probe, regime, playing = Probe(), list[float](), programs
    with socket.socket(socket.AF_UNIX) as listener, ExitStack() as stack:
        listener.bind(str(folder / "turns"))
        listener.listen(64)
        for program in programs:
            stack.enter_context(program.running(listener.getsockname()))
        meet(listener, programs)
        for turn in range(turns):
            if choose is not None and turn == trial:
                playing = choose()
                for program in programs:
                    if program not in playing:
                        program.stop()
            regime.append(probe.rate())
            for program in playing if turn % 2 == 0 else reversed(playing):
                program.take_turn()
        for program in playing:
            program.finish()
    return regime


@dataclass(frozen=True)
class Spread:
    """The median and the 10th and 90th percentiles of some numbers."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        tenths = statistics.quantiles(values, n=10, method="inclusive")
        return cls(statistics.median(values), tenths[0], tenths[-1])

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def print_regime(regime: list[float]) -> None:
    """Print how fast the memory was."""
    print(f"  memory: each core copies {Spread.of(regime)} GB/s while the others do")
