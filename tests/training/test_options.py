"""Combinations of Keras's options: equal bits on any number of workers, and what one process computes."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Launch = Callable[..., Any]
OneWorker = Callable[[str, tuple[str, ...]], tuple[list[str], Path]]

TRAININGS = [
    *("recurrent", "shared", "alternating", "stopping", "batchwise", "overridden", "noisy", "optimizers"),
]
QUICK = {
    "jax": ("stopping", "shared", "overridden"),
    "tensorflow": ("recurrent", "batchwise"),
    "torch": ("recurrent", "alternating", "stopping", "batchwise"),
}
"""The combinations that compile quickly."""
RANDOM = {"noisy"}
"""Trainings that one process cannot reproduce."""
TOLERANCE = 1e-5
"""The relative distance of replicas from plain Keras, in norm."""


def train(
    launch: Launch, backend: str, workers: int, folder: Path, names: Sequence[str], *options: str
) -> list[str]:
    """Train; check that the workers agree; return their result lines."""
    arguments = ("--exact", "--save", str(folder), *options, *names)
    run = launch(f"-n {workers} --replicas 4 --no-adopt", "options.py", *arguments, backend=backend)
    assert run.status == 0, run.stderr
    lines: list[list[str]] = [run.marked(worker, "result ") for worker in range(workers)]
    assert lines == [lines[0]] * workers
    assert [line.split()[1] for line in lines[0]] == list(names)
    return lines[0]


@pytest.fixture(scope="module")
def one_worker(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> OneWorker:
    """Train on a backend with plain Keras, then with one worker; return its lines and the folder of both."""

    @functools.cache
    def run(backend: str, names: tuple[str, ...]) -> tuple[list[str], Path]:
        folder = tmp_path_factory.mktemp("both")
        return train(launch, backend, 1, folder, names, "--both"), folder

    return run


def others(backend: str) -> tuple[str, ...]:
    return tuple(name for name in TRAININGS if name not in QUICK[backend])


def far_from_plain_keras(folder: Path, names: Sequence[str]) -> list[tuple[str, str, float]]:
    """Return the arrays in which replicas differ from plain Keras, and the distance."""
    far = []
    for name in names:
        (expected,), (found,) = folder.glob(f"plain-{name}-*.npz"), folder.glob(f"{name}-*.npz")
        wanted, got = np.load(expected), np.load(found)
        assert got.files == wanted.files
        for part in wanted.files:
            # NaN in one must be NaN in the other.
            distance = np.linalg.norm(
                np.where(np.isnan(got[part]) & np.isnan(wanted[part]), 0, got[part] - wanted[part])
            )
            if not distance <= TOLERANCE * np.linalg.norm(np.nan_to_num(wanted[part])):
                far.append((name, part, float(distance)))
    return far


@pytest.mark.slow
@pytest.mark.ci
def test_replicas_agree_with_plain_keras(one_worker: OneWorker, quicker_backend: str) -> None:
    names = QUICK[quicker_backend]
    assert far_from_plain_keras(one_worker(quicker_backend, names)[1], names) == []


@pytest.mark.slow
def test_one_and_three_workers_give_the_same_bits(
    one_worker: OneWorker, launch: Launch, backend: str, tmp_path: Path
) -> None:
    names = QUICK[backend]
    assert train(launch, backend, 3, tmp_path, names) == one_worker(backend, names)[0]


@pytest.mark.slow
def test_the_other_options_agree_with_plain_keras_and_on_three_workers(
    one_worker: OneWorker, launch: Launch, backend: str, tmp_path: Path
) -> None:
    names = others(backend)
    lines, folder = one_worker(backend, names)
    assert far_from_plain_keras(folder, [name for name in names if name not in RANDOM]) == []
    assert train(launch, backend, 3, tmp_path, names) == lines
