"""Jobs on a Ray cluster, one of whose nodes is killed: Lockstep and Ray Train's TorchTrainer.

    ray_losses.py [--losses N] [--model NAME]

A cluster of this machine: a head without workers, and three nodes of one CPU. Two workers of one thread
train the same Keras model on PyTorch, one on each node; one more program is Lockstep on JAX. All processes
of the node of one of them are killed, alternately of the first and of the other worker; the third node is
there to replace it. Ray Train continues from its last checkpoint, one every 25 steps, once both workers run
again. Lockstep continues with the other worker, which the replacement joins later. The programs take turns
of one cluster each. Processes are not pinned.
"""

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from programs import HERE, environment
from report import print_row
from steps import Step, Watch, of, usual, watching
from turns import FailedError

LOSSES = 6
STEPS = 200
"""The steps of an epoch of Lockstep; Ray Train's program has none."""
EVERY = 25
BEFORE = 60
AFTER = 20
SETTLED = 5
NODES = 3


@dataclass(frozen=True)
class RayProgram:
    """A program for a cluster.

    Attributes:
        name: for the report.
        variables: its environment variables, also of the cluster.
        command: returns the command, given the address of the cluster, the model and a folder.
    """

    name: str
    variables: dict[str, str]
    command: Callable[[str, str, Path], list[str]]


def lockstep(address: str, model: str, folder: Path) -> list[str]:
    run = [sys.executable, "-m", "lockstep", "run", "--on", "ray", "-n", "2", "--threads-per-worker", "1"]
    return [*run, str(HERE / "recovery_lockstep.py"), model, str(STEPS)]


def ray_train(address: str, model: str, folder: Path) -> list[str]:
    return [sys.executable, str(HERE / "ray_ddp.py"), address, model, str(STEPS), str(EVERY), str(folder)]


PATH = {"PYTHONPATH": str(HERE), "RAY_TRAIN_V2_ENABLED": "1"}
PROGRAMS = (
    RayProgram("lockstep, torch", environment("torch", 1) | PATH, lockstep),
    RayProgram("Ray Train, ddp of keras", environment("torch", 1) | PATH, ray_train),
    RayProgram("lockstep, jax", environment("jax", 1) | PATH, lockstep),
)


@dataclass(frozen=True)
class Measured:
    """One job, in seconds.

    Attributes:
        first: from the start of the command until both workers have taken a step.
        step: a step of both workers.
        next: from the kill to the end of the next step of any worker.
        both: from the kill until two workers train again.
        lost: how many steps that were taken before had to be taken again.
    """

    first: float
    step: float
    next: float
    both: float
    lost: int


@contextmanager
def cluster(variables: dict[str, str]) -> Iterator[Any]:
    """Start a cluster whose processes have these environment variables."""
    from ray.cluster_utils import Cluster

    before = dict(os.environ)
    os.environ.update(variables | {"RAY_USAGE_STATS_ENABLED": "0"})
    memory = {"object_store_memory": 80 << 20}
    try:
        made: Any = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **memory}
        )
        try:
            for _ in range(NODES):
                made.add_node(num_cpus=1, **memory)
            yield made
        finally:
            made.shutdown()
    finally:
        os.environ.clear()
        os.environ.update(before)


def kill_node(node: Any) -> float:
    """Kill all processes of a node together; return when."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    processes = [*raylet.children(recursive=True), raylet]
    killed = time.monotonic()
    for process in processes:
        process.send_signal(signal.SIGKILL)
    return killed


def node_of(made: Any, pid: int) -> Any:
    """Return the node on which a process runs."""
    above = {parent.pid for parent in psutil.Process(pid).parents()}
    return next(node for node in made.worker_nodes if node.all_processes["raylet"][0].process.pid in above)


def measure(program: RayProgram, model: str, first: bool) -> Measured:
    """Run a job, kill a node, and measure what follows."""
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as name:
        folder = Path(name)
        with watching(folder, program.variables) as watch, cluster(watch.variables) as made:
            os.chdir(folder)
            watch.variables["RAY_ADDRESS"] = made.address
            begun = time.monotonic()
            watch.start(program.command(made.address, model, folder / "results"))
            return lose(program, watch, made, begun, first)


def lose(program: RayProgram, watch: Watch, made: Any, begun: float, first: bool) -> Measured:
    watch.until(lambda: watch.have_taken(2, BEFORE), f"{program.name}: starting")
    pids = {step.worker: step.pid for step in watch.steps}
    started = max(of(pid, watch.steps)[0].time for pid in pids.values())
    victim = pids[min(pids) if first else max(pids)]
    killed = kill_node(node_of(made, victim))

    def later(step: Step) -> bool:
        return step.time > killed and step.pid != victim

    def goes_on(step: Step) -> bool:
        """Whether a step is one after the loss: of a new view, or of a new process."""
        return later(step) and (step.view > 1 or step.pid not in pids.values())

    watch.until(lambda: watch.have_taken(2, AFTER, goes_on), f"{program.name}: recovery")
    before = [step for step in watch.steps if step.time <= killed]
    known = max(step.number for step in before)
    after = sorted(filter(goes_on, watch.steps), key=lambda step: step.time)
    firsts = {pid: next(step.time for step in after if step.pid == pid) for pid in {s.pid for s in after}}
    return Measured(
        first=started - begun,
        step=usual(of(victim, before)[SETTLED:]),
        next=after[0].time - killed,
        both=max(firsts.values()) - killed,
        lost=max(0, known + 1 - after[0].number - 1),
    )


def report(found: dict[str, list[Measured]], model: str, losses: int) -> None:
    print(f"the {model} on a Ray cluster, a node killed {losses} times: median (p10-p90)")
    for name, each in found.items():
        print_row(f"{name}: from the command to the first step of both", [one.first for one in each], "s")
        print_row(f"{name}: a step", [one.step for one in each], "ms")
        print_row(f"{name}: node killed to the next step", [one.next for one in each], "s")
        print_row(f"{name}: node killed until two workers train", [one.both for one in each], "s")
        lost = [one.lost for one in each]
        print(f"  {name}: steps taken again: {min(lost)} to {max(lost)}, median {statistics.median(lost):g}")


def main(losses: int = LOSSES, model: str = "cnn") -> None:
    found: dict[str, list[Measured]] = {program.name: [] for program in PROGRAMS}
    home = Path.cwd()
    try:
        for number in range(losses):
            for program in PROGRAMS if number % 2 == 0 else reversed(PROGRAMS):
                found[program.name].append(measure(program, model, first=number // 2 % 2 == 0))
                os.chdir(home)
    except FailedError as error:
        sys.exit(str(error))
    except ImportError as error:
        print(f"Ray Train is not installed ({error}), so nothing on Ray is measured")
        return
    report(found, model, losses)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--losses", type=int, default=LOSSES, help="losses of each program; at least 2")
    parser.add_argument("--model", default="cnn", help="a model of both")
    given = parser.parse_args()
    main(given.losses, given.model)
