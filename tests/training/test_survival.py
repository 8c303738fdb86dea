"""Real workers are killed at named points, on every backend: the result and the files are the same."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Launch = Callable[..., Any]
PROGRAM = Path(__file__).parents[1] / "chaos" / "survival.py"
SOME = ("0:7:halfway through publishing", "1:12:after apply", "2:12:before the next view")
"""The chief, and two more of four, one of them during the recovery from the loss of the other."""
REST = (
    ("1:3:before publishing", "0:9:published"),
    ("3:4:arrived", "0:15:halfway through summing"),
    ("0:2:summed", "1:6:in the next view", "2:9:after apply"),
    ("0:1:growing the memory", "3:5:in a gather"),
    ("0:0:end of an epoch", "1:0:end of an epoch"),
)


def train(launch: Launch, backend: str, folder: Path, *faults: str) -> tuple[set[str], dict[str, str]]:
    """Train, on one worker if none is lost; return the workers' results, and the digests of the files."""
    workers = 4 if faults else 1
    options = f"-n {workers} --replicas 4 --max-restarts 0"
    run = launch(options, str(PROGRAM), str(folder), *faults, backend=backend)
    assert run.status == 0, run.stderr
    lines = [run.marked(worker, "result ") for worker in range(workers)]
    assert sum(map(bool, lines)) == workers - len(faults)
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    return {line for some in lines for line in some}, files


@pytest.fixture(scope="module")
def undisturbed(
    launch: Launch, backend: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[set[str], dict[str, str]]:
    return train(launch, backend, tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize(
    # On the others, workers are lost in test_joining.py, test_graph_loops.py and test_random_numbers.py, too.
    "backend",
    [*(pytest.param(name, marks=pytest.mark.slow) for name in ("jax", "tensorflow")), "torch"],
    indirect=True,
)
def test_the_result_is_that_of_an_undisturbed_run(
    launch: Launch, backend: str, undisturbed: tuple[set[str], dict[str, str]], tmp_path: Path
) -> None:
    assert len(undisturbed[0]) == 1
    assert train(launch, backend, tmp_path, *SOME) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("faults", REST, ids=" and ".join)
def test_workers_may_be_lost_at_every_point(
    launch: Launch,
    backend: str,
    undisturbed: tuple[set[str], dict[str, str]],
    faults: tuple[str, ...],
    tmp_path: Path,
) -> None:
    assert train(launch, backend, tmp_path, *faults) == undisturbed
