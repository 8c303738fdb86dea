"""An engine on this machine: starts a coordinator and agents through the protocol of engines."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import chaos_steps
import psutil
from stepping_job import CHAOS, HERE, REPLICAS

from lockstep.hosts.engine_process import EngineProcess
from lockstep.protocol.engine import (
    CoordinatorListens,
    CoordinatorMoved,
    Retire,
    StartAgent,
    StartCoordinator,
    WorkersFound,
)
from lockstep.transport.keys import JobKey

PATIENCE = 600.0
_LOOK_EVERY = 0.02
_ADDRESS = "127.0.0.1"


class LocalEngine:
    """Runs `stepping.py`.

    Args:
        folder: where everything runs.
        options: of `lockstep run`.
        steps: of the script.
        faults: see `stepping.py`.
        variables: of the user's environment.
    """

    def __init__(
        self, folder: Path, options: str, steps: int, *faults: str, variables: dict[str, str]
    ) -> None:
        for file in (HERE / "stepping.py", CHAOS / "chaos_steps.py", CHAOS / "chaos_faults.py"):
            shutil.copy(file, folder)
        self.folder, self._steps = folder, steps
        place = "--on ray --run-dir runs/job"
        job = f"run {place} --backend jax --replicas {REPLICAS} --timeout 60 {options} stepping.py {steps}"
        self._words = (*job.split(), *faults)
        self._variables = variables
        self.key = JobKey.generate().text
        self.shown = bytearray()
        self.agents: list[EngineProcess] = []
        self.coordinator: EngineProcess | None = None
        self.address = ""

    def coordinate(self, workers: int, lease: float | None = None) -> None:
        """Start the coordinator, or another one; for `lease`, see `LeaseRenewed`."""
        again = self.coordinator is not None
        if self.coordinator is not None:
            self.coordinator.end()
        start = StartCoordinator(self.key, f"{_ADDRESS}:0", again, lease)
        show: Callable[[int, bytes], None] = lambda _, data: self.shown.extend(data)  # noqa: E731
        made = EngineProcess(self._words, start, str(self.folder), self._variables, show)
        self.coordinator = made
        report = made.receive(PATIENCE)
        assert isinstance(report, CoordinatorListens), self.text
        self.address = report.address
        for agent in self.agents:
            agent.send(CoordinatorMoved(self.address))
        made.send(WorkersFound(workers))

    def add(self, workers: int) -> EngineProcess:
        """Start an agent."""
        start = StartAgent(self.key, self.address, workers, _ADDRESS)
        agent = EngineProcess(["agent"], start, str(self.folder), self._variables)
        self.agents.append(agent)
        return agent

    def retire(self, worker: int) -> EngineProcess:
        """Tell the agent of a worker that its host will go soon; return the agent."""
        ids = {process.pid for process in psutil.Process(self._process(worker)).parents()}
        (agent,) = [agent for agent in self.agents if agent.process.pid in ids]
        agent.send(Retire("its time is over"))
        return agent

    def _process(self, worker: int) -> int:
        (log,) = self.folder.glob("runs/*/events.jsonl")
        events = map(json.loads, log.read_text().splitlines())
        return next(one["pid"] for one in events if one["event"] == "started" and one["worker"] == worker)

    @property
    def text(self) -> str:
        """What coordinators have shown."""
        return self.shown.decode()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds, while the job runs."""
        until = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < until, self.text
            time.sleep(_LOOK_EVERY)

    def steps(self, worker: int, what: str = "made") -> int:
        """The number of steps that a worker has made, or "computes", as all run folders have it."""
        return len(self.lines(worker, what))

    def lines(self, worker: int, what: str) -> list[str]:
        """What a worker has written of steps that it has made, or "computes"."""
        return [
            line
            for log in self._logs(worker)
            for line in log.read_text().splitlines()
            if line.startswith(f"{what} ")
        ]

    def hurry(self) -> None:
        """End the paces of the script."""
        (self.folder / "fast").touch()

    def finish(self) -> set[int]:
        """Wait for the end of a job that succeeds; return the workers that finished with the right digest."""
        coordinator = self.coordinator
        assert coordinator is not None
        self.wait_until(lambda: coordinator.status is not None)
        assert coordinator.status == 0, self.text
        self.wait_until(lambda: all(agent.status is not None for agent in self.agents))
        found = {}
        for log in self._logs("*"):
            for line in log.read_text().splitlines():
                if line.startswith("digest "):
                    found[int(log.stem.removeprefix("worker-"))] = line.removeprefix("digest ")
        assert set(found.values()) == {chaos_steps.alone(0, REPLICAS, self._steps)[-1]}, self.text
        return set(found)

    def _logs(self, worker: int | str) -> list[Path]:
        return list(self.folder.glob(f"runs/*/worker-{worker}.log"))

    def processes(self) -> list[int]:
        """The processes of the job that live."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cwd"):
            try:
                if path.readlink() == self.folder and int(path.parent.name) != os.getpid():
                    found.append(int(path.parent.name))
            except OSError:
                continue
        return found

    def close(self) -> None:
        """Let go of all processes, which end."""
        for process in (*self.agents, *([self.coordinator] if self.coordinator else [])):
            process.end()


def kill(process: EngineProcess) -> None:
    """Kill a command, not what it has started."""
    process.process.send_signal(signal.SIGKILL)
    process.process.wait(PATIENCE)
