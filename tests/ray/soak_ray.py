"""Runs jobs on clusters of Ray with faults at random times; the bits must stay those of one process.

    soak_ray.py [SEED [FAULTS]]

Clusters have two to four nodes; each runs several jobs. The head node is spared, and the worker there; others
are lost, also raylets, workers, and the actors of agents and of the coordinator. With redis-server, the
control store is started again too. Prints each job, and everything about those that fail. Ends after so many
faults.
"""

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from job_on_ray import Job  # noqa: E402
from ray_cluster import RayCluster, has_redis  # noqa: E402

MOST_NODES = 4
STEPS = 2500
JOBS = 8
"""On one cluster."""
OPTIONS = f"-n {MOST_NODES} --max-restarts 1000"
"""As many workers as there may be nodes: one runs on the head node."""
KINDS = (
    *("coordinator", "coordinator", "coordinator", "agent", "agent", "worker", "worker"),
    *("node", "raylet", "new node", "new node", "control store"),
)
VARIABLES = {
    "PYTHONPATH": str(HERE.parent / "lean"),
    "HIDDEN_PACKAGES": "sklearn,IPython,tensorflow,torch",
    "JAX_PLATFORMS": "cpu",
}


class Cluster:
    """A cluster, and which of its nodes live."""

    def __init__(self, cluster: RayCluster) -> None:
        self.ray = cluster
        self.living = list(range(cluster.nodes))

    def add(self) -> None:
        """Start another node."""
        self.ray.tell("add")
        self.living.append(self.ray.nodes - 1)

    def happen(self, kind: str, job: Job, random_: random.Random) -> bool:
        """Let a fault happen; return whether there was something to lose."""
        others = self.living[1:]
        match kind:
            case "coordinator":
                return _kill(self.ray.actors("CoordinatorActor"))
            case "agent":
                return bool(others) and _kill(self.ray.actors("AgentActor", random_.choice(others)))
            case "worker":
                workers = {event["pid"] for event in job.events("started")}
                agents = [actor for node in others for actor in self.ray.actors("AgentActor", node)]
                found = [process for agent in agents for process in _below(agent) if process.pid in workers]
                return bool(found) and _kill([random_.choice(found)])
            case "node" | "raylet":
                if not others:
                    return False
                self.living.remove(lost := random_.choice(others))
                self.ray.tell(f"kill {lost}" if kind == "node" else f"raylet {lost} SIGKILL")
            case "new node":
                if len(self.living) >= MOST_NODES:
                    return False
                self.add()
            case "control store":
                if not has_redis():
                    return False
                self.ray.tell("gcs SIGKILL")
                self.ray.tell("gcs start")
        return True


def _below(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def _kill(processes: list[psutil.Process]) -> bool:
    for process in processes:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.Error:
            return False
    return bool(processes)


def play(cluster: Cluster, job: Job, random_: random.Random, faults: list[str]) -> None:
    """Let faults happen to a job; add those that there were to a list."""
    job.wait_until(lambda: job.steps(0) > 0 or job.process.poll() is not None)
    wanted = random_.randint(10, 30)
    while len(faults) < wanted and job.process.poll() is None:
        time.sleep(random_.choice((0.0, 0.05, 0.3, 1.0, 2.0)))
        kind = random_.choice(KINDS)
        if cluster.happen(kind, job, random_):
            faults.append(kind)


@contextmanager
def cluster_of(random_: random.Random, folder: Path) -> Iterator[Cluster]:
    with closing(RayCluster(random_.randint(2, MOST_NODES), folder, keeps=has_redis())) as made:
        yield Cluster(made)


def run(cluster: Cluster, folder: Path, number: int) -> tuple[Counter[str], str]:
    """Run a job; return its faults, and what came of it."""
    random_ = random.Random(number)
    while len(cluster.living) < 2:
        cluster.add()
    job = Job(cluster.ray, folder, STEPS, os.environ | VARIABLES, OPTIONS)
    faults: list[str] = []
    try:
        play(cluster, job, random_, faults)
        result = f"finished: {sorted(job.finish())}"
        job.await_end()
        job.wait_until(lambda: not cluster.ray.actors("AgentActor"))
        shutil.rmtree(folder)
    except Exception as error:
        result = f"FAILED {error!r:.3000}"
        job.close()
    return Counter(faults), f"{'; '.join(faults)} {result}"


def main(seed: int = 0, wanted: int = 300) -> int:
    failures, number = 0, seed
    counted: Counter[str] = Counter()
    folder = Path(tempfile.mkdtemp(prefix="soak-ray-"))
    while counted.total() < wanted:
        with cluster_of(random.Random(number), folder / f"cluster-{number}") as cluster:
            until = number + JOBS
            what = ""
            # What a job that has failed leaves would disturb the next one.
            while number < until and counted.total() < wanted and "FAILED" not in what:
                faults, what = run(cluster, folder / f"job-{number}", number)
                counted += faults
                failures += "FAILED" in what
                print(number, what, flush=True)
                number += 1
    print(f"{number - seed} jobs, {failures} failed; {counted.total()} faults:", dict(counted), flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
