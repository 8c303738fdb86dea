"""Losses of workers, agents, hosts and the command: what continues is exact, and nothing is left anywhere."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from host_network import Host
from stepping_job import SteppingJob

from lockstep.protocol.host import SILENCE
from lockstep.transport.dial import REACH

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


@pytest.mark.slow("a worker of another host, then the chief")
@pytest.mark.parametrize("losses", LOSSES)
def test_lost_workers(hosts: Sequence[Host], losses: str) -> None:
    """Lost workers are replaced on their hosts; the bits stay."""
    names, faults, finished = LOSSES[losses]
    # Otherwise, training could end before the last replacement has joined.
    paced = [f"{worker}:0:after apply:crawl" for worker in range(6)]
    job = SteppingJob(hosts, f"--hosts {names} --min-workers 3", 60, *faults, *paced)
    job.running.wait_until(lambda: job.steps(max(finished)) > 0)
    job.hurry()
    assert set(job.finish()) == finished, job.running.err


def test_a_host_that_is_lost_before_the_strategy(hosts: Sequence[Host]) -> None:
    """Nothing has been computed yet, and the others begin without it."""
    faults = "0:0:before the strategy:hold", "1:0:before the strategy:host", "2:0:before the strategy:hold"
    job = SteppingJob(hosts, "--hosts node1,node2,node3", 12, *faults)
    job.running.wait_until(lambda: "workers 0 and 2 continue" in job.running.err)
    job.go(0)
    assert set(job.finish()) >= {0, 2}
    hosts[1].remove_abandoned()


def test_broken_connections(hosts: Sequence[Host]) -> None:
    """The members of a view whose connections break meet in the next one, and the bits stay."""
    job = held(hosts, "--hosts node1,node2:2 --max-restarts 1")
    hosts[1].break_connections()
    job.go(3)
    assert set(job.finish()) == {0, 1, 2}
    assert job.events("lost") == []
    assert "workers 0, 1 and 2 continue" in job.running.err


@pytest.mark.slow
@pytest.mark.parametrize("broken", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_two_hosts_that_cannot_reach_each_other(hosts: Sequence[Host], broken: bool) -> None:
    """The job ends with both names, although the coordinator, on a third host, reaches both."""
    job = SteppingJob(hosts, "--hosts node1,node2 --max-restarts 9", 12, "0:3:after apply:hold", at=2)
    job.wait_held(3)
    hosts[0].part_from(hosts[1])
    if broken:
        hosts[1].break_connections()
    job.go(3)
    assert job.end() == 1
    last = job.running.err.splitlines()[-1]
    assert re.search("the connection from node(1 to node2|2 to node1) failed: ", last), last
    assert last.endswith(f"through; tried again for {REACH:g} s")


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


@pytest.mark.slow("after+_announce", "before+_complete")
@pytest.mark.parametrize(
    "point", ["before publishing", "after+_announce", "before+_complete", "before+next_view"]
)
def test_a_host_lost_at_a_point(hosts: Sequence[Host], point: str) -> None:
    """With a part of a call, or of the way into the next view: the bits stay."""
    faults = ("2:2:after apply:SIGKILL",) if "next_view" in point else ()
    job = SteppingJob(hosts, "--hosts node1,node2,node3 --max-restarts 0", 12, f"1:2:{point}:host", *faults)
    assert set(job.finish()) >= {0}
    assert "host node2 was lost: the connection to its agent is closed; lost worker 1" in job.running.err
    hosts[1].remove_abandoned()


@pytest.mark.slow("the connection")
@pytest.mark.parametrize("kills", ["everything there", "the connection"])
def test_a_host_that_comes_back(hosts: Sequence[Host], kills: str) -> None:
    """It takes the state over the network, and joins at the end of a step."""
    job = SteppingJob(hosts, "--hosts node1,node2:2", 120, "0:3:after apply:crawl")
    job.running.wait_until(lambda: job.steps(1) > 3)
    if kills == "the connection":
        os.kill(hosts[0].matching("ssh -F")[0], signal.SIGKILL)
    else:
        hosts[1].signal_all(signal.SIGKILL)
    job.running.wait_until(lambda: "host node2 has joined, with room for 2 workers" in job.running.err)
    job.running.wait_until(lambda: job.steps(3) > 1 and job.steps(4) > 1)
    job.hurry()
    assert set(job.finish()) == {0, 3, 4}


Victim = Callable[[SteppingJob, Sequence[Host]], int]
VICTIMS: dict[str, tuple[Victim, int, str]] = {
    "agent": (lambda job, hosts: agent(hosts[1]), 0, "node2"),
    "watcher": (lambda job, hosts: watcher(hosts[1]), 0, "node2"),
    "ssh": (lambda job, hosts: hosts[0].matching("ssh -F")[0], 0, "node2"),
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
    """Whatever process of Lockstep is killed, the job continues or says why not, and leaves nothing."""
    find, status, text = VICTIMS[victim]
    job = held(hosts)
    os.kill(find(job, hosts), signal.SIGKILL)
    if status == 0:
        job.running.wait_until(lambda: "worker 0 continues" in job.running.err)
        job.go(3)
        assert set(job.finish()) == {0}
        assert (
            "host node2 was lost: the connection to its agent is closed; lost workers 1 and 2"
            in job.running.err
        )
    else:
        assert job.end() == status, job.running.err
        assert text in job.running.err.splitlines()[-1] if text else True, job.running.err
        assert job.digests() == {}


def wait_until(holds: Callable[[], object], patience: float) -> bool:
    deadline = time.monotonic() + patience
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(holds())


@pytest.mark.slow("cut")
@pytest.mark.parametrize("lost", ["cut", "stopped"])
def test_silent_hosts(hosts: Sequence[Host], lost: str) -> None:
    """The job continues without a host that can no longer be reached, which ends its own processes."""
    job = held(hosts, "--hosts node1,node2:2 --timeout 20")
    if lost == "cut":
        hosts[1].cut()
    else:
        hosts[1].signal_all(signal.SIGSTOP)
    job.running.wait_until(lambda: "worker 0 continues" in job.running.err)
    assert f"host node2 has been silent for {SILENCE:g} s; lost workers 1 and 2" in job.running.err
    job.go(3)
    assert set(job.finish()) == {0}
    assert hosts[0].left() == []
    if lost == "stopped":
        hosts[1].signal_all(signal.SIGCONT)
    assert wait_until(lambda: not hosts[1].matching("lockstep"), 20 + SLACK), hosts[1].processes()
    # The server of ssh does not notice for hours that its client is gone.
    for pid in hosts[1].matching("sshd: "):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_short_interruptions(hosts: Sequence[Host]) -> None:
    """A job survives a host that cannot be reached, or does not run, for less time than `SILENCE`."""
    job = SteppingJob(hosts, "--hosts node1,node2:2", 60, "0:3:after apply:crawl")
    job.running.wait_until(lambda: job.steps(1) > 3)
    hosts[1].cut()
    time.sleep(0.4 * SILENCE)
    hosts[1].reconnect()
    made = job.steps(1)
    job.running.wait_until(lambda: job.steps(1) > made)
    hosts[1].signal_all(signal.SIGSTOP)
    time.sleep(0.4 * SILENCE)
    hosts[1].signal_all(signal.SIGCONT)
    made = job.steps(1)
    job.running.wait_until(lambda: job.steps(1) > made)
    job.hurry()
    assert set(job.finish()) == {0, 1, 2}
    assert job.events("lost") == []
