"""Jobs that run `stepping.py` on hosts."""

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chaos_steps
from host_network import Host

HERE = Path(__file__).parent
HOLDING = HERE / "holding.py"
CHAOS = HERE.parent / "chaos"

REPLICAS = 5


def digest(text: str) -> str:
    """The digest that one worker has printed."""
    (line,) = [line for line in text.splitlines() if line.startswith("digest ")]
    return line.removeprefix("digest ")


class SteppingJob:
    """A job at the command of a host.

    Args:
        hold: of its `JobSpec`, which no command sets.

    Attributes:
        running: the command.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        options: str,
        steps: int = 12,
        *faults: str,
        at: int = 0,
        run: str = "run",
        megabytes: int = 0,
        hold: float | None = None,
        **variables: str,
    ) -> None:
        self._hosts, self._steps = hosts, steps
        for host in hosts:
            for file in (HERE / "stepping.py", CHAOS / "chaos_steps.py", CHAOS / "chaos_faults.py"):
                shutil.copy(file, host.work)
        job_options = ("--backend", "jax", "--replicas", str(REPLICAS), "--run-dir", run, *options.split())
        size = f"+{megabytes}" if megabytes else ""
        command = ("run", *job_options, "stepping.py", f"{steps}{size}", *faults)
        if hold is None:
            self.running = hosts[at].lockstep(*command, **variables)
        else:
            self.running = hosts[at].start(sys.executable, str(HOLDING), f"{hold}", *command, **variables)
        self.folder = hosts[at].work / run

    def end(self) -> int:
        """Wait for the end; return the exit status."""
        return self.running.end()

    def finish(self) -> dict[int, str]:
        """Wait for the end of a job that succeeds; return the digests of the workers that finished."""
        assert self.end() == 0, self.running.err
        found = self.digests()
        assert set(found.values()) == {chaos_steps.alone(0, REPLICAS, self._steps)[-1]}, self.running.err
        return found

    def digests(self) -> dict[int, str]:
        """The digests that workers have printed."""
        found = {}
        for path in self.folder.glob("worker-*.log"):
            for line in path.read_text().splitlines():
                if line.startswith("digest "):
                    found[int(path.stem.removeprefix("worker-"))] = line.removeprefix("digest ")
        return found

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The events of one kind."""
        path = self.folder / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def process(self, worker: int) -> int:
        """The process id of a worker."""
        return next(event["pid"] for event in self.events("started") if event["worker"] == worker)

    def steps(self, worker: int) -> int:
        """The number of steps that a worker has made."""
        path = self.folder / f"worker-{worker}.log"
        return path.read_text().count("made ") if path.exists() else 0

    def wait_held(self, step: int) -> None:
        """Wait until a worker holds at a step."""
        name = f"held-{step}"
        self.running.wait_until(lambda: any((host.work / name).exists() for host in self._hosts))

    def go(self, step: int) -> None:
        """Let workers that hold at a step continue."""
        self._signal(f"go-{step}")

    def hurry(self) -> None:
        """Let workers wait no more."""
        self._signal("fast")

    def _signal(self, name: str) -> None:
        for host in self._hosts:
            (host.work / name).touch()
