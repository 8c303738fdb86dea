"""How jobs on Ray begin and end: with or without their command, with processes that are lost or stopped."""

import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from job_on_ray import PATIENCE, Job, kill
from ray_cluster import RayCluster

pytestmark = pytest.mark.slow

Start = Callable[..., Job]


def lockstep(*words: str) -> str:
    command = [sys.executable, "-m", "lockstep", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    return done.stdout + done.stderr


def await_no_actors(cluster: RayCluster, job: Job) -> None:
    job.wait_until(lambda: not cluster.actors("CoordinatorActor") and not cluster.actors("AgentActor"))


def test_a_detached_job(cluster: RayCluster, start: Start) -> None:
    job = start(cluster, 400, "-n 2 --detach")
    assert job.process.wait(PATIENCE) == 0, job.text
    job.wait_until(lambda: job.steps(1) > 3)
    name = next(job.folder.glob("runs/*")).name
    assert name in job.text
    assert name in lockstep("list")
    kill(cluster.actors("CoordinatorActor"))
    job.wait_until(lambda: len(job.events("coordinator")) > 0)
    job.hurry()
    job.wait_until(lambda: job.events("finished"))
    await_no_actors(cluster, job)
    assert job.digests() == {0, 1}


def test_a_detached_job_is_stopped(cluster: RayCluster, start: Start) -> None:
    job = start(cluster, 4000, "-n 2 --detach")
    assert job.process.wait(PATIENCE) == 0, job.text
    job.wait_until(lambda: job.steps(1) > 3)
    assert "stopping" in lockstep("stop", next(job.folder.glob("runs/*")).name)
    await_no_actors(cluster, job)


def test_a_command_that_is_killed(cluster: RayCluster, start: Start) -> None:
    job = start(cluster, 4000)
    job.wait_until(lambda: job.steps(1) > 3)
    job.process.kill()
    await_no_actors(cluster, job)


def test_signals_of_the_command(cluster: RayCluster, start: Start) -> None:
    job = start(cluster, 4000)
    job.wait_until(lambda: job.steps(1) > 3)
    job.process.send_signal(signal.SIGINT)
    assert job.process.wait(PATIENCE) == 130, job.text
    await_no_actors(cluster, job)


@pytest.mark.parametrize("what", ["actor", "raylet"])
@pytest.mark.parametrize("stopped", [False, True])
def test_processes_of_an_agent_end_with_it(tmp_path: Path, start: Start, what: str, stopped: bool) -> None:
    """Also those that are stopped. The others continue."""
    with closing(RayCluster(2, tmp_path / "cluster")) as cluster:
        job = start(cluster, 1000)
        job.wait_until(lambda: job.steps(1) > 3)
        (actor,) = cluster.actors("AgentActor", 1)
        own = actor.children(recursive=True)
        assert len(own) > 2
        if stopped:
            kill(own, signal.SIGSTOP)
        if what == "actor":
            kill([actor])
        else:
            cluster.tell("raylet 1 SIGKILL")
        _, alive = psutil.wait_procs(own, PATIENCE)
        assert not alive
        job.wait_until(lambda: "was lost: " in job.text)
        assert job.finish()


def test_a_node_without_a_free_cpu(cluster: RayCluster, start: Start) -> None:
    """Another job uses it: this one begins without it, says so, and takes it when it is free."""
    other = start(cluster, 4000, "-n 1")
    other.wait_until(lambda: other.steps(0) > 3)
    job = start(cluster, 4000)
    job.wait_until(lambda: job.steps(0) > 3)
    job.wait_until(lambda: "is not free for 1 worker yet; the job uses it when it is" in job.text)
    assert other.finish() == {0}
    job.wait_until(lambda: job.steps(1) > 1)
    assert job.finish() == {0, 1}
    assert job.text.count("is not free for ") == 1, job.text


def test_two_actors_of_one_coordinator(tmp_path: Path, start: Start) -> None:
    """Ray takes a node that is stopped for lost, and starts the actor again; then the first one continues."""
    with closing(RayCluster(3, tmp_path / "cluster")) as cluster:
        job = start(cluster, 4000, "-n 2 --detach")
        assert job.process.wait(PATIENCE) == 0
        job.wait_until(lambda: job.steps(1) > 3)
        # On the head node; the control store is not stopped.
        first = cluster.actors("CoordinatorActor", 0)
        kill(first, signal.SIGSTOP)
        cluster.tell("raylet 0 SIGSTOP")
        job.wait_until(lambda: cluster.actors("CoordinatorActor", 1) or cluster.actors("CoordinatorActor", 2))
        kill(first, signal.SIGCONT)
        psutil.wait_procs(first, PATIENCE)
        cluster.tell("raylet 0 SIGCONT")
        job.hurry()
        job.wait_until(lambda: job.events("finished"))
        job.await_end()
        assert job.digests()
