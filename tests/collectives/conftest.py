"""The worlds in which the tests of the contract run: threads and processes."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Member processes import these modules by their plain names.
sys.path.insert(0, str(Path(__file__).parent))

from collective_members import Processes, Threads


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    world = Processes()
    yield world
    world.close()


@pytest.fixture(scope="session", params=["loopback", "shared"])
def world(request: pytest.FixtureRequest) -> Threads | Processes:
    """Every implementation of the contract."""
    if request.param == "loopback":
        return Threads()
    found: Processes = request.getfixturevalue("processes")
    return found
