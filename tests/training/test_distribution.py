"""Distributed datasets: every kind, on any number of workers, in custom loops and in `fit`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")  # tf.data, on every backend.


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of numbers: in one file, in two files, one of which has nearly all rows, and in three."""
    folder = tmp_path_factory.mktemp("files")
    rows = np.random.default_rng(1).normal(size=(43, 7))
    parts = {"one-0": rows, "two-0": rows[:3], "two-1": rows[3:]}
    parts |= {"three-0": rows[:6], "three-1": rows[6:26], "three-2": rows[26:]}
    for name, part in parts.items():
        lines = (" ".join(str(number) for number in row) for row in part)
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.slow
def test_every_input_is_split_alike_on_any_number_of_workers(
    launch: Callable[..., Any], thorough_backend: str, files: Path
) -> None:
    checks = []
    for workers in (1, 3):
        options = f"-n {workers} --replicas 3 --max-restarts 0"
        run = launch(options, "distributing.py", str(files), backend=thorough_backend)
        assert run.status == 0, run.stderr
        checks += [run.marked(worker, "check ") for worker in range(workers)]
        said = [line for line in run.stderr.splitlines() if "AutoShardPolicy" in line]
        told = [("FILE", "1 for 3"), ("OFF", ""), ("FILE", "2 for 3")]
        assert len(said) == len(told)
        for line, (policy, files_found) in zip(said, told, strict=True):
            assert f"AutoShardPolicy.{policy}" in line
            assert files_found in line
    common = 8 if thorough_backend == "torch" else 7
    assert [len(lines) for lines in checks] == [common + 1, common + 1, common + 1, common]
    assert [lines[:common] for lines in checks] == [checks[0][:common]] * 4
    # The third worker was lost before the last line.
    assert {line.split()[-1] for lines in checks for line in lines[common:]} == {checks[0][-3].split()[-1]}
    for worker in range(2):
        (difference,) = run.marked(worker, "differs: ")
        assert "strategy.distribute_datasets_from_function" in difference


@pytest.mark.ci
def test_graphs_iterate_over_distributed_datasets(launch: Callable[..., Any]) -> None:
    run = launch("-n 2 --replicas 3", "distributing_graphs.py", backend="tensorflow")
    assert run.status == 0, run.stderr


@pytest.mark.ci
def test_another_worker_continues_the_pipeline_of_a_lost_one(launch: Callable[..., Any]) -> None:
    undisturbed = launch("-n 1 --replicas 3", "adopting.py")
    assert undisturbed.status == 0, undisturbed.stderr
    run = launch("-n 3 --max-restarts 0", "adopting.py")
    assert run.status == 0, run.stderr
    results = [run.marked(worker, "result ") for worker in range(3)]
    assert len(undisturbed.marked(0, "result ")) == 2
    assert results == [undisturbed.marked(0, "result "), [], undisturbed.marked(0, "result ")]
