"""The worlds in which the tests of the contract run: threads and processes."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Member processes import these modules by their plain names.
sys.path.insert(0, str(Path(__file__).parent))

from collective_members import Hosts, Processes, Threads


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    world = Processes()
    yield world
    world.close()


def alone(members: int) -> list[int]:
    """One member a host."""
    return [1] * members


def uneven(members: int) -> list[int]:
    """At most two hosts with different numbers of members, or three if there are many."""
    return {1: [1], 2: [1, 1], 3: [2, 1], 4: [3, 1]}.get(members, [3, members - 4, 1])


def pairs(members: int) -> list[int]:
    """Two members a host, and one on the last host if their number is odd; but never a single host."""
    return {2: [1, 1]}.get(members, [2] * (members // 2) + [1] * (members % 2))


HOSTS = {"hosts": (alone, False), "hosts, TLS": (pairs, True), "hosts of several": (uneven, False)}


@pytest.fixture(
    scope="session",
    params=[
        *("loopback", "shared", "hosts, TLS"),
        pytest.param("hosts of several", marks=pytest.mark.ci),
        pytest.param("hosts", marks=pytest.mark.slow),
    ],
)
def world(request: pytest.FixtureRequest) -> Threads | Processes:
    """Every implementation of the contract."""
    if request.param == "loopback":
        return Threads()
    processes: Processes = request.getfixturevalue("processes")
    if request.param == "shared":
        return processes
    spread, encrypted = HOSTS[request.param]
    certificate = make_certificate(request.getfixturevalue("tmp_path_factory")) if encrypted else ""
    return Hosts(processes, spread, certificate=certificate)


def make_certificate(folders: pytest.TempPathFactory) -> str:
    """Return the path of a new certificate, which signs itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    path = folders.mktemp("certificate") / "both.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ed25519", "-nodes", "-subj", "/CN=lockstep"]
    subprocess.run(
        [*command, "-keyout", path, "-out", path.with_suffix(".crt")], check=True, capture_output=True
    )
    path.write_bytes(path.read_bytes() + path.with_suffix(".crt").read_bytes())
    return str(path)
