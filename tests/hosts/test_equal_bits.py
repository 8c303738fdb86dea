"""A job over hosts has the bits of one machine, however its workers are spread."""

import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from host_network import Host, Running
from stepping_job import SteppingJob

HERE = Path(__file__).parent
TRAINING = HERE.parent / "training"
FILES = (HERE / "many_trainings.py", TRAINING / "program.py", TRAINING / "custom_loops.py")

Train = Callable[..., list[str]]


def digests(job: Running, run: str, workers: int) -> list[str]:
    """What the workers of a job have computed, which is equal."""
    assert job.end() == 0, job.err
    logs = [(job.host.work / run / f"worker-{worker}.log").read_text() for worker in range(workers)]
    found = [[line for line in log.splitlines() if line.startswith(("result ", "digest "))] for log in logs]
    assert found == [found[0]] * workers
    assert found[0]
    return found[0]


@pytest.fixture
def train(hosts: Sequence[Host], lean: Callable[..., dict[str, str]]) -> Train:
    """Train on a number of workers, with options, at the command of a host; return the digests."""

    def run(backend: str, workers: int, *options: str, at: int = 0) -> list[str]:
        for host in hosts:
            for file in FILES:
                shutil.copy(file, host.work)
        # By default, few workers on many hosts have more threads, which can change the bits.
        job_options = ("--backend", backend, "--replicas", "4", "--threads-per-worker", "1")
        folder = f"run{len(list(hosts[at].work.glob('run*')))}"
        command = ("run", *job_options, "--run-dir", folder, *options)
        job = hosts[at].lockstep(*command, FILES[0].name, **lean(TRAINING / "together.py", backend))
        return digests(job, folder, workers)

    return run


# On TensorFlow, the example in test_tf_config_by_hand.py trains on two hosts with the bits of one.
@pytest.mark.parametrize(
    "backend", ["torch", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tensorflow", "jax"))]
)
def test_equal_bits(train: Train, backend: str) -> None:
    wanted = train(backend, 1, "-n", "1")
    names, workers, at = ("node1,node2:2", 3, 4) if backend == "torch" else ("node1,node2", 2, 0)
    assert train(backend, workers, "--hosts", names, at=at) == wanted


@pytest.mark.slow
def test_a_host_lost_within_inner_steps(hosts: Sequence[Host], lean: Callable[..., dict[str, str]]) -> None:
    """The other computes the inner steps of its replicas; small integers travel between them."""
    script = TRAINING / "local.py"
    for host in hosts:
        shutil.copy(script, host.work)
    options = "--backend jax --replicas 4 --threads-per-worker 1 --local-steps 5,nesterov,0.7,0.9,int8,reset"

    def train(run: str, where: str, *arguments: str) -> Running:
        command = ("run", *options.split(), "--run-dir", run, *where.split(), script.name, "162", *arguments)
        return hosts[0].lockstep(*command, **lean(script, "jax"))

    wanted = digests(train("alone", "-n 1"), "alone", 1)
    job = train("lost", "--hosts node1,node2 --max-restarts 0", "waits", "1", "13")
    log = hosts[0].work / "lost" / "worker-1.log"
    job.wait_until(lambda: log.exists() and "waits" in log.read_text())
    hosts[1].signal_all(signal.SIGKILL)
    assert digests(job, "lost", 1) == wanted
    assert "host node2 was lost" in job.err
    hosts[1].remove_abandoned()


@pytest.mark.parametrize(
    "options", ["--hosts node2:2", "--hosts node3:2,node2 --plain", "--hosts node4,node1,node3,node2 -n 5"]
)
def test_equal_sums(hosts: Sequence[Host], options: str) -> None:
    """Any hosts, in any order, have the sums of one process, also if the command is elsewhere."""
    SteppingJob(hosts, options, 20).finish()
