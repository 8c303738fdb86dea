"""Custom loops whose functions run eagerly: the number of workers does not change a bit."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Launch = Callable[..., Any]
EXAMPLES = Path(__file__).parents[2] / "examples"
LOOPS = 7


@pytest.fixture(scope="session")
def eager_backend(backend: str) -> str:
    """Each of the backends on which functions always run eagerly."""
    if backend == "tensorflow":
        pytest.skip("runs functions in graphs: see test_graph_loops.py")
    return backend


def results(run: Any, *workers: int) -> list[str]:
    """Check that workers agree; return their lines of results."""
    assert run.status == 0, run.stderr
    lines = [run.marked(worker, "result ") for worker in workers]
    assert lines == [lines[0]] * len(workers)
    assert len(lines[0]) == LOOPS
    return lines[0]


def named(line: str) -> str:
    """The loop of a line."""
    return line.split()[1]


@pytest.fixture(scope="session")
def one_worker(launch: Launch) -> Callable[[str], Any]:
    """The results of one undisturbed worker on a backend, and of plain Keras."""

    @functools.cache
    def run(backend: str) -> Any:
        return launch("-n 1 --replicas 3", "custom_loops.py", "--near", backend=backend)

    return run


@pytest.mark.ci
@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)], indirect=True)
def test_lost_workers_do_not_change_a_bit(
    launch: Launch, backend: str, one_worker: Callable[[str], Any]
) -> None:
    # Three workers in the first loop, until one is killed after it has computed gradients; two in the others.
    options = "-n 3 --max-restarts 0"
    run = launch(options, "custom_loops.py", "--kill", "1", "3", backend=backend)
    assert "worker 1 was killed by SIGKILL" in run.stderr
    assert results(run, 0, 2) == results(one_worker(backend), 0)


@pytest.mark.slow
def test_three_workers_do_not_change_a_bit(
    launch: Launch, backend: str, one_worker: Callable[[str], Any]
) -> None:
    run = launch("-n 3", "custom_loops.py", backend=backend)
    assert results(run, 0, 1, 2) == results(one_worker(backend), 0)


@pytest.mark.slow("jax")
@pytest.mark.ci
def test_custom_loops_agree_with_plain_keras(eager_backend: str, one_worker: Callable[[str], Any]) -> None:
    run = one_worker(eager_backend)
    found, wanted = (sorted(run.marked(0, mark), key=named) for mark in ("numbers ", "plain "))
    assert [named(line) for line in found] == [named(line) for line in wanted]
    assert len(found) == LOOPS
    for line, expected in zip(found, wanted, strict=True):
        got, plain = (np.array(text.split()[2:], "float64") for text in (line, expected))
        assert np.linalg.norm(got - plain) <= 1e-6 * np.linalg.norm(plain), line.split()[1]


@pytest.mark.slow
def test_a_worker_that_joins_a_driven_loop_draws_the_same_numbers(
    launch: Launch, thorough_backend: str, one_worker: Callable[[str], Any]
) -> None:
    options = "-n 2 --replicas 3 --min-workers 2"
    program = ("custom_loops.py", "--kill", "0", "3", "driven")
    run = launch(options, *program, backend=thorough_backend)
    assert run.status == 0, run.stderr
    assert "worker 2 joined" in run.stderr
    wanted = results(one_worker(thorough_backend), 0)[:1]
    assert [run.marked(worker, "result ") for worker in (1, 2)] == [wanted] * 2


@pytest.mark.slow
def test_workers_with_different_weights_are_refused(launch: Launch, eager_backend: str) -> None:
    run = launch("-n 2", "custom_loops.py", "differing", backend=eager_backend)
    assert run.status == 1
    assert re.search(
        r"DisagreementError: strategy.run of train: worker 0 has variable \S*bias = ", run.stderr
    )
    assert "the models differ" in run.stderr


@pytest.mark.slow
def test_an_example_trains_alike_on_one_and_two_workers(launch: Launch, thorough_backend: str) -> None:
    if thorough_backend == "tensorflow":
        pytest.skip("runs functions in graphs: see test_examples.py")
    example = str(EXAMPLES / f"custom_loop_{thorough_backend}.py")
    one, two = (launch(f"-n {workers} --replicas 2", example, backend=thorough_backend) for workers in (1, 2))
    assert (one.status, two.status) == (0, 0), one.stderr + two.stderr
    losses = [float(found) for found in re.findall(r"^epoch .* loss ([\d.]+)", one.stdout, re.MULTILINE)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.25
    digests = [run.marked(worker, "digest: ") for run, worker in ((one, 0), (two, 0), (two, 1))]
    assert digests == [digests[0]] * 3
    assert len(digests[0]) == 1
