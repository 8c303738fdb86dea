"""The number of workers never changes a bit, and replicas compute what one process computes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Launch = Callable[..., Any]

TRAININGS = [
    *("cnn", "weighted", "callbacks", "mixed", "uncompiled", "eager", "several", "dataset", "nested"),
    *("tiny", "custom", "summed"),
]
IMPOSSIBLE = {("torch", "several"): "Keras has no steps_per_execution on PyTorch"}
TOLERANCE = {"mixed": 1e-3}
"""How near replicas are to plain Keras, relative in norm; half precision rounds differently in each."""


def names(backend: str) -> list[str]:
    return [name for name in TRAININGS if (backend, name) not in IMPOSSIBLE]


def results(launch: Launch, backend: str, workers: int, replicas: int, *arguments: str) -> list[str]:
    """Run the trainings; check that the workers agree; return their result lines."""
    run = launch(f"-n {workers} --replicas {replicas}", "program.py", *arguments, backend=backend)
    assert run.status == 0, run.stderr
    lines = [run.marked(worker, "result ") + run.marked(worker, "logs ") for worker in range(workers)]
    assert lines == [lines[0]] * workers
    assert lines[0]
    return lines[0]


def test_four_replicas_give_the_same_bits_on_any_number_of_workers(launch: Launch, backend: str) -> None:
    some = (1, 2, 3, 4) if backend == "jax" else (1, 3)
    lines = {workers: results(launch, backend, workers, 4, "cnn") for workers in some}
    assert lines == dict.fromkeys(lines, lines[1])


def test_every_training_gives_the_same_bits_on_one_and_three_workers(
    launch: Launch, thorough_backend: str
) -> None:
    backend = thorough_backend
    one, three = (results(launch, backend, workers, 4, *names(backend)) for workers in (1, 3))
    assert len(one) == len(names(backend)) + 1
    assert one == three


@pytest.fixture(scope="session")
def keras_alone(
    plain: Callable[..., str], tmp_path_factory: pytest.TempPathFactory, backend: str
) -> tuple[list[str], Path]:
    """What plain Keras prints for the exact trainings, and the folder of its figures."""
    folder = tmp_path_factory.mktemp("plain")
    options = ("--plain", "--exact", "--save", str(folder))
    printed = plain("program.py", *options, *names(backend), backend=backend)
    return [line for line in printed.splitlines() if line.startswith("result ")], folder


def test_replicas_agree_with_plain_keras(
    launch: Launch, backend: str, keras_alone: tuple[list[str], Path], tmp_path: Path
) -> None:
    results(launch, backend, 2, 4, "--exact", "--save", str(tmp_path), *names(backend))
    far = []
    for name in names(backend):
        (expected,) = keras_alone[1].glob(f"{name}-*.npz")
        found = list(tmp_path.glob(f"{name}-*.npz"))
        assert len(found) == 2
        wanted = np.load(expected)
        for got in map(np.load, found):
            assert got.files == wanted.files
            for part in wanted.files:
                distance = np.linalg.norm(got[part] - wanted[part])
                if not distance <= TOLERANCE.get(name, 1e-5) * np.linalg.norm(wanted[part]):
                    far.append((name, part, distance))
    assert far == []


def test_one_replica_is_plain_keras_to_the_last_bit(
    keras_alone: tuple[list[str], Path], launch: Launch, backend: str
) -> None:
    assert len(keras_alone[0]) == len(names(backend))
    some = ["cnn", "weighted", "dataset", "nested"]
    expected = [line for line in keras_alone[0] if line.split()[1] in some]
    assert results(launch, backend, 1, 1, "--exact", *some) == expected


def test_a_script_that_is_started_by_hand_is_plain_keras_too(
    keras_alone: tuple[list[str], Path], plain: Callable[..., str], backend: str
) -> None:
    printed = plain("program.py", "--exact", "cnn", backend=backend).splitlines()
    (expected,) = (line for line in keras_alone[0] if line.startswith("result cnn "))
    assert [line for line in printed if line.startswith("result ")] == [expected]
