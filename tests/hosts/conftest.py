import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from lockstep.transport.keys import JobKey

# Processes on hosts import some of these modules by their plain names too.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "chaos"))

from host_network import Host, HostNetwork, Unavailable
from stepping_job import CHAOS, HERE

_PROGRAMS = (
    HERE / "stepping.py",
    HERE / "stepping_by_hand.py",
    CHAOS / "chaos_steps.py",
    CHAOS / "chaos_faults.py",
)

_QUICK = ("test_hosts_join_a_job",)
"""Jobs on several hosts that `make test` runs; all others are part of `make test-ci`."""

PATIENCE = 600.0
"""Seconds for processes to end that should have ended at once."""


def pytest_itemcollected(item: pytest.Item) -> None:
    assert isinstance(item, pytest.Function)
    if "host_network" in item.fixturenames and item.originalname not in _QUICK:
        item.add_marker(pytest.mark.ci)


@pytest.fixture(scope="session")
def host_network(shared_folder: Path) -> Iterator[HostNetwork]:
    """Five hosts in one network, for all tests of this process."""
    try:
        network = HostNetwork.open(5, shared_folder)
    except Unavailable as why:
        pytest.skip(str(why))
    with network:
        yield network


@pytest.fixture
def hosts(host_network: HostNetwork) -> Iterator[tuple[Host, ...]]:
    """Hosts without any process, and with empty folders; fails if the test leaves a process or a file."""
    host_network.reset()
    try:
        yield host_network.hosts
        left = host_network.left(PATIENCE)
    finally:
        host_network.reset()
    assert left == {}


@pytest.fixture
def lean_environment(lean: Callable[..., dict[str, str]]) -> dict[str, str]:
    """Variables for jobs whose script imports no framework."""
    return lean(Path(__file__), "jax")


@pytest.fixture
def nodes(hosts: Sequence[Host]) -> Sequence[Host]:
    """Hosts with the same key file and the same programs."""
    key = JobKey.generate()
    for host in hosts:
        key.write(host.work / "job.key")
        for program in _PROGRAMS:
            shutil.copy(program, host.work)
    return hosts


@pytest.fixture
def keyed(lean_environment: dict[str, str]) -> dict[str, str]:
    """Variables for jobs of `nodes`."""
    return {**lean_environment, "LOCKSTEP_KEY_FILE": "job.key"}
