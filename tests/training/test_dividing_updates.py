"""Workers divide the update of a step, and are lost at every point of it: the bits are the same."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

Launch = Callable[..., Any]
PROGRAM = Path(__file__).parents[1] / "chaos" / "dividing.py"
SOME = (
    "0:1:filling the state",
    "1:6:halfway through a block",
    "2:7:before a block is written",
)
"""Three of four workers, one after the other."""
REST = (
    ("1:3:before a shard", "2:3:halfway through keeping a block"),
    ("3:1:halfway through keeping a block", "0:9:halfway through a block"),
    ("2:2:after a shard", "1:2:before the new weights", "3:14:halfway through a block"),
    ("0:5:in a gather", "3:5:waiting for the others"),
    ("0:3:halfway through a block", "1:3:in the next view", "2:3:before a block is written"),
    ("0:0:before the new weights", "1:14:filling the state"),
)

BY_ITSELF = "each worker computes the whole update: train_on_batch takes one step by itself"


BACKENDS = ("jax", "torch")


def results(
    launch: Launch, backend: str, folder: Path, options: str, *faults: str, kind: str = "plain"
) -> set[str]:
    """Train; return the results of the workers that are left.

    If XLA optimizes little, the bits of several dtypes depend on the other operations of a function.
    """
    arguments = (str(PROGRAM), str(folder), kind, *faults)
    run = launch(f"{options} --max-restarts 0", *arguments, backend=backend, optimized=kind == "scaled")
    assert run.status == 0, run.stderr
    assert "computes the whole update" not in run.stderr.replace(BY_ITSELF, "")
    workers = len(list(run.folder.glob("worker-*.log")))
    lines = [run.marked(worker, "result ") for worker in range(workers)]
    assert sum(map(bool, lines)) == workers - len(faults)
    return {line for of_worker in lines for line in of_worker}


@pytest.fixture(scope="module")
def whole(launch: Launch, backend: str, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The results of one worker that computes the whole update."""
    return results(launch, backend, tmp_path_factory.mktemp("whole"), "-n 1 --replicas 4")


@pytest.mark.slow("jax")
@pytest.mark.ci("torch")
@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_three_of_four_workers_are_lost_within_updates(
    launch: Launch, backend: str, whole: set[str], tmp_path: Path
) -> None:
    assert len(whole) == 1
    assert results(launch, backend, tmp_path, "-n 4 --update divided", *SOME) == whole


@pytest.mark.ci
@pytest.mark.parametrize(
    ("backend", "workers", "faults"),
    [
        # Optimizing for JAX takes each worker ten seconds.
        pytest.param("jax", 2, SOME[1:2], id="jax"),
        pytest.param("jax", 4, SOME, marks=pytest.mark.slow, id="jax-more"),
        pytest.param("torch", 4, SOME, id="torch"),
    ],
    indirect=["backend"],
)
def test_updates_that_depend_on_whole_gradients_are_divided(
    launch: Launch, backend: str, workers: int, faults: Sequence[str], tmp_path: Path
) -> None:
    """A scaled loss, norms and several dtypes: workers are lost, and the bits are the same."""
    whole = results(launch, backend, tmp_path, "-n 1 --replicas 4", kind="scaled")
    assert len(whole) == 1
    options = f"-n {workers} --replicas 4 --update divided"
    assert results(launch, backend, tmp_path, options, *faults, kind="scaled") == whole


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
@pytest.mark.parametrize("faults", REST, ids=" and ".join)
def test_workers_may_be_lost_at_every_point_of_an_update(
    launch: Launch, backend: str, whole: set[str], faults: tuple[str, ...], tmp_path: Path
) -> None:
    assert results(launch, backend, tmp_path, "-n 4 --update divided", *faults) == whole


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_any_number_of_workers_has_the_bits_of_the_whole_update(
    launch: Launch, backend: str, whole: set[str], workers: int, tmp_path: Path
) -> None:
    assert results(launch, backend, tmp_path, f"-n {workers} --replicas 4 --update divided") == whole


