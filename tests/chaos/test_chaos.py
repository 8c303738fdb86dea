"""Workers are lost at every named point of the protocol; the others compute the same bits."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from chaos_faults import POINTS, WHILE_JOINING, WHILE_OTHERS_JOIN

from command_server import CommandServers

Run = Callable[..., dict[str, int]]
HARNESS = Path(__file__).with_name("harness.py")
QUICK = ("halfway through summing", "after reduce", "in the next view", "state reported", "asking to join")
"""The points that `make test` plays; `make test-ci` plays the others."""
PATIENCE = 500.0
JOBS = 20
"""So many jobs lose workers at random points."""


@pytest.fixture(scope="session")
def run(commands: CommandServers) -> Run:
    """Run jobs; return the numbers of jobs, of lost and of replaced workers, and of failures.

    A server that has imported the harness forks a process of it for each run.
    """
    folders = filter(None, (str(HARNESS.parent), os.environ.get("PYTHONPATH")))
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}

    def call(*arguments: str) -> dict[str, int]:
        result = commands.run([str(HARNESS), *arguments], variables, PATIENCE, [HARNESS.stem])
        assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-5000:]
        last = result.stdout.splitlines()[-1]
        return {name: int(count) for name, count in re.findall(r"(\w+) (\d+)", last)}

    return call


@pytest.mark.ci(*(point for point in POINTS if point not in QUICK))
@pytest.mark.parametrize("point", POINTS)
def test_workers_are_lost_at_a_point(run: Run, point: str) -> None:
    seen = run("--seed", "1000", "--jobs", "6", "--point", point)
    assert seen["failed"] == 0
    # Each job also loses a worker at another point.
    assert seen["lost"] > seen["jobs"]


@pytest.mark.ci
@pytest.mark.parametrize(
    "first", [0, *(pytest.param(count * JOBS, marks=pytest.mark.slow) for count in (1, 2, 3))]
)
def test_workers_are_lost_anywhere(run: Run, first: int) -> None:
    seen = run("--seed", str(first), "--jobs", str(JOBS))
    assert seen["failed"] == 0
    assert seen["lost"] > JOBS


@pytest.mark.ci(*(point for point in (*WHILE_OTHERS_JOIN, *WHILE_JOINING) if point not in QUICK))
@pytest.mark.parametrize("point", [*WHILE_OTHERS_JOIN, *WHILE_JOINING])
def test_workers_are_lost_while_others_join(run: Run, point: str) -> None:
    seen = run("--replace", "--seed", "1000", "--jobs", "5", "--point", point)
    assert seen["failed"] == 0
    assert seen["replaced"] >= seen["jobs"]


@pytest.mark.ci
@pytest.mark.parametrize(
    "first", [0, *(pytest.param(count * JOBS, marks=pytest.mark.slow) for count in (1, 2, 3))]
)
def test_lost_workers_are_replaced(run: Run, first: int) -> None:
    seen = run("--replace", "--seed", str(first), "--jobs", str(JOBS))
    assert seen["failed"] == 0
    assert seen["replaced"] > JOBS
