"""Hosts divide their updates among their workers, and lose workers: the bits are those of whole updates."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from host_network import Host, Running

CHAOS = Path(__file__).parents[1] / "chaos"
SCRIPT = CHAOS / "dividing.py"
DIVIDED = "--hosts node1:2,node2:2 --update divided"

LOSSES = {
    "workers of both hosts": (
        "0:1:filling the state",
        "2:3:halfway through a block",
        "1:6:before a block is written",
    ),
    "a host": ("2:3:halfway through a block:host",),
    "the host of the chief, at the end of an update": ("1:5:before the new weights:host",),
}

Train = Callable[..., tuple[Running, dict[int, str]]]


@pytest.fixture
def train(hosts: Sequence[Host], lean: Callable[..., dict[str, str]]) -> Train:
    """Train at the command of the third host; return it, and the results of the workers that are left."""

    def run(backend: str, options: str, *faults: str) -> tuple[Running, dict[int, str]]:
        for host in hosts:
            for file in (SCRIPT, CHAOS / "chaos_faults.py"):
                shutil.copy(file, host.work)
        folder = f"run{len(list(hosts[2].work.glob('run*')))}"
        job_options = f"--backend {backend} --replicas 4 --threads-per-worker 1 --run-dir {folder} {options}"
        command = ("run", *job_options.split(), SCRIPT.name, ".", "plain", *faults)
        job = hosts[2].lockstep(*command, **lean(SCRIPT, backend))
        assert job.end() == 0, job.err
        by_itself = "each worker computes the whole update: train_on_batch takes one step by itself"
        assert "computes the whole update" not in job.err.replace(by_itself, "")
        results = {}
        for path in (hosts[2].work / folder).glob("worker-*.log"):
            lines = [line for line in path.read_text().splitlines() if line.startswith("result ")]
            results |= {int(path.stem.partition("-")[2]): line for line in lines}
        for host in hosts[:2]:
            host.remove_abandoned()
        return job, results

    return run


@pytest.fixture(scope="module")
def known() -> dict[str, str]:
    """The results of whole updates on the backends so far."""
    return {}


@pytest.fixture
def whole(train: Train, known: dict[str, str]) -> Callable[[str], str]:
    """The result of one worker that computes whole updates."""

    def result(backend: str) -> str:
        if backend not in known:
            known[backend] = train(backend, "-n 1")[1][0]
        return known[backend]

    return result


@pytest.mark.slow("a host")
@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
@pytest.mark.parametrize("losses", LOSSES)
def test_workers_and_hosts_are_lost_within_updates(
    train: Train, whole: Callable[[str], str], backend: str, losses: str
) -> None:
    job, results = train(backend, f"{DIVIDED} --max-restarts 0", *LOSSES[losses])
    assert set(results.values()) == {whole(backend)}
    assert len(results) < 4
    assert "was killed by SIGKILL" in job.err or "was lost" in job.err


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_all_workers_of_a_host_are_replaced(train: Train, whole: Callable[[str], str], backend: str) -> None:
    """None of its workers shares the slots any more: the new ones write those that they have received."""
    faults = ("2:3:halfway through a block", "3:4:before a block is written")
    _, results = train(backend, f"{DIVIDED} --min-workers 4", *faults)
    # Their callbacks have seen fewer steps.
    assert {result.split()[1] for result in results.values()} == {whole(backend).split()[1]}
    assert set(results) == {0, 1, 4, 5}
