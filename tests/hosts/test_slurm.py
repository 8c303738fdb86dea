"""`lockstep run --slurm` as `srun` starts it: once on each host, with the variables of its task."""

import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import chaos_steps
import pytest
from host_network import Host, Running
from stepping_job import HERE, digest

STEPS = 12

Task = Callable[..., Running]


def variables(node: int, hosts: int, **changes: str) -> dict[str, str]:
    """What `srun -N hosts --ntasks-per-node=1` sets for the task of a node."""
    task = {
        "JOB_ID": "4242",
        "STEP_ID": "0",
        "PROCID": str(node),
        "NODEID": str(node),
        "LOCALID": "0",
        "STEP_NODELIST": f"node[1-{hosts}]",
        "STEP_NUM_NODES": str(hosts),
        "STEP_NUM_TASKS": str(hosts),
        "STEP_TASKS_PER_NODE": f"1(x{hosts})",
    }
    return {f"SLURM_{name}": value for name, value in {**task, **changes}.items()}


def shown(task: Running) -> list[str]:
    """What a task has written, except that it still waits on a busy machine."""
    return [line for line in (task.out + task.err).splitlines() if "waiting for the coordinator" not in line]


@pytest.fixture
def task(nodes: Sequence[Host], keyed: dict[str, str]) -> Task:
    """Start the task of a node, with options and a script; changes are those of variables of Slurm."""

    def start(
        node: int, hosts: int, command: str, *faults: str, given: Mapping[str, str] = {}, **changes: str
    ) -> Running:
        arguments = ("run", "--slurm", "--backend", "jax", *command.split(), *faults)
        return nodes[node].lockstep(*arguments, **{**keyed, **variables(node, hosts, **changes), **given})

    return start


def test_the_tasks_of_a_step(nodes: Sequence[Host], task: Task) -> None:
    """Four workers on three hosts; only the first task, which coordinates, writes to the shared terminal."""
    tasks = [task(node, 3, f"-n 4 --replicas 5 --run-dir run stepping.py {STEPS}") for node in range(3)]
    assert [one.end() for one in tasks] == [0, 0, 0], [one.err for one in tasks]
    assert digest(tasks[0].out) == chaos_steps.alone(0, 5, STEPS)[-1]
    logs = [(nodes[0].work / f"run/worker-{worker}.log").read_text() for worker in range(4)]
    assert {digest(log) for log in logs} == {digest(tasks[0].out)}
    assert "node1 coordinates the job at node1:24242" in tasks[0].err
    assert "4 workers on 3 hosts, 5 replicas" in tasks[0].err
    assert [shown(one) for one in tasks[1:]] == [[], []]


@pytest.mark.slow
def test_a_step_with_parameter_servers(nodes: Sequence[Host], task: Task, lean: Any) -> None:
    """A chief and a worker on node1, a worker on node2, and two servers on node3."""
    training = Path(__file__).parents[1] / "training"
    for node in nodes[:3]:
        for file in ("serving.py", "losing.py"):
            shutil.copy(training / file, node.work)
    given = lean(training / "together.py", "jax")
    command = "--ps 2 -n 2 --threads-per-worker 1 --run-dir run serving.py long 3"
    tasks = [task(node, 3, command, given=given) for node in range(3)]
    assert [one.end() for one in tasks] == [0, 0, 0], [one.err for one in tasks]
    assert "a chief (worker 0), 2 workers, 2 parameter servers (from worker 3)" in tasks[0].err
    logs = [(nodes[0].work / f"run/worker-{worker}.log").read_text() for worker in range(5)]
    assert len({line for log in logs for line in log.splitlines() if line.startswith("digest ")}) == 1


