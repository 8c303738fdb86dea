"""The cluster's control store (GCS) is lost, or out of reach for a while."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from job_on_ray import Job
from ray_cluster import RayCluster, has_redis

pytestmark = pytest.mark.slow

Start = Callable[..., Job]
WITHDRAWN = "the cluster's control store does not answer: the coordinator ends, and hosts pause until it does"


@pytest.fixture
def keeping(tmp_path: Path) -> Iterator[RayCluster]:
    """Two nodes; the control store keeps its data."""
    if not has_redis():
        pytest.skip("needs redis-server")
    with closing(RayCluster(2, tmp_path / "cluster", keeps=True)) as made:
        yield made


@pytest.fixture
def forgetting(tmp_path: Path) -> Iterator[RayCluster]:
    """Two nodes; the control store has its data in memory."""
    with closing(RayCluster(2, tmp_path / "cluster")) as made:
        yield made


def pause(seconds: float) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        time.sleep(left)


def test_a_control_store_that_keeps_its_data(keeping: RayCluster, start: Start) -> None:
    """It is started again, three times; workers do not notice."""
    job = start(keeping, 1000)
    job.wait_until(lambda: job.steps(1) > 3)
    for _ in range(3):
        keeping.tell("gcs SIGKILL")
        keeping.tell("gcs start")
        back = time.monotonic()
        job.wait_until(lambda back=back: job.made_since(back + 2))  # type: ignore[misc]
    assert job.finish() == {0, 1}
    assert job.events("lost") == []


@pytest.mark.parametrize("seconds", [3, 8, 20])
def test_a_control_store_that_is_stopped(forgetting: RayCluster, start: Start, seconds: float) -> None:
    """The coordinator ends with its lease, hosts pause, and continue when the store answers."""
    job = start(forgetting, 1000)
    job.wait_until(lambda: job.steps(1) > 3)
    forgetting.tell("gcs SIGSTOP")
    pause(seconds)
    withdrawn = WITHDRAWN in job.text
    assert withdrawn == (seconds > 5), job.text
    assert job.made_since(time.monotonic() - 1) == (seconds < 15)
    forgetting.tell("gcs SIGCONT")
    back = time.monotonic()
    job.wait_until(lambda: job.made_since(back))
    assert job.finish() == {0, 1}
    assert job.events("lost") == []
    assert ("taking over a job" in job.text) == withdrawn


def test_a_control_store_that_loses_its_data(forgetting: RayCluster, start: Start) -> None:
    """The job ends, and says why."""
    job = start(forgetting, 1000)
    job.wait_until(lambda: job.steps(1) > 3)
    forgetting.tell("gcs SIGKILL")
    forgetting.tell("gcs start")
    assert job.process.wait(240) == 1, job.text
    why = [line for line in job.text.splitlines() if "control store" in line]
    assert len(why) == 1, job.text
    assert "has restarted without its data, so the job ends" in why[0]
    job.await_end()
    job.wait_until(lambda: not forgetting.actors("AgentActor"))
    job.wait_until(lambda: not forgetting.actors("CoordinatorActor"))


def test_a_control_store_that_does_not_come_back(forgetting: RayCluster, start: Start) -> None:
    """Ray gives it up, and the cluster with it."""
    job = start(forgetting, 4000)
    job.wait_until(lambda: job.steps(1) > 3)
    forgetting.tell("gcs SIGKILL")
    assert job.process.wait(240) not in (0, None), job.text
    assert WITHDRAWN in job.text
    job.await_end()
