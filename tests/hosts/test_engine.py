"""The protocol of engines: an engine starts the agents, and keeps one coordinator alive."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from local_engine import LocalEngine, kill

PACED = [f"{worker}:0:after apply:pace" for worker in range(4)]

Start = Callable[..., LocalEngine]


@pytest.fixture
def start(tmp_path: Path, environment: dict[str, str], lean_environment: dict[str, str]) -> Iterator[Start]:
    """Prepare a job; afterwards, no process of it is left."""
    made: list[LocalEngine] = []

    def prepare(options: str, steps: int, *faults: str) -> LocalEngine:
        made.append(LocalEngine(tmp_path, options, steps, *faults, variables=lean_environment))
        return made[-1]

    yield prepare
    for engine in made:
        engine.close()
        engine.wait_until(lambda engine=engine: not engine.processes())


def test_a_job_begins_with_the_workers_found_and_grows(start: Start) -> None:
    engine = start("-n 3", 300, *PACED)
    engine.coordinate(2)
    engine.add(1)
    engine.add(1)
    engine.wait_until(lambda: engine.steps(1) > 3)
    engine.add(1)
    engine.wait_until(lambda: engine.steps(2) > 1)
    engine.hurry()
    assert engine.finish() == {0, 1, 2}


def test_a_coordinator_that_is_started_at_another_address(start: Start) -> None:
    """It takes over, although the agents were started with another address, and no worker is lost."""
    engine = start("-n 2", 300, *PACED)
    engine.coordinate(2)
    engine.add(1)
    engine.add(1)
    engine.wait_until(lambda: engine.steps(1) > 3)
    for _ in range(2):
        assert engine.coordinator is not None
        before = engine.steps(1)
        kill(engine.coordinator)
        engine.coordinate(2)
        engine.wait_until(lambda before=before: engine.steps(1) > before + 3)  # type: ignore[misc]
    engine.hurry()
    assert engine.finish() == {0, 1}
    assert engine.text.count("taking over a job of 2 hosts whose coordinator was lost, in view 1") == 2


def test_an_agent_ends_with_its_lifeline(start: Start) -> None:
    """Another one, of a host that the engine finds, takes its place."""
    engine = start("-n 2", 400, *PACED)
    engine.coordinate(2)
    engine.add(1)
    lost = engine.add(1)
    engine.wait_until(lambda: engine.steps(1) > 3)
    lost.end()
    engine.add(1)
    engine.wait_until(lambda: engine.steps(2) > 1)
    engine.hurry()
    # Which of the first two was lost depends on which agent came first.
    assert len(engine.finish() - {2}) == 1


@pytest.mark.parametrize("leaver", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_host_that_retires_hands_over(start: Start, leaver: int) -> None:
    """Its worker, also the chief, leaves between two steps, another joins, and no step is redone."""
    engine = start("-n 2 --max-restarts 0", 300, *PACED)
    engine.coordinate(2)
    engine.add(1)
    engine.add(1)
    engine.wait_until(lambda: engine.steps(1) > 3)
    agent = engine.retire(leaver)
    engine.wait_until(lambda: f" worker {leaver} left (1 worker, view 2)" in engine.text)
    agent.end()
    engine.wait_until(lambda: ", as announced; its workers had left" in engine.text)
    engine.add(1)
    engine.wait_until(lambda: engine.steps(2) > 1)
    engine.hurry()
    stayer = 1 - leaver
    assert engine.finish() == {stayer, 2}
    assert engine.steps(stayer) == 300
    for worker in range(3):
        assert engine.steps(worker, "computes") == engine.steps(worker)


def test_the_only_host_retires(start: Start) -> None:
    """Its workers continue until one is ready elsewhere, also when another coordinator has taken over."""
    engine = start("-n 1 --max-restarts 0", 300, *PACED)
    engine.coordinate(1)
    engine.add(1)
    engine.wait_until(lambda: engine.steps(0) > 3)
    engine.retire(0)
    engine.wait_until(lambda: "worker 0 stays until enough others have joined" in engine.text)
    assert engine.coordinator is not None
    kill(engine.coordinator)
    engine.coordinate(1)
    engine.add(1)
    engine.wait_until(lambda: "worker 1 joined and worker 0 left (1 worker, view 2)" in engine.text)
    engine.hurry()
    assert engine.finish() == {1}
    made = [engine.steps(worker) for worker in range(2)]
    assert sum(made) == 300
    assert made == [engine.steps(worker, "computes") for worker in range(2)]


def test_the_key_is_in_no_file_and_in_no_log(start: Start, tmp_path: Path) -> None:
    engine = start("-n 1", 5)
    engine.coordinate(1)
    engine.add(1)
    assert engine.finish() == {0}
    secret = engine.key.split()[-1].encode()
    assert secret not in engine.shown
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and secret in path.read_bytes()]
