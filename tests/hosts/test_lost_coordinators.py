"""Coordinators that are lost: another one takes over, no worker is lost, and the bits stay."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from host_network import Host
from stepping_job import SteppingJob

from lockstep.protocol.host import LEFT_OUT

PACED = [f"{worker}:0:after apply:crawl" for worker in range(4)]


def coordinator(host: Host) -> int | None:
    """The process of the coordinator, if there is one now."""
    return next(iter(host.matching("lockstep.hosts.coordinator_process")), None)


def kill_coordinator(job: SteppingJob, host: Host) -> None:
    job.running.wait_until(lambda: coordinator(host) is not None)
    pid = coordinator(host)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def replace_coordinator(job: SteppingJob, host: Host) -> None:
    """Kill the coordinator, and wait until another one has taken over."""
    terms = len(job.events("coordinator"))
    kill_coordinator(job, host)
    job.running.wait_until(lambda: len(job.events("coordinator")) > terms)


def test_calm_steps_continue(hosts: Sequence[Host]) -> None:
    """Without any worker that is lost or joins, whatever the coordinator was doing."""
    job = SteppingJob(hosts, "--hosts node1,node2:2,node3", 60, *PACED)
    for losses in range(3):
        job.running.wait_until(lambda losses=losses: job.steps(3) > 3 * losses)
        replace_coordinator(job, hosts[0])
    job.hurry()
    assert set(job.finish()) == {0, 1, 2, 3}
    assert [event["term"] for event in job.events("coordinator")] == [2, 3, 4]
    assert job.events("lost") == job.events("joined") == []
    assert job.running.err.count("was killed by SIGKILL; another one takes over, and training continues") == 3


@pytest.mark.slow
def test_lost_together_with_workers(hosts: Sequence[Host]) -> None:
    """The next coordinator sees what happened meanwhile, and completes what the last one began."""
    job = SteppingJob(hosts, "--hosts node1,node2:2,node3", 80, *PACED)
    job.running.wait_until(lambda: job.steps(3) > 3)
    os.kill(job.process(1), signal.SIGKILL)
    replace_coordinator(job, hosts[0])
    job.running.wait_until(lambda: job.steps(4) > 1)
    hosts[2].signal_all(signal.SIGKILL)
    replace_coordinator(job, hosts[0])
    job.running.wait_until(lambda: "host node3 has joined" in job.running.err)
    replace_coordinator(job, hosts[0])
    job.running.wait_until(lambda: job.steps(5) > 1)
    job.hurry()
    assert set(job.finish()) == {0, 2, 4, 5}


@pytest.mark.slow("scale")
@pytest.mark.parametrize("first", ["stop", "scale"])
def test_commands_of_other_terminals(hosts: Sequence[Host], first: str) -> None:
    """They wait for the coordinator that takes over, and what they have begun is completed."""
    job = SteppingJob(hosts, "--hosts node1,node2:2", 80, *PACED)
    job.running.wait_until(lambda: job.steps(2) > 3)
    kill_coordinator(job, hosts[0])
    if first == "scale":
        scaled = hosts[0].lockstep("scale", "run", "4")
        assert scaled.end() == 0, scaled.err
        replace_coordinator(job, hosts[0])
        job.running.wait_until(lambda: job.steps(3) > 1)
        job.hurry()
        assert set(job.finish()) == {0, 1, 2, 3}
    else:
        stopped = hosts[0].lockstep("stop", "run")
        assert stopped.end() == 0, stopped.err
        assert job.end() == 143


@pytest.mark.slow
def test_a_coordinator_that_is_stuck(hosts: Sequence[Host]) -> None:
    """It is killed, and another one takes over."""
    job = SteppingJob(hosts, "--hosts node1,node2:2", 120, *PACED)
    job.running.wait_until(lambda: job.steps(2) > 3)
    pid = coordinator(hosts[0])
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    job.running.wait_until(lambda: job.events("coordinator"))
    job.hurry()
    assert set(job.finish()) == {0, 1, 2}
    assert job.events("lost") == []


def listening(hosts: Sequence[Host], folder: Path) -> tuple[list[str], dict[str, str]]:
    """An address of the first host, and the variables of a job there, whose key all hosts have."""
    key = folder / "job.key"
    subprocess.run([sys.executable, "-m", "lockstep", "key", key], check=True, capture_output=True)
    for host in hosts:
        shutil.copy(key, host.work)
    return [f"{hosts[0].address}:4321"], {"LOCKSTEP_KEY_FILE": "job.key"}


def test_a_coordinator_that_is_started_again_by_hand(hosts: Sequence[Host], tmp_path: Path) -> None:
    """The command is lost, and with it all processes of its host: the others continue, and it joins them."""
    (address,), variables = listening(hosts, tmp_path)
    options = f"--listen {address} -n 3 --timeout 120"
    job = SteppingJob(hosts, options, 80, *PACED, **variables)
    agents = [host.lockstep("agent", "--join", address, **variables) for host in hosts[1:3]]
    job.running.wait_until(lambda: job.steps(0) > 3)
    job.running.process.kill()
    assert job.end() == -signal.SIGKILL
    agents[0].wait_until(lambda: "the connection to the coordinator ended" in agents[0].err)
    agents[0].wait_until(lambda: not hosts[0].processes())
    again = SteppingJob(hosts, options, 80, *PACED, run="again", **variables)
    again.running.wait_until(lambda: again.steps(3) > 1)
    again.hurry()
    assert set(again.finish()) == {1, 2, 3}
    notes = again.running.err
    assert "taking over a job of 3 hosts whose coordinator was lost; 2 of them continued" in notes
    assert -1 < notes.find(f"{hosts[0].address} was lost") < notes.find("has joined"), notes
    assert [agent.end() for agent in agents] == [0, 0], [agent.err for agent in agents]


@pytest.mark.slow
def test_another_job_is_not_taken_over(hosts: Sequence[Host], tmp_path: Path) -> None:
    """The agents wait for the command that began their job, and end at the limit without it."""
    (address,), variables = listening(hosts, tmp_path)
    job = SteppingJob(hosts, f"--listen {address} -n 2 --timeout 15", 80, *PACED, **variables)
    agent = hosts[1].lockstep("agent", "--join", address, **variables)
    job.running.wait_until(lambda: job.steps(0) > 3)
    hosts[0].signal_all(signal.SIGKILL)
    other = hosts[0].lockstep(
        *f"run --backend jax --replicas 5 --listen {address} -n 2 stepping.py 7".split(), **variables
    )
    assert other.end() == 2, other.err
    assert "the agents that have joined run another job, whose arguments is ('80'" in other.err
    assert agent.end() == LEFT_OUT, agent.err
    assert "a worker is lost too, so training waits for the coordinator at" in agent.err


@pytest.mark.slow
def test_a_host_that_was_cut_off_joins_again(hosts: Sequence[Host], tmp_path: Path) -> None:
    """Its agent finds the coordinator, ends its workers, and joins like a new host."""
    (address,), variables = listening(hosts, tmp_path)
    job = SteppingJob(hosts, f"--listen {address} -n 2 --timeout 120", 120, *PACED, **variables)
    agent = hosts[1].lockstep("agent", "--join", address, **variables)
    job.running.wait_until(lambda: job.steps(1) > 3)
    hosts[1].cut()
    job.running.wait_until(lambda: "worker 0 continues" in job.running.err)
    hosts[1].reconnect()
    job.running.wait_until(lambda: job.steps(2) > 1)
    job.hurry()
    assert set(job.finish()) == {0, 2}
    assert agent.end() == 0, agent.err
    assert "the job has continued without this host, and this host joins it again" in agent.err
