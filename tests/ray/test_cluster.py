"""Jobs on real clusters of Ray: the digest is that of one process, whatever is lost."""

import signal
from collections.abc import Callable

import pytest
from job_on_ray import Job, kill
from ray_cluster import RayCluster

Start = Callable[..., Job]


def test_a_job_that_has_ended_does_not_begin_again(cluster: RayCluster, start: Start) -> None:
    """The actor of the coordinator is killed before the command has taken the status of the job."""
    job = start(cluster, 300)
    job.wait_until(lambda: job.steps(1) > 3)
    job.process.send_signal(signal.SIGSTOP)
    job.hurry()
    workers = [process for process in job.processes() if process.pid != job.process.pid]
    job.wait_until(lambda: not any(process.is_running() for process in workers))
    kill(cluster.actors("CoordinatorActor"))
    job.process.send_signal(signal.SIGCONT)
    assert job.finish() == {0, 1}
    assert len(list(job.folder.glob("runs/*"))) == 1


def test_losses_and_a_new_node(cluster: RayCluster, start: Start) -> None:
    """The actor of the coordinator is killed, then a node, and another node joins."""
    job = start(cluster, 1000)
    job.wait_until(lambda: job.steps(1) > 3)
    kill(cluster.actors("CoordinatorActor"))
    job.wait_until(lambda: "taking over a job of 2 hosts whose coordinator was lost, in view 1" in job.text)
    cluster.tell("kill 1")
    job.wait_until(lambda: "was lost: the connection to its agent is closed" in job.text)
    cluster.tell("add")
    job.wait_until(lambda: job.steps(2) > 1)
    assert 2 in job.finish()
    assert len(list(job.folder.glob("runs/*"))) == 1


@pytest.mark.slow
def test_a_node_that_is_drained(cluster: RayCluster, start: Start) -> None:
    """Its worker leaves before the node is killed, another starts on a new node, and no step is redone."""
    job, last = start(cluster, 1000), cluster.nodes - 1
    job.wait_until(lambda: job.steps(1) > 3)
    cluster.tell(f"drain {last}")
    job.wait_until(lambda: " left (1 worker, view 2)" in job.text)
    cluster.tell("add")
    job.wait_until(lambda: job.steps(2) > 1)
    cluster.tell(f"kill {last}")
    job.wait_until(lambda: ", as announced; its workers had left" in job.text)
    assert 2 in job.finish()
    assert "retires: Ray drains its node" in job.text
    for worker in range(3):
        assert job.steps(worker, "computes") == job.steps(worker)
