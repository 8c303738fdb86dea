"""The protocol of engines: an engine starts the agents, and keeps one coordinator alive."""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from local_engine import PATIENCE, LocalEngine, kill

from lockstep.protocol.engine import EndKnown, LeaseOver, LeaseRenewed

STEPS = 60
PACED = [f"{worker}:0:after apply:crawl" for worker in range(4)]

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


@pytest.mark.ci
def test_a_job_begins_with_the_workers_found_and_grows(start: Start) -> None:
    engine = start("-n 3", STEPS, *PACED)
    engine.coordinate(2)
    engine.add(1)
    engine.add(1)
    engine.wait_until(lambda: engine.steps(1) > 3)
    engine.add(1)
    engine.wait_until(lambda: engine.steps(2) > 1)
    engine.hurry()
    assert engine.finish() == {0, 1, 2}
    # Each knows that the job has ended, in case that no coordinator remains to say so.
    assert [agent.receive(0.0) for agent in engine.agents] == [EndKnown(0)] * 3


@pytest.mark.ci
def test_a_coordinator_that_is_started_at_another_address(start: Start) -> None:
    """It takes over, although the agents were started with another address, and no worker is lost."""
    engine = start("-n 2", STEPS, *PACED)
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
    assert engine.text.count("taking over a job of 2 hosts whose coordinator was lost") == 2


@pytest.mark.slow
def test_a_coordinator_that_is_lost_before_the_job_begins(start: Start) -> None:
    """The agents that have joined it join the next one, and so do those that connect just as it ends."""
    engine = start("-n 2", 20)
    with socket.create_server(("127.0.0.1", 0)) as dying:
        dying.settimeout(PATIENCE)
        engine.address = f"127.0.0.1:{dying.getsockname()[1]}"
        engine.add(1)
        for _ in range(2):
            dying.accept()[0].close()
    engine.coordinate(2)
    engine.wait_until(lambda: "for other hosts to join with 1 more worker" in engine.text)
    assert engine.coordinator is not None
    kill(engine.coordinator)
    engine.coordinate(2)
    engine.add(1)
    assert engine.finish() == {0, 1}


@pytest.mark.ci
@pytest.mark.parametrize("stopped", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_coordinator_whose_lease_is_over(start: Start, stopped: bool) -> None:
    """It ends, also if it was stopped at that time; the job does not, and another one takes over."""
    engine = start("-n 2", STEPS, *PACED)
    engine.coordinate(2, lease=time.monotonic() + PATIENCE)
    engine.add(1)
    engine.add(1)
    engine.wait_until(lambda: engine.steps(1) > 3)
    first = engine.coordinator
    assert first is not None
    own = [first.process.pid, *(child.pid for child in psutil.Process(first.process.pid).children(True))]
    if stopped:
        signal_all(own, signal.SIGSTOP)
    first.send(LeaseRenewed(time.monotonic() - 1.0))
    if stopped:
        signal_all(own, signal.SIGCONT)
    engine.wait_until(lambda: first.status is not None)
    assert first.receive(0.0) == LeaseOver()
    assert "the coordinator ends, and hosts pause until it does" in engine.text
    assert "was lost" not in engine.text
    engine.coordinate(2)
    engine.wait_until(lambda: "taking over a job of 2 hosts" in engine.text)
    engine.hurry()
    assert engine.finish() == {0, 1}


def signal_all(processes: list[int], number: int) -> None:
    for process in processes:
        os.kill(process, number)


@pytest.mark.slow
def test_an_agent_ends_with_its_lifeline(start: Start) -> None:
    """Another one, of a host that the engine finds, takes its place."""
    engine = start("-n 2", STEPS, *PACED)
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


@pytest.mark.ci
@pytest.mark.parametrize("leaver", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_host_that_retires_hands_over(start: Start, leaver: int) -> None:
    """Its worker, also the chief, leaves between two steps, another joins, and no step is redone."""
    engine = start("-n 2 --max-restarts 0", STEPS, *PACED)
    engine.coordinate(2)
    engine.add(1)
    engine.add(1)
    engine.wait_until(lambda: engine.steps(1) > 3)
    agent = engine.retire(leaver)
    engine.wait_until(lambda: f" worker {leaver} left (1 worker)" in engine.text)
    agent.end()
    engine.wait_until(lambda: ", as announced; its workers had left" in engine.text)
    engine.add(1)
    engine.wait_until(lambda: engine.steps(2) > 1)
    engine.hurry()
    stayer = 1 - leaver
    assert engine.finish() == {stayer, 2}
    assert engine.steps(stayer) == STEPS
    for worker in range(3):
        assert engine.steps(worker, "computes") == engine.steps(worker)


@pytest.mark.slow
def test_the_only_host_retires(start: Start) -> None:
    """Its workers continue until one is ready elsewhere, also when another coordinator has taken over."""
    engine = start("-n 1 --max-restarts 0", STEPS, *PACED)
    engine.coordinate(1)
    engine.add(1)
    engine.wait_until(lambda: engine.steps(0) > 3)
    engine.retire(0)
    engine.wait_until(lambda: "worker 0 stays until enough others have joined" in engine.text)
    assert engine.coordinator is not None
    kill(engine.coordinator)
    engine.coordinate(1)
    engine.add(1)
    engine.wait_until(lambda: "worker 1 joined and worker 0 left (1 worker)" in engine.text)
    engine.hurry()
    assert engine.finish() == {1}
    # After the loss of a coordinator, output of its last moments may appear twice.
    made, computed = ([set(engine.lines(w, what)) for w in range(2)] for what in ("made", "computes"))
    assert sum(map(len, made)) == STEPS
    assert list(map(len, made)) == list(map(len, computed))


def test_the_key_is_in_no_file_and_in_no_log(start: Start, tmp_path: Path) -> None:
    engine = start("-n 1", 5)
    engine.coordinate(1)
    engine.add(1)
    assert engine.finish() == {0}
    secret = engine.key.split()[-1].encode()
    assert secret not in engine.shown
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and secret in path.read_bytes()]
