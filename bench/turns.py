"""Programs that stay alive and take turns, so that each is measured under the same weather.

The driver listens on a Unix socket. Every process of every program connects, says who it is, and then does
one turn of work for each message it gets, answering with what it measured.
"""

import json
import os
import socket
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SOCKET = "BENCH_TURNS"
CONNECT_SECONDS = 120.0
TURN_SECONDS = 300.0


class Turns:
    """A process's end: wait for a turn, do it, answer."""

    def __init__(self, path: str, program: str, process: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._file = self._socket.makefile("rw")
        self.answer({"program": program, "process": process})

    def wait(self) -> bool:
        """Return True when it is this process's turn, False once the driver is gone."""
        return self._file.readline() == "go\n"

    def answer(self, measured: dict[str, Any]) -> None:
        self._file.write(json.dumps(measured) + "\n")
        self._file.flush()


@dataclass
class Program:
    """Some processes that work together; `answers[turn][process]` is what they measured."""

    name: str
    processes: int
    answers: list[list[dict[str, Any]]] = field(default_factory=list)


def pin(core: int) -> None:
    """Keep this process on one core; to be called before a framework counts the cores."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[core % len(cores)]})


def take_turns(
    folder: Path, programs: list[Program], start: Callable[[Program, dict[str, str]], None], turns: int
) -> None:
    """Start all programs, let each do `turns` turns, one program at a time, in alternating order."""
    path = folder / "turns"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(64)
        listener.settimeout(CONNECT_SECONDS)
        ends: dict[tuple[str, int], Any] = {}
        for program in programs:
            # One after the other, so that none compiles while another does.
            start(program, {SOCKET: str(path)})
            for _ in range(program.processes):
                end, _ = listener.accept()
                end.settimeout(TURN_SECONDS)
                file = end.makefile("rw")
                hello = json.loads(file.readline())
                ends[hello["program"], hello["process"]] = file
        for turn in range(turns):
            for program in programs if turn % 2 == 0 else reversed(programs):
                own = [ends[program.name, process] for process in range(program.processes)]
                for file in own:
                    file.write("go\n")
                    file.flush()
                program.answers.append([json.loads(file.readline()) for file in own])


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
