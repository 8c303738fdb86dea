"""Programs that stay alive and take turns, so that all are measured under the same conditions.

The driver listens on a Unix socket. Every process of every program connects and identifies itself. For each
message of the driver, it does one turn of work and answers with its measurements. All waits are limited: if a
process ends early or does not answer, the driver ends all programs and names that process.
"""

import hashlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memory_regime import MemoryProbe

SOCKET = "BENCH_TURNS"
REALTIME = "BENCH_REALTIME"
"""Set if the processes have real-time priority in their turns."""
PORTS = "BENCH_PORTS"
"""Two free ports of the loopback, for programs that connect there."""
CONNECT_SECONDS = 300.0
TURN_SECONDS = 300.0
END_SECONDS = 60.0
STOP_SECONDS = 10.0
LOOK_SECONDS = 0.5


class JsonLines:
    """One end of a connection that carries one JSON value per line."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._file = connection.makefile("rw")

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: Any) -> None:
        self._file.write(json.dumps(message) + "\n")
        self._file.flush()

    def receive(self) -> Any:
        """Return the next message; None if the other end is closed."""
        line = self._file.readline()
        return json.loads(line) if line.endswith("\n") else None


class Turns:
    """The connection of a process to the driver: it waits for a turn, works, and answers."""

    def __init__(self, program: str, process: int) -> None:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(os.environ[SOCKET])
        self._driver = JsonLines(connection)
        self._driver.send({"program": program, "process": process})
        self._begun = 0.0

    def wait(self) -> None:
        """Wait until the turn of this process begins."""
        if self._driver.receive() is None:
            sys.exit("the driver has ended")
        if REALTIME in os.environ:
            schedule(os.SCHED_FIFO, 1)
        self._begun = time.process_time()

    def answer(self, seconds: float, loss: float, weights: Iterable[Any] = ()) -> None:
        """Report the times of the turn, and the values that must be equal on all processes."""
        processor = time.process_time() - self._begun
        digest = hashlib.sha256()
        for array in weights:
            digest.update(array.tobytes())
        values = {"loss": float(loss).hex(), "weights": digest.hexdigest()}
        self.send({"seconds": seconds, "processor": processor, **values})

    def send(self, measured: dict[str, Any]) -> None:
        """Report the measurements of the turn."""
        if REALTIME in os.environ:
            schedule(os.SCHED_OTHER, 0)
        self._driver.send(measured)


class Epochs:
    """A Keras callback without its base class: one epoch per turn."""

    model: Any

    def __init__(self, program: str, process: int) -> None:
        super().__init__()
        self._name = program, process
        self._turns: Turns | None = None
        self._begun = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._turns is None and epoch:
            # The first epoch compiles; it is not a turn.
            self._turns = Turns(*self._name)
        if self._turns is not None:
            self._turns.wait()
        self._begun = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        seconds = time.perf_counter() - self._begun
        if self._turns is not None:
            self._turns.answer(seconds, logs["loss"], self.weights())

    def weights(self) -> Any:
        """Return the weights of the model."""
        return self.model.get_weights()


class FailedError(Exception):
    """A program ended early, did not answer, or computed a wrong result."""


@dataclass(eq=False)
class Program:
    """Processes that work together; `answers[turn][process]` are their measurements.

    `commands` start the processes, either one each or all together; `variables` extend their environment.
    """

    name: str
    commands: list[list[str]]
    processes: int
    replicas: int
    variables: dict[str, str] = field(default_factory=dict)
    answers: list[list[dict[str, Any]]] = field(default_factory=list)
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)
    ends: dict[int, JsonLines] = field(default_factory=dict)

    @contextmanager
    def running(self, address: str) -> Iterator[None]:
        """Start the processes, which connect to `address`; end them after the block."""
        own = {SOCKET: address, PORTS: " ".join(map(str, free_ports(2)))}
        environment = os.environ | self.variables | own
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
            # All at once: if one process ends early, the others may wait for it forever.
            for end in select.select(list(missing), [], [], LOOK_SECONDS)[0]:
                answer = end.receive()
                if answer is None:
                    raise FailedError(f"{self.name}: process {missing[end]} {self._how_it_ended()}")
                answers[missing[end]] = answer
            if time.monotonic() > deadline:
                silent = sorted(missing.values())
                raise FailedError(
                    f"{self.name}: the processes {silent} did not answer within {TURN_SECONDS:.0f} s"
                )
        self.answers.append([answers[process] for process in range(self.processes)])

    def finish(self) -> None:
        """Wait until the processes have ended."""
        statuses = [ended(process, END_SECONDS) for process in self.children]
        if None in statuses:
            raise FailedError(f"{self.name}: does not end after its last turn")
        if any(statuses):
            raise FailedError(f"{self.name}: the processes ended with {statuses}")

    def is_connected(self) -> bool:
        """Whether all processes have connected; raise FailedError if one has ended before."""
        connected = len(self.ends) == self.processes
        if not connected and any(process.poll() is not None for process in self.children):
            raise FailedError(f"{self.name}: could not start; {self._how_it_ended()}")
        return connected

    def _how_it_ended(self) -> str:
        statuses = [ended(process, LOOK_SECONDS) for process in self.children]
        return f"ended early (exit statuses {statuses}; None: still running)"


def ended(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Return the exit status; None if the process still runs after `seconds`."""
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
    """Pin this process to these cores; call this before a framework counts the cores."""
    found = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {found[core % len(found)] for core in cores})


