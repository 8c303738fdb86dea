"""The number of workers never changes a bit, and replicas compute what one process computes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Launch = Callable[..., Any]

EXACT = [
    *("cnn", "weighted", "callbacks", "mixed", "uncompiled", "eager", "several", "dataset", "nested"),
    *("tiny", "custom"),
]
TOLERANCE = {"mixed": 1e-3}
"""How near replicas are to plain Keras, relative in norm; half precision rounds differently in each."""


def results(launch: Launch, workers: int, replicas: int, *arguments: str) -> list[str]:
    """Run the trainings; check that the workers agree; return their result lines."""
    run = launch(f"-n {workers} --replicas {replicas}", "program.py", *arguments)
    assert run.status == 0, run.stderr
    lines = [run.marked(worker, "result ") + run.marked(worker, "logs ") for worker in range(workers)]
    assert lines == [lines[0]] * workers
    assert lines[0]
    return lines[0]


def test_four_replicas_give_the_same_bits_on_one_to_four_workers(launch: Launch) -> None:
    lines = {workers: results(launch, workers, 4, "cnn") for workers in (1, 2, 3, 4)}
    assert lines == dict.fromkeys(lines, lines[1])


def test_every_training_gives_the_same_bits_on_one_and_two_workers(launch: Launch) -> None:
    one, two = (results(launch, workers, 3) for workers in (1, 2))
    assert len(one) == len(EXACT) + 1
    assert one == two


@pytest.fixture(scope="session")
def keras_alone(plain: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What plain Keras prints for the exact trainings, and the folder of its figures."""
    folder = tmp_path_factory.mktemp("plain")
    return plain("program.py", "--plain", "--exact", "--save", str(folder)), folder


@pytest.fixture(scope="session")
def four_replicas(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the figures of four replicas on two workers."""
    folder = tmp_path_factory.mktemp("replicas")
    results(launch, 2, 4, "--exact", "--save", str(folder))
    return folder


@pytest.mark.parametrize("name", EXACT)
def test_replicas_agree_with_plain_keras(
    keras_alone: tuple[str, Path], four_replicas: Path, name: str
) -> None:
    (expected,) = keras_alone[1].glob(f"{name}-*.npz")
    found = list(four_replicas.glob(f"{name}-*.npz"))
    assert len(found) == 2
    wanted = np.load(expected)
    for got in map(np.load, found):
        assert got.files == wanted.files
        for part in wanted.files:
            distance = np.linalg.norm(got[part] - wanted[part])
            assert distance <= TOLERANCE.get(name, 1e-5) * np.linalg.norm(wanted[part]), part


def test_one_replica_is_plain_keras_to_the_last_bit(keras_alone: tuple[str, Path], launch: Launch) -> None:
    expected = [line for line in keras_alone[0].splitlines() if line.startswith("result ")]
    assert len(expected) == len(EXACT)
    assert results(launch, 1, 1, "--exact") == expected


def test_a_script_that_is_started_by_hand_is_plain_keras_too(
    keras_alone: tuple[str, Path], plain: Callable[..., str]
) -> None:
    lines = [plain("program.py", "--exact", "cnn"), keras_alone[0]]
    by_hand, alone = (
        [line for line in printed.splitlines() if line.startswith("result cnn ")] for printed in lines
    )
    assert by_hand == alone
    assert len(alone) == 1
