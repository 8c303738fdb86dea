import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from job_on_ray import HOSTS, Job
from ray_cluster import RayCluster

from webhook import Webhook

Start = Callable[..., Job]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """Two nodes with a CPU each."""
    with closing(RayCluster(2, tmp_path_factory.mktemp("cluster"))) as made:
        yield made


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with Webhook() as server:
        yield server


@pytest.fixture
def start(
    tmp_path: Path, environment: dict[str, str], lean: Callable[..., dict[str, str]]
) -> Iterator[Start]:
    """Start jobs, of which no process is left afterwards."""
    variables, made = environment | lean(HOSTS / "stepping.py", "jax"), []

    def prepare(cluster: RayCluster, steps: int, options: str = "-n 2") -> Job:
        made.append(Job(cluster, tmp_path / f"job-{len(made)}", steps, variables, options))
        return made[-1]

    yield prepare
    try:
        for job in made:
            if job.process.poll() is not None:
                job.await_end()
    finally:
        for job in made:
            job.close()
