"""Jobs on real clusters of Ray: the digest is that of one process, whatever is lost."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

HERE = Path(__file__).parent
HOSTS = HERE.parent / "hosts"
CHAOS = HERE.parent / "chaos"
sys.path.insert(0, str(CHAOS))

import chaos_steps  # noqa: E402

REPLICAS = 5
PATIENCE = 240.0
PACED = [f"{worker}:0:after apply:pace" for worker in range(6)]


class RayCluster:
    """A cluster; see `ray_cluster.py`."""

    def __init__(self, nodes: int, log: Path) -> None:
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, HERE / "ray_cluster.py", str(nodes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0"},
            )
        self.address = self._line()
        assert self.address, log.read_text()

    def tell(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        assert self._line() == "done"

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        self._process.communicate(timeout=PATIENCE)


class Job:
    """`stepping.py` on a cluster."""

    def __init__(self, cluster: RayCluster, folder: Path, steps: int, variables: dict[str, str]) -> None:
        for file in (HOSTS / "stepping.py", CHAOS / "chaos_steps.py", CHAOS / "chaos_faults.py"):
            shutil.copy(file, folder)
        self.folder, self._steps = folder, steps
        command = f"run --on ray -n 2 --backend jax --replicas {REPLICAS} stepping.py {steps}"
        self._shown = folder / "shown"
        with self._shown.open("wb") as shown:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "lockstep", *command.split(), *PACED],
                cwd=folder,
                stdout=shown,
                stderr=shown,
                env=os.environ | variables | {"RAY_ADDRESS": cluster.address},
            )

    @property
    def text(self) -> str:
        return self._shown.read_text()

    def steps(self, worker: int, what: str = "made") -> int:
        return sum(log.read_text().count(f"{what} ") for log in self._logs(worker))

    def wait_until(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < until, self.text
            time.sleep(0.05)

    def finish(self) -> set[int]:
        (self.folder / "fast").touch()
        assert self.process.wait(PATIENCE) == 0, self.text
        found = {}
        for log in self._logs("*"):
            if digest := re.search("^digest (.*)$", log.read_text(), re.MULTILINE):
                found[int(log.stem.removeprefix("worker-"))] = digest[1]
        assert set(found.values()) == {chaos_steps.alone(0, REPLICAS, self._steps)[-1]}, self.text
        return set(found)

    def _logs(self, worker: int | str) -> list[Path]:
        return list(self.folder.glob(f"runs/*/worker-{worker}.log"))


def processes(text: str, folder: Path) -> list[psutil.Process]:
    """The processes with a text in the command line, in a folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if text in " ".join(process.cmdline()) and process.cwd() == str(folder):
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    made = RayCluster(2, tmp_path_factory.mktemp("cluster") / "log")
    yield made
    made.close()


def test_losses_and_a_new_node(
    cluster: RayCluster, tmp_path: Path, environment: dict[str, str], lean: Callable[..., dict[str, str]]
) -> None:
    """The actor of the coordinator is killed, then a node, and another node joins."""
    job = Job(cluster, tmp_path, 1000, environment | lean(HOSTS / "stepping.py", "jax"))
    job.wait_until(lambda: job.steps(1) > 3)
    for process in psutil.process_iter():
        if "ray::CoordinatorActor" in " ".join(process.cmdline() or [""]):
            process.send_signal(signal.SIGKILL)
    job.wait_until(lambda: "taking over a job of 2 hosts whose coordinator was lost, in view 1" in job.text)
    cluster.tell("kill 1")
    job.wait_until(lambda: "was lost: the connection to its agent is closed" in job.text)
    cluster.tell("add")
    job.wait_until(lambda: job.steps(2) > 1)
    assert 2 in job.finish()
    job.wait_until(lambda: not processes("lockstep", tmp_path))


@pytest.mark.slow
def test_a_node_that_is_drained(
    cluster: RayCluster, tmp_path: Path, environment: dict[str, str], lean: Callable[..., dict[str, str]]
) -> None:
    """Its worker leaves before the node is killed, another starts on a new node, and no step is redone."""
    job = Job(cluster, tmp_path, 1000, environment | lean(HOSTS / "stepping.py", "jax"))
    job.wait_until(lambda: job.steps(1) > 3)
    cluster.tell("drain 1")
    job.wait_until(lambda: " left (1 worker, view 2)" in job.text)
    cluster.tell("add")
    job.wait_until(lambda: job.steps(2) > 1)
    cluster.tell("kill 1")
    job.wait_until(lambda: ", as announced; its workers had left" in job.text)
    assert 2 in job.finish()
    assert "retires: Ray drains its node" in job.text
    for worker in range(3):
        assert job.steps(worker, "computes") == job.steps(worker)
