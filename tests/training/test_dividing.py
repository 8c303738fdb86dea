"""Jobs that divide the batches of a `PyDataset`: equal bits for any workers, however they come and go."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Launch = Callable[..., Any]


def results(run: Any, *workers: int) -> list[str]:
    """The lines that each of some workers has printed, which are equal.

    A worker that has joined in the second call does not have the weights of the first.
    """
    assert run.status == 0, run.stderr
    marks = ("fit ", "weights threads", "weights processes", "weights held", "end ")
    printed = [[line for mark in marks for line in run.marked(worker, mark)] for worker in workers]
    assert all(lines == printed[0] for lines in printed)
    assert len(printed[0]) == 9
    return printed[0]


def made(run: Any, worker: int) -> dict[str, int]:
    return {line.split()[1]: int(line.split()[2]) for line in run.marked(worker, "made ")}


@pytest.fixture
def alone(undisturbed_run: Launch, thorough_backend: str) -> Any:
    """The run of one worker."""
    return undisturbed_run("-n 1 --replicas 4", "dividing_batches.py", backend=thorough_backend)


@pytest.mark.ci
def test_workers_that_divide_batches_compute_equal_bits(
    launch: Launch, thorough_backend: str, alone: Any
) -> None:
    run = launch("-n 4 --replicas 4", "dividing_batches.py", backend=thorough_backend)
    assert results(run, 0, 1, 2, 3) == results(alone, 0)
    assert "fit noisy" not in run.stderr
    for worker in range(4):
        # 33 batches of training and 15 of validation, and what the checks and the first batches cost.
        assert made(run, worker)["noisy"] <= 30 < 48 <= made(alone, 0)["noisy"]
        assert made(run, worker)["held"] == made(alone, 0)["held"]


@pytest.mark.ci
def test_workers_are_lost_while_batches_are_made_and_handed_over(
    launch: Launch, thorough_backend: str, alone: Any
) -> None:
    # The chief has written a file just before the cycle in which it is lost.
    faults = ("2:noisy:item:20", "0:noisy:sending:3", "1:threads:sending:2")
    run = launch(
        "-n 4 --replicas 4 --max-restarts 0", "dividing_batches.py", *faults, backend=thorough_backend
    )
    assert results(run, 3) == results(alone, 0)
    assert run.marked(3, "files") == alone.marked(0, "files")
    assert run.stderr.count("was killed by SIGKILL") == 3


@pytest.mark.ci
def test_a_worker_joins_within_a_pass(launch: Launch, thorough_backend: str, alone: Any) -> None:
    faults = ("1:noisy:sending:3", "0:threads:item:1")
    options = "-n 2 --replicas 4 --min-workers 2"
    run = launch(options, "dividing_batches.py", *faults, backend=thorough_backend)
    assert results(run, 2, 3) == results(alone, 0)
    assert "worker 2 joined (2 workers)" in run.stderr
    assert "worker 3 joined (2 workers)" in run.stderr


@pytest.mark.slow
def test_a_job_resumes_within_a_pass(
    launch: Launch, thorough_backend: str, alone: Any, tmp_path: Path
) -> None:
    keeping = f"--checkpoint {tmp_path / 'kept'} --checkpoint-every 2"
    options = ("dividing_batches.py", "all:noisy:sending:5")
    lost = launch(f"-n 2 --replicas 4 {keeping}", *options, backend=thorough_backend)
    assert lost.status == 137
    run = launch(f"-n 3 {keeping}", *options, backend=thorough_backend)
    assert "resuming from" in run.stderr
    assert results(run, 0, 1, 2) == results(alone, 0)
