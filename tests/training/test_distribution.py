"""Distributed datasets: every kind, on any number of workers, in custom loops and in `fit`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")  # tf.data, on every backend.


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of numbers: in one file, and in two files, one of which has nearly all rows."""
    folder = tmp_path_factory.mktemp("files")
    rows = np.random.default_rng(1).normal(size=(43, 7))
    for name, part in (("one-0", rows), ("two-0", rows[:3]), ("two-1", rows[3:])):
        lines = (" ".join(str(number) for number in row) for row in part)
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return folder


def test_every_input_is_split_alike_on_any_number_of_workers(
    launch: Callable[..., Any], thorough_backend: str, files: Path
) -> None:
    checks = []
    for workers in (1, 2):
        run = launch(f"-n {workers} --replicas 3", "distributing.py", str(files), backend=thorough_backend)
        assert run.status == 0, run.stderr
        checks += [run.marked(worker, "check ") for worker in range(workers)]
        said = [line for line in run.stderr.splitlines() if "AutoShardPolicy" in line]
        assert [line.split(":")[1] for line in said] == [" AutoShardPolicy.FILE", " AutoShardPolicy.OFF"]
    assert [len(lines) for lines in checks] == [5, 5, 5]
    assert checks == [checks[0]] * 3
    for worker in range(2):
        (difference,) = run.marked(worker, "differs: ")
        assert "strategy.distribute_datasets_from_function" in difference


def test_graphs_iterate_over_distributed_datasets(launch: Callable[..., Any]) -> None:
    run = launch("-n 2 --replicas 3", "distributing_graphs.py", backend="tensorflow")
    assert run.status == 0, run.stderr


def test_another_worker_continues_the_pipeline_of_a_lost_one(launch: Callable[..., Any]) -> None:
    undisturbed = launch("-n 1 --replicas 3", "adopting.py")
    assert undisturbed.status == 0, undisturbed.stderr
    run = launch("-n 3 --max-restarts 0", "adopting.py")
    assert run.status == 0, run.stderr
    results = [run.marked(worker, "result ") for worker in range(3)]
    assert len(undisturbed.marked(0, "result ")) == 2
    assert results == [undisturbed.marked(0, "result "), [], undisturbed.marked(0, "result ")]
