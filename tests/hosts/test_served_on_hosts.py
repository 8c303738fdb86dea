"""Parameter servers, workers and the chief on several hosts."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from host_network import Host

TRAINING = Path(__file__).parents[1] / "training"


@pytest.mark.parametrize("script", ["serving.py", pytest.param("scheduling.py", marks=pytest.mark.slow)])
def test_a_run_on_several_hosts_that_lost_a_worker_is_repeated_on_one(
    hosts: Sequence[Host], lean: Callable[..., dict[str, str]], script: str
) -> None:
    """The worker is lost between its pushes to servers of two hosts; the command runs on another host."""
    environment = lean(TRAINING / "together.py", "jax")
    for host in hosts:
        shutil.copy(TRAINING / script, host.work)
    options = (
        "--backend",
        "jax",
        "--ps",
        "2",
        "--hosts",
        "node1:2,node2:3,node3",
        "--threads-per-worker",
        "1",
    )
    job = hosts[3].lockstep("run", *options, "--run-dir", "run", script, "free", **environment)
    assert job.end() == 0, job.err
    assert "worker 2 was killed by SIGKILL" in job.err
    # The lost worker may have written nothing.
    logs = [hosts[3].work / "run" / f"worker-{worker}.log" for worker in (0, 1, 3, 4, 5)]
    assert len({_digest(log.read_text()) for log in logs}) == 1
    again = hosts[3].lockstep("rerun", "run", "--run-dir", "again", **environment)
    assert again.end() == 0, again.err
    assert "the models at the end are equal to the last bit" in again.out


@pytest.mark.slow
@pytest.mark.parametrize(("lost", "status", "said"), [(1, 0, "worker 2"), (2, 1, "without worker 4")])
def test_the_loss_of_a_host(
    hosts: Sequence[Host], lean: Callable[..., dict[str, str]], lost: int, status: int, said: str
) -> None:
    """Without a host of workers, the others continue; the loss of one with a server ends the job."""
    for host in hosts:
        shutil.copy(TRAINING / "serving.py", host.work)
    options = (
        "--backend",
        "jax",
        "--ps",
        "1",
        "--hosts",
        "node1:2,node2:2,node3",
        "--threads-per-worker",
        "1",
    )
    command = ("run", *options, "--run-dir", "run", "serving.py", "long", "60")
    job = hosts[0].lockstep(*command, **lean(TRAINING / "together.py", "jax"))
    job.wait_until(lambda: job.out.count("epoch") > 5)
    hosts[lost].cut()
    assert (job.end() != 0) == status, job.err
    assert said in job.err
    hosts[lost].reconnect()


@pytest.mark.slow
def test_hosts_join_a_job_with_parameter_servers(
    nodes: Sequence[Host], lean: Callable[..., dict[str, str]]
) -> None:
    environment = {**lean(TRAINING / "together.py", "jax"), "LOCKSTEP_KEY_FILE": "job.key"}
    for host in nodes:
        shutil.copy(TRAINING / "serving.py", host.work)
    address = f"{nodes[0].address}:7000"
    options = f"--backend jax --ps 2 -n 2 --workers-here 2 --threads-per-worker 1 --listen {address}"
    job = nodes[0].lockstep(
        "run", *options.split(), "--run-dir", "run", "serving.py", "long", "10", **environment
    )
    agents = [
        host.lockstep("agent", "--join", address, "-n", count, **environment)
        for host, count in zip(nodes[1:3], ("1", "2"), strict=True)
    ]
    assert [one.end() for one in (job, *agents)] == [0, 0, 0], job.err
    logs = [(nodes[0].work / "run" / f"worker-{worker}.log").read_text() for worker in range(5)]
    assert len({_digest(log) for log in logs}) == 1


def _digest(log: str) -> str:
    *_, last = (line for line in log.splitlines() if line.startswith("digest "))
    return last
