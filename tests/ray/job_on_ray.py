"""`stepping.py` on a Ray cluster."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import psutil

HOSTS = Path(__file__).parents[1] / "hosts"
CHAOS = Path(__file__).parents[1] / "chaos"
sys.path.insert(0, str(CHAOS))

import chaos_steps  # noqa: E402
from ray_cluster import RayCluster  # noqa: E402

REPLICAS = 5
PATIENCE = 600.0
PACED = [f"{worker}:0:after apply:pace" for worker in range(40)]


class Job:
    """A job whose workers wait a moment in each step, until it shall finish.

    Args:
        cluster: where it runs.
        folder: of the script; its own.
        steps: of the script.
        variables: of the user's environment.
        options: of `lockstep run`.
    """

    def __init__(
        self,
        cluster: RayCluster,
        folder: Path,
        steps: int,
        variables: dict[str, str],
        options: str = "-n 2",
        faults: list[str] = PACED,
    ) -> None:
        folder.mkdir(exist_ok=True)
        for file in (HOSTS / "stepping.py", CHAOS / "chaos_steps.py", CHAOS / "chaos_faults.py"):
            shutil.copy(file, folder)
        self.folder, self._steps = folder, steps
        command = f"run --on ray {options} --backend jax --replicas {REPLICAS} stepping.py {steps}"
        self._shown = folder / "shown"
        with self._shown.open("wb") as shown:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "lockstep", *command.split(), *faults],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=shown,
                stderr=shown,
                env=os.environ | variables | {"RAY_ADDRESS": cluster.address},
            )

    @property
    def text(self) -> str:
        """What the command has shown."""
        return self._shown.read_text()

    def steps(self, worker: int, what: str = "made") -> int:
        """The number of steps that a worker has made."""
        return sum(log.read_text().count(f"{what} ") for log in self._logs(worker))

    def made_since(self, moment: float) -> bool:
        """Whether a worker has made a step since then, by the monotonic clock."""
        return any(float(line) > moment for path in self.folder.glob("made-*") for line in _last(path))

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The events of a kind."""
        found = []
        for log in self.folder.glob("runs/*/events.jsonl"):
            found += [event for line in log.read_text().splitlines() if (event := json.loads(line))]
        return [event for event in found if event["event"] == kind]

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Wait until a condition holds."""
        until = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < until, self.text
            time.sleep(0.05)

    def hurry(self) -> None:
        """End the waits in steps."""
        (self.folder / "fast").touch()

    def finish(self) -> set[int]:
        """Wait for the end of a job that succeeds; return the workers that finished with the right digest."""
        self.hurry()
        assert self.process.wait(PATIENCE) == 0, self.text
        return self.digests()

    def digests(self) -> set[int]:
        """Return the workers that have finished, all with the digest of one process."""
        found = [
            (int(log.stem.removeprefix("worker-")), digest)
            for log in self._logs("*")
            for digest in re.findall("^digest (.*)$", log.read_text(), re.MULTILINE)
        ]
        assert {digest for _, digest in found} == {_alone(self._steps)}, self.text
        workers = [worker for worker, _ in found]
        assert len(workers) == len(set(workers)), "a worker has trained twice"
        return set(workers)

    def processes(self) -> list[psutil.Process]:
        """The processes of the job that live, but not those of Ray."""
        found = []
        for process in psutil.process_iter():
            try:
                own = process.cwd() == str(self.folder) and process.status() != psutil.STATUS_ZOMBIE
                if own and "ray" not in process.name():
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def await_end(self) -> None:
        """Wait until no process of the job is left."""
        until = time.monotonic() + PATIENCE
        while left := self.processes():
            assert time.monotonic() < until, [" ".join(process.cmdline()) for process in left]
            time.sleep(0.1)

    def close(self) -> None:
        """Kill what is left of the job."""
        self.process.kill()
        self.process.wait()
        for process in self.processes():
            process.kill()

    def _logs(self, worker: int | str) -> list[Path]:
        return list(self.folder.glob(f"runs/*/worker-{worker}.log"))


@cache
def _alone(steps: int) -> str:
    return chaos_steps.alone(0, REPLICAS, steps)[-1]


def _last(path: Path) -> list[str]:
    return path.read_text().splitlines()[-1:]


def kill(processes: list[psutil.Process], number: int = signal.SIGKILL) -> None:
    """Signal processes, which must be there."""
    assert processes
    for process in processes:
        process.send_signal(number)
