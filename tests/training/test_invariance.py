"""The number of workers never changes a bit, and replicas compute what one process computes."""

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from lockstep.diff.comparison import compare
from lockstep.diff.recording import read_recording
from lockstep.diff.wording import detail

Launch = Callable[..., Any]
Trained = Callable[..., list[list[str]]]

TRAININGS = [
    *("cnn", "weighted", "callbacks", "mixed", "uncompiled", "eager", "several", "dataset", "nested"),
    *("tiny", "custom", "summed"),
]
TO_THE_LAST_BIT = ("cnn", "weighted", "dataset", "nested")
"""Trainings in which one replica has the bits of plain Keras, although XLA optimizes other functions."""
IMPOSSIBLE = {("torch", "several"): "Keras has no steps_per_execution on PyTorch"}
SMALL = {"jax": ("cnn", "custom"), "torch": ("cnn", "weighted")}
"""What `make test` compares with plain Keras."""
ALIKE_SMALL = {"jax": ("cnn",), "torch": SMALL["torch"]}
"""Those of them that `make test` trains on three workers."""
QUICK = {"tensorflow": ("cnn", "dataset")}
"""What `make test-ci` also compares with plain Keras; slow tests compare all."""
_ON_JAX = ("cnn", "callbacks", "mixed", "several", "custom")
ALIKE = {
    "jax": _ON_JAX,
    "tensorflow": ("cnn",),
    "torch": ("cnn", *(name for name in TRAININGS if name not in _ON_JAX)),
}
"""What `make test-ci` trains on TensorFlow on three workers, and slow tests on any number of them."""
QUICK_OPTIMIZED = ("cnn", "weighted")
"""What is compared to the last bit on JAX but in slow tests: optimizing takes most of the time there."""
TOLERANCE = {"mixed": 1e-3}
"""The relative distance of replicas from plain Keras, in norm; half precision rounds differently."""
LOSSES, ROUNDS = ["masked", "weighted", "contrasted"], {"jax": ["Twice"], "tensorflow": ["Twice", "Gan"]}
ROUNDS["torch"] = ROUNDS["tensorflow"]


def names(backend: str) -> list[str]:
    return [name for name in TRAININGS if (backend, name) not in IMPOSSIBLE]


def divided(lines: Iterable[str]) -> list[list[str]]:
    """The results that each program of `together.py` printed."""
    parts: list[list[str]] = []
    for line in lines:
        if line.startswith("begins "):
            parts.append([])
        elif line.startswith(("result ", "logs ", "numbers ")):
            parts[-1].append(line)
    return parts


def results(lines: Iterable[str], name: str | None = None) -> list[str]:
    """The lines with digests of one training, or of all."""
    mark = "result " if name is None else f"result {name} "
    return [line for line in lines if line.startswith(mark)]


def assert_near(found: list[str], wanted: list[str]) -> None:
    """The numbers are those of plain Keras."""
    numbers = [
        [np.array(line.split()[1:], "float64") for line in lines if line.startswith("numbers ")]
        for lines in (found, wanted)
    ]
    assert numbers[0]
    for got, expected in zip(*numbers, strict=True):
        assert np.linalg.norm(got - expected) <= 1e-5 * np.linalg.norm(expected)


def assert_same_records(one: Path, other: Path) -> None:
    """The digest logs of two runs are equal, and have steps, or points between them with one replica."""
    found = compare(read_recording(one), read_recording(other))
    assert found.equal, detail(found)
    assert found.compared or found.points


@pytest.fixture(scope="session")
def trained(launch: Launch) -> Trained:
    """Run programs together on several workers; check that the workers agree; return the results of each.

    All runs of the same programs must have recorded equal hashes of their steps. `optimized` as in `lean`.
    """
    first: dict[tuple[object, ...], Path] = {}

    @functools.cache
    def run(
        backend: str, workers: int, *programs: str, replicas: int = 4, optimized: bool = False
    ) -> list[list[str]]:
        arguments = " -- ".join(programs).split()
        options = f"-n {workers} --replicas {replicas}"
        done = launch(options, "together.py", *arguments, backend=backend, optimized=optimized)
        assert done.status == 0, done.stderr
        parts = [divided(done.log(worker)) for worker in range(workers)]
        assert parts == [parts[0]] * workers
        assert len(parts[0]) == len(programs)
        assert all(parts[0])
        before = first.setdefault((backend, programs, replicas, optimized), done.folder)
        assert_same_records(before, done.folder)
        return parts[0]

    return run


