"""Hosts that cannot run a job are named in one line; the exit status is 2, and nothing is left."""

import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from host_network import Host

SCRIPT = "print('runs')\n"


def prepare(hosts: Sequence[Host]) -> None:
    for host in hosts:
        (host.work / "script.py").write_text(SCRIPT)


def other_version(hosts: Sequence[Host]) -> None:
    """Make the packages of one host look as if one had another version."""
    info = hosts[1].work / "packages/numpy-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 0.1\n")
    hosts[1].accept_key(PYTHONPATH=str(hosts[1].here / "work/packages"))


def other_script(hosts: Sequence[Host]) -> None:
    (hosts[1].work / "script.py").write_text(SCRIPT + "\n")


def no_script(hosts: Sequence[Host]) -> None:
    (hosts[1].work / "script.py").unlink()


def no_folder(hosts: Sequence[Host]) -> None:
    shutil.rmtree(hosts[1].work)


def no_key(hosts: Sequence[Host]) -> None:
    hosts[1].refuse_key()


def nothing(hosts: Sequence[Host]) -> None:
    """Every host is as it should be."""


Prepare = Callable[[Sequence[Host]], None]
REFUSALS: dict[str, tuple[Prepare, str, str]] = {
    "unknown host": (nothing, "--hosts node1,nodeX", "nodeX"),
    "key": (no_key, "--hosts node1,node2", "`ssh node2 true` must work without a question"),
    "folder": (no_folder, "--hosts node1,node2", "host node2: the folder {here}/work cannot be used"),
    "script": (other_script, "--hosts node1,node2", "script.py differs between node1 and node2"),
    "no script": (no_script, "--hosts node1,node2", "host node2: "),
    "version": (other_version, "--hosts node1,node2", "different versions of numpy: "),
    "loopback": (nothing, "--hosts localhost,node2", "localhost is 127.0.0.1 here"),
    # test_host_list.py has the other lists that are refused.
    "list": (nothing, "--hosts=-oProxyCommand=x", "is not a host"),
    "replicas": (nothing, "--hosts node1,node2 --replicas 1", "replica"),
    "devices": (nothing, "--hosts node1,node2 --devices 0,1", "--devices is for one host"),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_refusals(hosts: Sequence[Host], refusal: str) -> None:
    change, options, text = REFUSALS[refusal]
    prepare(hosts[:2])
    change(hosts)
    command = hosts[0].lockstep("run", "--backend", "jax", *options.split(), "script.py")
    assert command.end() == 2, command.err
    line = command.err.splitlines()[-1]
    assert line.startswith("lockstep: "), command.err
    assert text.format(here=hosts[0].here) in line
    # A slow machine also says for whom it waits.
    lines = [line for line in command.err.splitlines() if not line.startswith("lockstep: waiting for ")]
    assert len(lines) <= (2 if "ssh" in line else 1), command.err
    assert "runs" not in command.out
    assert list(hosts[0].work.glob("runs/*")) == []


def test_no_lockstep(hosts: Sequence[Host]) -> None:
    """The Python of the command must be at the same path everywhere."""
    prepare(hosts[:2])
    own = hosts[0].work / "python/bin/python"
    own.parent.mkdir(parents=True)
    own.symlink_to(Path(sys.executable).resolve())
    (own.parents[1] / "pyvenv.cfg").write_text((Path(sys.prefix) / "pyvenv.cfg").read_text())
    packages = own.parents[1] / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    packages.mkdir(parents=True)
    (packages / "all.pth").write_text("".join(f"{path}\n" for path in sys.path if path))
    here = f"{hosts[0].here}/work/python/bin/python"
    command = hosts[0].start(
        here, "-m", "lockstep", "run", "--backend", "jax", "--hosts", "node1,node2", "script.py"
    )
    assert command.end() == 2, command.err
    line = command.err.splitlines()[-1]
    assert f"host node2 cannot take part: it has no {here}" in line