def schedule(policy: int, priority: int) -> None:
    """Change the scheduling of all threads of this process, if that is allowed."""
    for thread in Path("/proc/self/task").iterdir():
        with suppress(PermissionError, ProcessLookupError):
            os.sched_setscheduler(int(thread.name), policy, os.sched_param(priority))


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback that are free now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [free.getsockname()[1] for free in sockets]


def accept_all(listener: socket.socket, programs: list[Program]) -> None:
    """Wait until the processes of all programs have connected."""
    deadline = time.monotonic() + CONNECT_SECONDS
    named = {program.name: program for program in programs}
    while missing := [program.name for program in programs if not program.is_connected()]:
        if select.select([listener], [], [], LOOK_SECONDS)[0]:
            end = JsonLines(listener.accept()[0])
            hello = end.receive()
            if hello is not None:
                named[hello["program"]].ends[hello["process"]] = end
        if time.monotonic() > deadline:
            raise FailedError(f"not connected after {CONNECT_SECONDS:.0f} s: {', '.join(missing)}")


def take_turns(
    folder: Path,
    programs: list[Program],
    turns: int,
    trial: int = 0,
    choose: Callable[[], list[Program]] | None = None,
) -> list[float]:
    """Start all programs and let each take `turns` turns, one program at a time, in alternating order.

    Args:
        folder: for the socket.
        programs: to start.
        turns: the number of turns of each program.
        trial: the number of turns after which only the programs that `choose` returns continue.
        choose: returns the programs that continue; None for all.

    Returns:
        The GB/s that each core could copy before each turn.
    """
    # As an exception, so that the processes are ended first.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
    probe, regime, active = MemoryProbe(), list[float](), programs
    with socket.socket(socket.AF_UNIX) as listener, ExitStack() as stack:
        listener.bind(str(folder / "turns"))
        listener.listen(64)
        for program in programs:
            stack.enter_context(program.running(listener.getsockname()))
        accept_all(listener, programs)
        for turn in range(turns):
            if choose is not None and turn == trial:
                active = choose()
                for program in programs:
                    if program not in active:
                        program.stop()
            regime.append(probe.rate())
            for program in active if turn % 2 == 0 else reversed(active):
                program.take_turn()
        for program in active:
            program.finish()
    return regime
