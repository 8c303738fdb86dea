"""Custom loops on TensorFlow: neither the number of workers nor a lost worker changes a bit."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Launch = Callable[..., Any]
CASES = (
    *("plain", "stateful", "few_rows", "without_function", "two_updates", "zero_rows", "through", "together"),
    *("meeting_in_a_loop", "variables", "accumulating", "generator", "returning", "optional", "saving"),
    *("limiting", "refused"),
)
SOME = ("few_rows", "two_updates", "meeting_in_a_loop", "saving", "limiting")
"""Those that are in `make test-ci`."""
WITHOUT_PARTS_PER_REPLICA = (
    *("plain", "few_rows", "two_updates", "through", "accumulating", "optional", "returning", "limiting"),
)
MARKS = ("figures: ", "first: ", "second: ")


def digests(run: Any, worker: int) -> list[str]:
    assert run.status == 0, run.stderr
    return [line for case in CASES for line in run.marked(worker, f"{case}: ")]


def figures(run: Any, case: str) -> list[float]:
    (line,) = run.marked(0, f"figures of {case}: ")
    return flat(json.loads(line.split(": ", 1)[1]))


def flat(nest: Any) -> list[float]:
    if isinstance(nest, dict):
        return [leaf for name in sorted(nest) for leaf in flat(nest[name])]
    return [leaf for part in nest for leaf in flat(part)] if isinstance(nest, list) else [nest]


def results(run: Any, worker: int) -> list[str]:
    assert run.status == 0, run.stderr
    found = [line for mark in MARKS for line in run.marked(worker, mark)]
    assert len(found) == len(MARKS)
    return found


@pytest.fixture(scope="module")
def undisturbed(launch: Launch) -> list[str]:
    """The results of driven loops without a lost worker."""
    return results(launch("-n 1 --replicas 2", "driven_loops.py", backend="tensorflow"), 0)


@pytest.mark.ci
@pytest.mark.parametrize(
    "cases", [pytest.param(SOME, id="some"), pytest.param(CASES, id="all", marks=pytest.mark.slow)]
)
def test_workers_do_not_change_the_bits_and_replicas_only_the_rounding(
    launch: Launch, cases: Sequence[str]
) -> None:
    program = ("graph_loops.py", "--figures")
    one = launch("-n 1 --replicas 3", *program, *cases, backend="tensorflow")
    two = launch("-n 2 --replicas 3", *program, *cases, backend="tensorflow")
    assert len(digests(one, 0)) == len(cases)
    assert digests(one, 0) == digests(two, 0) == digests(two, 1)
    written = [int(run.marked(worker, "written: ")[0].split()[1]) for run, worker in ((two, 0), (two, 1))]
    assert sum(written) == 4
    compared = [case for case in cases if case in WITHOUT_PARTS_PER_REPLICA]
    single = launch("-n 1 --threads-per-worker 1", *program, *compared, backend="tensorflow")
    for case in compared:
        np.testing.assert_allclose(figures(one, case), figures(single, case), atol=1e-5)


@pytest.mark.ci
def test_workers_with_other_weights_are_refused(launch: Launch) -> None:
    run = launch("-n 2 --max-restarts 0", "graph_loops.py", "--unequal", backend="tensorflow")
    assert run.status == 1
    assert "the models differ" in run.stderr
    assert "after execution 1 of step: worker 0 has variable " in run.stderr
    # Lockstep's message has no traceback with frames of TensorFlow.
    assert re.match(
        r"lockstep: worker \d: DisagreementError: .* \(graph_loops.py:\d+\)$", run.stderr.splitlines()[-3]
    )
    assert "Traceback" not in run.stderr
    assert any(line.startswith("Traceback") for line in run.log(0))


@pytest.mark.slow
def test_a_driven_loop_continues_without_a_lost_worker(launch: Launch, undisturbed: list[str]) -> None:
    options = "-n 2 --min-workers 2"
    lost = launch(options, "driven_loops.py", "0", "0", "7", backend="tensorflow")
    assert "worker 2 joined (2 workers)" in lost.stderr
    assert "worker 2 is skipping the first elements of steps 1, which were taken before: 1 of " in lost.stderr
    assert results(lost, 1) == results(lost, 2) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["1 2 3", "0 1 1"])
def test_workers_are_lost_in_later_loops(launch: Launch, undisturbed: list[str], killed: str) -> None:
    lost = launch("-n 2 --min-workers 2", "driven_loops.py", *killed.split(), backend="tensorflow")
    survivor = 1 - int(killed[0])
    assert results(lost, survivor) == results(lost, 2) == undisturbed


@pytest.mark.slow
def test_a_driven_loop_resumes_from_its_checkpoint(
    launch: Launch, undisturbed: list[str], tmp_path: Path
) -> None:
    options = f"-n 1 --replicas 2 --max-restarts 0 --checkpoint {tmp_path / 'saved'} --checkpoint-every 5"
    killed = launch(options, "driven_loops.py", "0", "1", "9", backend="tensorflow")
    assert killed.status == 137
    again = launch(f"-n 2 {options[4:]}", "driven_loops.py", backend="tensorflow")
    assert "training resumed after step " in again.stderr
    assert results(again, 0) == results(again, 1) == undisturbed
    finished = launch(options, "driven_loops.py", backend="tensorflow")
    assert "is finished after 36 steps: it repeats no training step" in finished.stderr
    assert results(finished, 0) == undisturbed