@pytest.fixture(
    scope="module",
    params=[
        "small",
        pytest.param("quick", marks=pytest.mark.ci),
        pytest.param("all", marks=pytest.mark.slow),
    ],
)
def extent(request: pytest.FixtureRequest, backend: str) -> str:
    """How many trainings are compared: those of `make test`, `make test-ci` or `make test-all`."""
    chosen: str = request.param
    if backend not in {"small": SMALL, "quick": QUICK, "all": [backend]}[chosen]:
        pytest.skip(f"no training on {backend} is {chosen}")
    return chosen


@pytest.fixture(scope="module")
def compared(extent: str, backend: str) -> list[str]:
    """The trainings that are compared with plain Keras."""
    return [*{"small": SMALL, "quick": QUICK, "all": {backend: names(backend)}}[extent][backend]]


@pytest.fixture(scope="module")
def alike(extent: str, backend: str) -> list[str]:
    """The trainings that three workers compute, too."""
    return [*(ALIKE_SMALL if extent == "small" else ALIKE)[backend]]


@pytest.fixture(scope="module")
def several_updates(extent: str, backend: str) -> list[str]:
    """The trainings with several updates in a step. On TensorFlow, tracing the other takes long."""
    return ROUNDS[backend][: 1 if extent == "quick" else None]


class Alone(NamedTuple):
    """The output of plain Keras, and the folder of its values."""

    trainings: list[str]
    losses: list[str]
    rounds: list[str]
    by_hand: list[str]
    folder: Path


@pytest.fixture(scope="module")
def alone(
    plain: Callable[..., str],
    tmp_path_factory: pytest.TempPathFactory,
    backend: str,
    compared: list[str],
    several_updates: list[str],
) -> Alone:
    """Plain Keras, and then, in the same process, a strategy in a script started by hand."""
    folder = tmp_path_factory.mktemp("plain")
    trainings = f"program --plain --exact --save {folder} {' '.join(compared)}"
    rounds = f"rounds --plain --exact {' '.join(several_updates)}"
    programs = (trainings, "losses --plain", rounds, "program --exact cnn")
    printed = plain("together.py", *" -- ".join(programs).split(), backend=backend)
    found = Alone(*divided(printed.splitlines()), folder)
    assert [line.split()[1] for line in found.trainings] == compared
    return found


@pytest.fixture(scope="module")
def exact(backend: str, extent: str, compared: list[str]) -> list[str]:
    """The trainings that are compared with plain Keras to the last bit."""
    if (backend, extent) == ("jax", "small"):
        pytest.skip("compiling for this takes long: make test-ci")
    found = compared if backend != "jax" or compared == names(backend) else QUICK_OPTIMIZED
    return [name for name in TO_THE_LAST_BIT if name in found]


@pytest.fixture(scope="module")
def optimized(
    plain: Callable[..., str], alone: Alone, backend: str, exact: list[str]
) -> tuple[list[str], list[str]]:
    """The results of plain Keras and of a strategy by hand, with fully optimized code."""
    if backend != "jax":
        return [line for line in alone.trainings if line.split()[1] in exact], alone.by_hand
    programs = f"program --plain --exact {' '.join(exact)} -- program --exact cnn"
    trainings, by_hand = divided(plain("together.py", *programs.split(), optimized=True).splitlines())
    return trainings, by_hand


class Replicas(NamedTuple):
    """The output of two workers with four replicas, and the folder of the values of `trainings`."""

    first: list[str]
    trainings: list[str]
    losses: list[str]
    rounds: list[str]
    folder: Path


@pytest.fixture(scope="module")
def replicas(
    trained: Trained,
    tmp_path_factory: pytest.TempPathFactory,
    backend: str,
    compared: list[str],
    several_updates: list[str],
) -> Replicas:
    """Two workers with a training that has random parts, and then what plain Keras also computes."""
    folder = tmp_path_factory.mktemp("replicas")
    trainings = f"program --exact --save {folder} {' '.join(compared)}"
    rounds = f"rounds --exact {' '.join(several_updates)}"
    return Replicas(*trained(backend, 2, "program cnn", trainings, "losses", rounds), folder)


