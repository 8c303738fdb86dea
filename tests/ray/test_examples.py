"""Ray Train's TensorFlow examples with Lockstep: two workers give the bits of one."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from ray_cluster import RayCluster

EXAMPLES = Path(__file__).parents[2] / "examples"
PATIENCE = 600.0
OPTIONS = {"mnist": ("--smoke-test",), "regression": (), "autoencoder": ()}


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of programs that use a cluster."""
    with closing(RayCluster(1, tmp_path_factory.mktemp("cluster"), cpus=2)) as cluster:
        yield os.environ | {"RAY_ADDRESS": cluster.address}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_two_workers_give_the_bits_of_one(tmp_path: Path, variables: dict[str, str], name: str) -> None:
    shown = []
    for workers in ("1", "2"):
        command = [sys.executable, str(EXAMPLES / f"ray_{name}.py"), "--num-workers", workers, *OPTIONS[name]]
        run = subprocess.run(
            command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=PATIENCE
        )
        assert run.returncode == 0, run.stderr
        shown.append(re.findall("^(?:losses|metrics|digest): .*$", run.stdout, re.MULTILINE))
    assert shown[0] == shown[1]
    digest, losses, metrics = shown[0]
    values = [float(value) for value in re.findall(r"\d\.\d+", losses)]
    assert values[-1] < 0.97 * values[0]
    assert f"'loss': {values[-1]}" in metrics
    assert len(digest) == len("digest: ") + 64
