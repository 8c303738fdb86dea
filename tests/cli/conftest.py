"""Real runs of the command, each in a new folder."""

import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 600.0


@dataclass
class Done:
    """A run that has ended."""

    status: int
    out: str
    err: str
    folder: Path

    @property
    def lines(self) -> list[str]:
        """The lines of the standard error, without those that only a slow machine shows."""
        return [line for line in self.err.splitlines() if "before the first step" not in line]

    @property
    def notes(self) -> list[str]:
        """Lockstep's notes among them, without the first two lines, rates, and waits on a slow machine."""
        varies = r"logs in |unless the script sets one|(examples|steps)/s with|has waited \d+ s for "
        return [line for line in self.lines if line.startswith("lockstep: ") and not re.search(varies, line)]

    def log(self, worker: int) -> str:
        return (self.folder / f"worker-{worker}.log").read_text()

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "events.jsonl").read_text().splitlines()]


class Running:
    """A run in progress."""

    def __init__(self, process: Any, folder: Path, pending: int) -> None:
        self.process = process
        self.folder = folder
        self._pending = pending
        self._text = b""

    def announced(self, count: int) -> dict[str, list[int]]:
        """Wait until `count` processes have called `announce`; return their pidfds by name."""
        deadline = time.monotonic() + PATIENCE
        while self._text.count(b"\n") < count:
            assert select.select([self._pending], [], [], deadline - time.monotonic())[0]
            self._text += os.read(self._pending, 4096)
        named: dict[str, list[int]] = {}
        for line in self._text.decode().splitlines():
            name, pid = line.split()
            named.setdefault(name, []).append(os.pidfd_open(int(pid)))
        self._text = b""
        return named

    def end(self) -> Done:
        """Wait for the command's end."""
        out, err = self.process.communicate(timeout=PATIENCE)
        return Done(self.process.returncode, out, err, self.folder)

    def agent(self) -> int:
        """The process id of the agent, which is the command's only child."""
        (child,) = self.children()
        return child

    def children(self) -> list[int]:
        """The process ids of the command's children, the oldest first."""
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def gone(pidfds: list[int], within: float) -> bool:
    """Return whether all processes exit `within` seconds; close their pidfds."""
    deadline = time.monotonic() + within
    ended = [
        bool(select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))[0]) for pidfd in pidfds
    ]
    for pidfd in pidfds:
        os.close(pidfd)
    return all(ended)


ANNOUNCE = """
import os, signal, subprocess, sys
from lockstep.worker import job
me = job.current().worker
barrier = job.current().communicator.barrier
def announce(name):
    announcements = os.open(os.environ["ANNOUNCEMENTS"], os.O_WRONLY)
    os.write(announcements, f"{name} {os.getpid()}\\n".encode())
    os.close(announcements)
def stay():
    while True:
        signal.pause()
def escape():
    '''Start a grandchild in a new session; its parent exits.'''
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        announce("grandchild")
        stay()
    os.waitpid(child, 0)
"""


class Lockstep:
    """Runs the command in `folder`."""

    def __init__(self, folder: Path, pending: int) -> None:
        self.folder = folder
        self._pending = pending
        self._started: list[subprocess.Popen[str]] = []

    def script(self, text: str, name: str = "script.py") -> str:
        """Write a script that can use the names of `ANNOUNCE`."""
        (self.folder / name).write_text(ANNOUNCE + text)
        return name

    def start(
        self, *arguments: str, run: str = "run", process_group: int | None = None, **environment: str
    ) -> Running:
        """Start `lockstep run`."""
        variables = {**os.environ, "ANNOUNCEMENTS": str(self.folder / "announcements"), **environment}
        command = [sys.executable, "-m", "lockstep", "run", "--run-dir", run, *arguments]
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=process_group,
        )
        self._started.append(process)
        return Running(process, self.folder / run, self._pending)

    def running(self, process: "subprocess.Popen[str] | None", run: str) -> Running:
        """Return a run whose command is another process than that of `start`."""
        return Running(process, self.folder / run, self._pending)

    def run(self, *arguments: str, run: str = "run", **environment: str) -> Done:
        """Run `lockstep run` to its end."""
        return self.start(*arguments, run=run, **environment).end()

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()


@pytest.fixture
def lockstep(tmp_path: Path) -> Iterator[Lockstep]:
    os.mkfifo(tmp_path / "announcements")
    pending = os.open(tmp_path / "announcements", os.O_RDWR)
    made = Lockstep(tmp_path, pending)
    yield made
    made.close()
    os.close(pending)


@pytest.fixture
def is_gone() -> Callable[[list[int], float], bool]:
    return gone