def test_four_replicas_give_the_same_bits_on_any_number_of_workers(
    trained: Trained, replicas: Replicas, backend: str, alike: list[str]
) -> None:
    # Random numbers may depend on earlier calls: only the first training is compared. On JAX and PyTorch, the
    # run is that of the next tests.
    (three,) = trained(backend, 3, f"program {' '.join(alike)}")
    assert three[:1] == replicas.first == results(three, "cnn")
    assert len(replicas.first) == 1


@pytest.mark.slow
def test_code_that_is_optimized_gives_the_same_bits_on_any_number_of_workers(trained: Trained) -> None:
    found = [trained("jax", workers, "program cnn", optimized=True) for workers in (1, 4)]
    assert found == [found[0]] * 2
    assert len(results(found[0][0], "cnn")) == 1


@pytest.mark.parametrize(
    ("backend", "chosen"),
    [
        pytest.param("torch", SMALL["torch"], id="torch-small"),
        pytest.param("jax", ALIKE["jax"], marks=pytest.mark.slow, id="jax-quick"),
        *(
            pytest.param(name, names(name), marks=pytest.mark.slow, id=f"{name}-all")
            for name in ("jax", "tensorflow", "torch")
        ),
    ],
    indirect=["backend"],
)
def test_every_training_gives_the_same_bits_on_one_and_three_workers(
    trained: Trained, backend: str, chosen: Iterable[str]
) -> None:
    pytest.importorskip(backend)
    ((one,), (three,)) = (trained(backend, n, f"program {' '.join(chosen)}") for n in (1, 3))
    assert [line.split()[1] for line in results(one)] == [*chosen]
    assert one == three


@pytest.mark.slow
def test_losses_and_rounds_give_the_same_bits_on_one_and_three_workers(
    trained: Trained, backend: str
) -> None:
    programs = ("losses", "rounds", "rounds --eager")
    one, three = (trained(backend, workers, *programs) for workers in (1, 3))
    assert [len(lines) for lines in one] == [2 * len(LOSSES), *[len(ROUNDS[backend])] * 2]
    assert one == three


def test_replicas_agree_with_plain_keras(alone: Alone, replicas: Replicas, compared: list[str]) -> None:
    far = []
    for name in compared:
        (expected,) = alone.folder.glob(f"{name}-*.npz")
        found = list(replicas.folder.glob(f"{name}-*.npz"))
        assert len(found) == 2
        wanted = np.load(expected)
        for got in map(np.load, found):
            assert got.files == wanted.files
            for part in wanted.files:
                distance = np.linalg.norm(got[part] - wanted[part])
                if not distance <= TOLERANCE.get(name, 1e-5) * np.linalg.norm(wanted[part]):
                    far.append((name, part, distance))
    assert far == []


def test_losses_with_one_denominator_are_those_of_plain_keras(alone: Alone, replicas: Replicas) -> None:
    assert [line.split()[1] for line in results(replicas.losses)] == LOSSES
    assert_near(replicas.losses, alone.losses)


def test_several_updates_in_a_step_are_those_of_plain_keras(
    alone: Alone, replicas: Replicas, several_updates: list[str]
) -> None:
    """Steps that update weights several times, or use them after an update."""
    assert [line.split()[1] for line in results(replicas.rounds)] == several_updates
    assert_near(replicas.rounds, alone.rounds)


def test_one_replica_is_plain_keras_to_the_last_bit(
    optimized: tuple[list[str], list[str]], trained: Trained, backend: str, exact: list[str]
) -> None:
    expected, _ = optimized
    assert [line.split()[1] for line in expected] == exact
    assert len(exact) >= 2
    program = f"program --exact {' '.join(exact)}"
    assert trained(backend, 1, program, replicas=1, optimized=True) == [expected]


@pytest.mark.slow
def test_losses_and_rounds_with_one_replica_are_plain_keras_to_the_last_bit(
    alone: Alone, trained: Trained, backend: str
) -> None:
    assert trained(backend, 1, "losses", "rounds --exact", replicas=1) == [alone.losses, alone.rounds]


def test_a_script_that_is_started_by_hand_is_plain_keras_too(
    alone: Alone, optimized: tuple[list[str], list[str]]
) -> None:
    for trainings, by_hand in ((alone.trainings, alone.by_hand), optimized):
        assert by_hand == results(trainings, "cnn")
        assert len(by_hand) == 1