WHILE_JOINING = (
    (3, "0:5:reporting the state"),
    (3, "0:5:halfway through reporting"),
    (3, "0:5:state reported"),
    (2, "0:6:workers met"),
    (2, "2:0:joined"),
    (2, "2:0:state restored"),
    (2, "2:0:workers met"),
)
"""The number of workers, and how the one that gives the state, or the one that joins, is lost."""
COMPARING = ((2, "0:6:slots compared"), (2, "2:0:slots compared"))
"""The same on PyTorch, where a worker that joins has slots of its own."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "workers", "fault"),
    [
        *((backend, *case) for backend in BACKENDS for case in WHILE_JOINING),
        *(("torch", *case) for case in COMPARING),
    ],
    indirect=["backend"],
)
def test_workers_may_be_lost_while_another_joins(
    launch: Launch, backend: str, whole: set[str], workers: int, fault: str, tmp_path: Path
) -> None:
    """What the workers share is not given: the one that joins has it, also when all others are lost."""
    faults = ("1:5:before a block is written", fault)
    options = f"-n {workers} --replicas 4 --min-workers {workers} --update divided"
    run = launch(options, str(PROGRAM), str(tmp_path), "plain", *faults, backend=backend)
    assert run.status == 0, run.stderr
    assert run.stderr.count("was killed by SIGKILL") == len(faults)
    assert "computes the whole update" not in run.stderr.replace(BY_ITSELF, "")
    lines = [line for worker in range(workers + 2) for line in run.marked(worker, "result ")]
    assert len(lines) == workers
    # Their callbacks have seen fewer steps.
    assert {line.split()[1] for line in lines} == {line.split()[1] for line in whole}


MARKS = ("fit ", "evaluate ", "predict ", "batch ", "table ", "end ")


def marked(run: Any, worker: int) -> list[str]:
    assert run.status == 0, run.stderr
    assert "computes the whole update" not in run.stderr.replace(BY_ITSELF, "")
    return [line for mark in MARKS for line in run.marked(worker, mark)]


@pytest.fixture
def undisturbed(undisturbed_run: Launch, backend: str) -> list[str]:
    """The results of an undisturbed run that computes whole updates."""
    return marked(undisturbed_run("-n 1 --replicas 4", "resuming.py", "{folder}", backend=backend), 0)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
@pytest.mark.parametrize(
    ("how", "options", "last"),
    [("lost0", "--min-workers 2", (1, 2)), ("scaled", "", (0,)), ("overtaken", "", (0, 2))],
)
def test_workers_join_that_map_the_shared_state(
    launch: Launch,
    backend: str,
    undisturbed: list[str],
    how: str,
    options: str,
    last: tuple[int, ...],
    tmp_path: Path,
) -> None:
    options = f"-n 2 --replicas 4 --update divided {options}"
    run = launch(options, "joining.py", str(tmp_path), how, "fit", "1", "step", "7", backend=backend)
    for worker in last:
        assert marked(run, worker) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
@pytest.mark.parametrize("updates", ["divided whole", "whole divided", "divided divided"])
def test_checkpoints_do_not_depend_on_the_division(
    launch: Launch, backend: str, undisturbed: list[str], updates: str, tmp_path: Path
) -> None:
    first, second = updates.split()
    keeping = f"--checkpoint {tmp_path / 'kept'} --checkpoint-every 2"
    arguments = (str(tmp_path), "killed", "fit", "1", "step", "7")
    options = f"-n 2 --replicas 4 {keeping} --update {first}"
    lost = launch(options, "resuming.py", *arguments, backend=backend)
    assert lost.status == 137
    run = launch(f"-n 3 {keeping} --update {second}", "resuming.py", *arguments, backend=backend)
    assert "resuming from" in run.stderr
    for worker in (0, 2):
        assert marked(run, worker) == undisturbed
