"""Steps that update weights several times, or use them after an update."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

Launch = Callable[..., Any]
TRAININGS = {"jax": 1, "tensorflow": 2, "torch": 2}


def trained(launch: Launch, backend: str, workers: int, replicas: int, *options: str) -> list[list[str]]:
    """Run the trainings; check that the workers agree; return their lines of results and of numbers."""
    run = launch(f"-n {workers} --replicas {replicas}", "rounds.py", *options, backend=backend)
    assert run.status == 0, run.stderr
    lines = [[run.marked(worker, mark) for mark in ("result ", "numbers ")] for worker in range(workers)]
    assert lines == [lines[0]] * workers
    assert len(lines[0][0]) == TRAININGS[backend]
    return lines[0]


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--eager",)])
def test_the_same_bits_on_one_and_three_workers(
    launch: Launch, backend: str, options: tuple[str, ...]
) -> None:
    assert trained(launch, backend, 1, 4, *options) == trained(launch, backend, 3, 4, *options)


def test_replicas_agree_with_plain_keras(launch: Launch, plain: Callable[..., str], backend: str) -> None:
    three = trained(launch, backend, 3, 4, "--exact")
    _, numbers = alone(plain, backend)
    for found, line in zip(three[1], numbers, strict=True):
        got, expected = (np.array(text.split()[1:], "float64") for text in (found, line))
        assert np.linalg.norm(got - expected) <= 1e-5 * np.linalg.norm(expected)


@pytest.mark.slow
def test_one_replica_is_plain_keras_to_the_last_bit(
    launch: Launch, plain: Callable[..., str], backend: str
) -> None:
    assert trained(launch, backend, 1, 1, "--exact") == alone(plain, backend)


def alone(plain: Callable[..., str], backend: str) -> list[list[str]]:
    """Return what plain Keras prints: the lines of results and of numbers."""
    lines = plain("rounds.py", "--plain", "--exact", backend=backend).splitlines()
    return [[line for line in lines if line.startswith(mark)] for mark in ("result ", "numbers ")]
