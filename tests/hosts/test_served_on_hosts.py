"""Parameter servers, workers and the chief on several hosts."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from host_network import Host

TRAINING = Path(__file__).parents[1] / "training"
SCRIPT = "serving.py"


def test_servers_and_workers_on_several_hosts(
    hosts: Sequence[Host], lean: Callable[..., dict[str, str]]
) -> None:
    """A worker is lost between its pushes to servers of two hosts; all processes end with the same model."""
    for host in hosts:
        shutil.copy(TRAINING / SCRIPT, host.work)
    options = ("--backend", "jax", "--ps", "2", "--hosts", "node1:2,node2:3,node3", "--threads-per-worker", "1")
    job = hosts[0].lockstep(
        "run", *options, "--run-dir", "run", SCRIPT, "free", **lean(TRAINING / "together.py", "jax")
    )
    assert job.end() == 0, job.err
    run = hosts[0].work / "run"
    logs = [(run / f"worker-{worker}.log").read_text() for worker in range(6)]
    digests = {line for log in logs for line in log.splitlines() if line.startswith("digest ")}
    assert len(digests) == 1
    assert "worker 2 was killed by SIGKILL" in job.err
