"""Processes started by hand, each with its own terminal and `TF_CONFIG`."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 600.0

Config = dict[str, Any]


class Terminal:
    """A process and the output on its terminal."""

    def __init__(self, process: "subprocess.Popen[bytes]", shown: Path) -> None:
        self.process = process
        self._shown = shown

    @property
    def text(self) -> str:
        """The output so far."""
        return self._shown.read_text()

    def until(self, text: str) -> None:
        """Wait until the terminal shows `text`."""
        deadline = time.monotonic() + PATIENCE
        while text not in self.text:
            assert self.process.poll() is None or text in self.text, self.text
            assert time.monotonic() < deadline, self.text
            time.sleep(0.01)

    def status(self) -> int:
        """Wait for the process to exit; return its status, negative for a signal."""
        return self.process.wait(PATIENCE)

    def end(self) -> str:
        """Wait for the process to exit with status 0; return its output."""
        assert self.status() == 0, self.text
        return self.text

    def stop(self, number: int = signal.SIGKILL) -> None:
        """Send a signal and wait for the process to exit."""
        self.process.send_signal(number)
        self.process.wait(PATIENCE)


@dataclass
class Host:
    """A folder, terminals, and addresses that no other process uses."""

    folder: Path
    ports: list[int]
    started: list[Terminal] = field(default_factory=list)

    def config(self, index: int, workers: int = 2, kind: str = "worker", **cluster: Any) -> Config:
        """The `TF_CONFIG` of a task; by default one of two workers."""
        listed = cluster or {"worker": [f"127.0.0.1:{port}" for port in self.ports[:workers]]}
        return {"cluster": listed, "task": {"type": kind, "index": index}}

    def script(self, text: str, name: str = "main.py") -> str:
        (self.folder / name).write_text(text)
        return name

    def start(self, config: Config | str | None, *command: str, **environment: str) -> Terminal:
        """Start `python command...` in a new terminal."""
        variables = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment}
        variables.pop("TF_CONFIG", None)
        if config is not None:
            variables["TF_CONFIG"] = config if isinstance(config, str) else json.dumps(config)
        shown = self.folder / f"terminal-{len(self.started)}"
        with shown.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, *command],
                cwd=self.folder,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        self.started.append(Terminal(process, shown))
        return self.started[-1]

    def events(self) -> str:
        """The text of the only job's event log."""
        (folder,) = (self.folder / "runs").iterdir()
        return (folder / "events.jsonl").read_text()

    def coordinators(self) -> list[int]:
        """Pidfds of the coordinators of jobs with these addresses."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    command = (entry / "cmdline").read_bytes()
                    if (
                        b"lockstep.rendezvous.coordinator_main" in command
                        and str(self.ports[0]).encode() in command
                    ):
                        found.append(os.pidfd_open(int(entry.name)))
                except (FileNotFoundError, ProcessLookupError):
                    continue
        return found

    def close(self) -> None:
        for terminal in self.started:
            terminal.stop()
        for coordinator in self.coordinators():
            assert select.select([coordinator], [], [], PATIENCE)[0], "a coordinator still runs"
            os.close(coordinator)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path, free_ports(3))
    yield made
    made.close()


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = sorted(each.getsockname()[1] for each in sockets)
    for each in sockets:
        each.close()
    return ports


@pytest.fixture
def is_gone() -> Callable[[Sequence[int], float], bool]:
    """Return whether all processes exit within some seconds; close their pidfds."""

    def gone(pidfds: Sequence[int], within: float) -> bool:
        deadline = time.monotonic() + within
        ended = [
            bool(select.select([one], [], [], max(0.0, deadline - time.monotonic()))[0]) for one in pidfds
        ]
        for one in pidfds:
            os.close(one)
        return all(ended)

    return gone