@pytest.mark.slow
def test_a_requeued_node(nodes: Sequence[Host], task: Task) -> None:
    """Its task joins the job again."""
    command = "--run-dir run stepping.py 150"
    first, second = (task(node, 2, command, "0:3:after apply:crawl") for node in range(2))
    log = nodes[0].work / "run/worker-1.log"
    first.wait_until(lambda: log.exists() and "made 4" in log.read_text())
    nodes[1].signal_all(signal.SIGKILL)
    first.wait_until(lambda: "worker 0 continues" in first.err)
    again = task(1, 2, command, "0:3:after apply:crawl", RESTART_COUNT="1")
    first.wait_until(lambda: "worker 2 joined" in first.err)
    (nodes[0].work / "fast").touch()
    assert (first.end(), again.end()) == (0, 0), first.err
    logs = [(nodes[0].work / f"run/worker-{worker}.log").read_text() for worker in (0, 2)]
    assert {digest(log) for log in logs} == {chaos_steps.alone(0, 2, 150)[-1]}
    assert second.end() == -signal.SIGKILL
    assert shown(again) == []


@pytest.mark.slow
def test_a_cancelled_job(
    nodes: Sequence[Host],
    task: Task,
    lean: Callable[..., dict[str, str]],
    read_tensorboard: Callable[[Path], dict[str, list[tuple[int, Any]]]],
) -> None:
    """All tasks get SIGTERM at once, and end together after a checkpoint; the requeued job resumes there."""
    script = HERE / "resuming_fit.py"
    given = lean(script, "jax")
    for node in nodes:
        shutil.copy(script, node.work)

    def train(run: str, **changes: str) -> list[Running]:
        options = "--replicas 4 --threads-per-worker 1 --checkpoint saved --grace 120s"
        command = f"-n 4 {options} --run-dir {run} --tensorboard board-{run} {script.name}"
        return [task(node, 3, command, given=given, **changes) for node in range(3)]

    stopped = train("stopped")
    stopped[0].wait_until((nodes[0].work / "held").exists)
    for one in stopped:
        one.process.send_signal(signal.SIGTERM)
    stopped[0].wait_until(lambda: "stopping (SIGTERM)" in stopped[0].err)
    for node in nodes[:3]:
        (node.work / "go").touch()
    assert [one.end() for one in stopped] == [143, 143, 143], [one.err for one in stopped]
    assert "checkpoint written at step 7" in stopped[0].err
    assert "lost" not in stopped[0].err
    resumed = train("resumed", RESTART_COUNT="1")
    assert [one.end() for one in resumed] == [0, 0, 0], resumed[0].err
    assert "training resumed after step 7" in resumed[0].err
    assert read_tensorboard(nodes[0].work / "board-resumed" / "train")["epoch_loss"]


def test_refusals(nodes: Sequence[Host], task: Task) -> None:
    """One line each, and nothing is left."""

    def refused(options: str, given: Mapping[str, str] = {}, node: int = 1, **changes: str) -> str:
        one = task(node, 3, f"{options} stepping.py 1", given=given, **changes)
        assert one.end() == 2
        (line,) = one.err.splitlines()
        return line

    without = nodes[0].lockstep("run", "--slurm", "stepping.py", LOCKSTEP_KEY_FILE="job.key")
    assert without.end() == 2
    assert "SLURM_JOB_ID is not set: this is not a task of a Slurm job step; start" in without.err
    several = refused("--hosts node1 --listen node1 -n 3 --tf-config")
    assert "--hosts and --listen and --tf-config and --slurm cannot be combined" in several
    for node in (0, 1):
        keyless = refused("", {"LOCKSTEP_KEY_FILE": ""}, node)
        assert "node1:24242 can be reached from other hosts, so the job needs a key" in keyless
        unknown = refused("", node=node, STEP_NODELIST="gpu[1-3]")
        assert (
            f"--slurm needs the names of the hosts in SLURM_STEP_NODELIST; on gpu{node + 1}, the" in unknown
        )
        assert "host 'gpu1' cannot be resolved" in unknown
    assert [list(node.work.glob("run*")) for node in nodes] == [[]] * len(nodes)
