"""Hosts for the measurements: network namespaces of this machine, on one virtual bridge. They need root."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from programs import environment
from turns import Program

PREFIX = "lsbench"
SUBNET = "10.219.0"
_SSH = """#!/bin/sh
# In the place of ssh: starts a process in a namespace.
while [ "$1" != -- ]; do shift; done
host=$((${{2##*.}} - 1))
exec ip netns exec "{prefix}$host" env SSH_CONNECTION="{ours} 1 $2 22" sh -c "$3"
"""


def available() -> bool:
    """Whether this machine can have such hosts."""
    return os.geteuid() == 0 and shutil.which("ip") is not None


def _prefix() -> str:
    return f"{PREFIX}{os.getpid()}h"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextlib.contextmanager
def network(hosts: int, rate: str = "") -> Iterator[list[str]]:
    """Create namespaces with the addresses 10.219.0.1 and so on; return their names.

    Args:
        hosts: their number.
        rate: the limit of each host's sending, such as `100mbit`; none if empty.
    """
    names = [f"{_prefix()}{host}" for host in range(hosts)]
    bridge = f"{PREFIX}{os.getpid() % 100000}"
    with contextlib.ExitStack() as stack:
        _ip("link", "add", bridge, "type", "bridge")
        stack.callback(_ip, "link", "delete", bridge)
        _ip("link", "set", bridge, "up")
        for host, name in enumerate(names):
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "delete", name)
            outside = f"lsb{os.getpid() % 100000}v{host}"
            _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", name)
            # The kernel deletes the links of a namespace some time after it.
            stack.callback(_ip, "link", "delete", outside)
            _ip("link", "set", outside, "master", bridge, "up")
            _ip("-n", name, "address", "add", f"{SUBNET}.{host + 1}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            if rate:
                shape = ["root", "tbf", "rate", rate, "burst", "128kb", "latency", "50ms"]
                subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", "eth0", *shape], check=True)
        yield names


def write_ssh(folder: Path) -> None:
    """Write the program in the place of ssh."""
    ssh = folder / "ssh"
    ssh.write_text(_SSH.format(prefix=_prefix(), ours=f"{SUBNET}.1"))
    ssh.chmod(0o755)


def within(namespaces: Sequence[str], commands: Sequence[list[str]]) -> list[list[str]]:
    """Return commands of which each starts in its namespace."""
    return [
        ["ip", "netns", "exec", namespace, *command]
        for namespace, command in zip(namespaces, commands, strict=True)
    ]


def run_over_hosts(
    name: str,
    script: list[str],
    options: Sequence[str],
    namespaces: Sequence[str],
    backend: str,
    folder: Path,
) -> Program:
    """Return the program that runs a script with one worker and one replica on each host.

    Args:
        name: of the program.
        script: and its arguments.
        options: of `lockstep run` beyond the hosts.
        namespaces: of `network`, of this process.
        backend: of Keras.
        folder: for what is written.
    """
    write_ssh(folder)
    addresses = [f"{SUBNET}.{host}" for host, _ in enumerate(namespaces, 1)]
    given = ["--hosts", ",".join(addresses), "--replicas", str(len(addresses)), "--threads-per-worker", "1"]
    run = [sys.executable, "-m", "lockstep", "run", *given, "--run-dir", str(folder / name), *options]
    variables = environment(backend, 1) | {"PATH": f"{folder}:{os.environ['PATH']}"}
    commands = within(namespaces[:1], [[*run, *script]])
    return Program(name, commands, len(addresses), len(addresses), variables)
