"""Losses of workers, agents, hosts and the command: what continues is exact, and nothing is left anywhere."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from host_network import Host
from stepping_job import SteppingJob

from lockstep.protocol.host import SILENCE

SLACK = 60.0
"""Seconds beyond a stated time, on a busy machine."""

LOSSES = {
    "a worker of another host, then the chief": (
        "node1,node2:2",
        ("1:1:before publishing:SIGKILL", "0:3:after apply:SIGKILL"),
        {2, 3, 4},
    ),
    "all workers of a host, then all of the other": (
        "node1,node2:2",
        ("1:1:after apply:SIGKILL", "2:1:after apply:SIGKILL", "0:5:after+reduce:SIGKILL"),
        {3, 4, 5},
    ),
    "while they connect, and with a part of the total": (
        "node1,node2,node3",
        ("1:2:before+_announce:SIGKILL", "0:0:after+connect:SIGKILL", "4:1:after+_announce:SIGKILL"),
        {2, 3, 5},
    ),
}


@pytest.mark.parametrize("losses", LOSSES)
def test_lost_workers(hosts: Sequence[Host], losses: str) -> None:
    """Lost workers are replaced on their hosts; the bits stay."""
    names, faults, finished = LOSSES[losses]
    job = SteppingJob(hosts, f"--hosts {names} --min-workers 3", 12, *faults)
    assert set(job.finish()) == finished


def held(hosts: Sequence[Host], options: str = "--hosts node1,node2:2", **variables: str) -> SteppingJob:
    """A job in the middle of its training."""
    job = SteppingJob(hosts, options, 12, "0:3:after apply:hold", **variables)
    job.wait_held(3)
    return job


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def watcher(host: Host) -> int:
    """The process on another host that watches the agent there."""
    agents = host.matching("lockstep agent")
    return next(pid for pid in agents if parent(pid) not in agents)


def agent(host: Host) -> int:
    above = watcher(host)
    return next(pid for pid in host.matching("lockstep agent") if parent(pid) == above)


Victim = Callable[[SteppingJob, Sequence[Host]], int]
VICTIMS: dict[str, tuple[Victim, int, str]] = {
    "agent": (lambda job, hosts: agent(hosts[1]), 1, "node2"),
    "watcher": (lambda job, hosts: watcher(hosts[1]), 1, "node2"),
    "ssh": (lambda job, hosts: hosts[0].matching("ssh -F")[0], 1, "node2"),
    "coordinator": (
        lambda job, hosts: next(
            pid for pid in hosts[0].processes() if parent(pid) == job.running.process.pid
        ),
        137,
        "coordinator",
    ),
    "command": (lambda job, hosts: job.running.process.pid, -9, ""),
}


@pytest.mark.parametrize("victim", VICTIMS)
def test_lost_processes(hosts: Sequence[Host], victim: str) -> None:
    """Whatever process of Lockstep is killed, the job ends, says where, and leaves nothing."""
    find, status, text = VICTIMS[victim]
    job = held(hosts)
    os.kill(find(job, hosts), signal.SIGKILL)
    assert job.end() == status, job.running.err
    assert text in job.running.err.splitlines()[-1] if text else True, job.running.err
    assert job.digests() == {}


def wait_until(holds: Callable[[], object], patience: float) -> bool:
    deadline = time.monotonic() + patience
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(holds())


@pytest.mark.parametrize("lost", ["cut", "stopped"])
def test_silent_hosts(hosts: Sequence[Host], lost: str) -> None:
    """A host that can no longer be reached ends the job in time, and then its own processes."""
    job = held(hosts)
    began = time.monotonic()
    if lost == "cut":
        hosts[1].cut()
    else:
        hosts[1].signal_all(signal.SIGSTOP)
    assert job.end() == 1
    assert time.monotonic() - began < SILENCE + SLACK
    assert f"host node2 has been silent for {SILENCE:g} s" in job.running.err
    assert hosts[0].left() == []
    if lost == "stopped":
        hosts[1].signal_all(signal.SIGCONT)
    assert wait_until(lambda: not hosts[1].matching("lockstep"), SILENCE + SLACK), hosts[1].processes()
    # The server of ssh does not notice for hours that its client is gone.
    for pid in hosts[1].matching("sshd: "):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
