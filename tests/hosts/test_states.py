"""The state reaches joiners on other hosts, directly and exactly, whatever is lost on its way."""

import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from host_network import Host
from stepping_job import SteppingJob
from test_losses import agent

MEGABYTES, STEPS = 48, 120
CRAWLS = "0:1:after apply:crawl"
"""Otherwise, training could end before others have joined."""


def sent(job: SteppingJob) -> int:
    """The number of times that the state was sent to another host."""
    return sum(event["actions"].count("SendState") for event in job.events("decision"))


def arriving(host: Host) -> bool:
    """Whether a part of the state, but not all of it, has arrived at the agent of a host."""
    states = []
    for one in Path(f"/proc/{agent(host)}/fd").iterdir():
        with contextlib.suppress(OSError):
            states += [one.stat().st_size] if "lockstep-state" in str(one.readlink()) else []
    return any(2 << 20 < size < MEGABYTES << 20 for size in states)


def in_mid_stream(hosts: Sequence[Host], names: str = "node2:2,node3", to: int = 2) -> SteppingJob:
    """A job whose last host, at the index `to`, has lost its worker, and slowly gets the state of node2."""
    faults = ("2:1:after apply:SIGKILL", CRAWLS, "1:1:after apply:crawl")
    job = SteppingJob(hosts, f"--hosts {names}", STEPS, *faults, megabytes=MEGABYTES)
    job.running.wait_until(lambda: job.steps(0) > 2)
    hosts[1].slow()
    job.running.wait_until(lambda: arriving(hosts[to]))
    assert sent(job) == 1
    return job


def finish(job: SteppingJob, hosts: Sequence[Host], joins: int) -> set[int]:
    """Let a job end well once a worker has joined; return the workers that have finished."""
    hosts[1].hasten()
    job.running.wait_until(lambda: any(event["worker"] == joins for event in job.events("joined")))
    job.hurry()
    return set(job.finish())


def test_each_host_with_joiners_gets_the_state_once(hosts: Sequence[Host]) -> None:
    lost = tuple(f"{worker}:1:after apply:SIGKILL" for worker in (1, 2, 3))
    options = "--hosts node1,node2:2,node3 --min-workers 4"
    job = SteppingJob(hosts, options, 12, *lost, CRAWLS, megabytes=MEGABYTES)
    assert finish(job, hosts, 6) == {0, 4, 5, 6}
    assert sent(job) == 2


def test_a_joiner_on_the_host_of_the_chief_needs_no_network(hosts: Sequence[Host]) -> None:
    lost = "1:1:after apply:SIGKILL"
    options = "--hosts node1:2,node2 --min-workers 3"
    job = SteppingJob(hosts, options, 12, lost, CRAWLS, megabytes=MEGABYTES)
    assert finish(job, hosts, 3) == {0, 2, 3}
    assert sent(job) == 0


def test_the_state_arrives_although_the_chief_is_lost(hosts: Sequence[Host]) -> None:
    """The agent of its host has the state."""
    job = in_mid_stream(hosts)
    os.kill(job.process(0), signal.SIGKILL)
    job.running.wait_until(lambda: any(event["worker"] == 0 for event in job.events("exited")))
    assert finish(job, hosts, 4) == {1, 3, 4}
    assert sent(job) == 1


@pytest.mark.slow
def test_a_joiner_that_is_lost_before_the_state_has_arrived_is_replaced(hosts: Sequence[Host]) -> None:
    job = in_mid_stream(hosts)
    os.kill(job.process(3), signal.SIGKILL)
    assert finish(job, hosts, 4) == {0, 1, 4}
    assert "worker 3 was killed by SIGKILL before it joined" in job.running.err


@pytest.mark.slow
def test_a_joiner_whose_state_is_cut_off_is_replaced(hosts: Sequence[Host]) -> None:
    job = in_mid_stream(hosts)
    hosts[2].break_connections()
    assert finish(job, hosts, 4) == {0, 1, 4}
    assert (
        "worker 3 cannot join: node3 has not received the state: the stream of the state" in job.running.err
    )


@pytest.mark.slow
def test_a_job_continues_without_a_host_that_receives_the_state(hosts: Sequence[Host]) -> None:
    job = in_mid_stream(hosts)
    os.kill(agent(hosts[2]), signal.SIGKILL)
    job.running.wait_until(lambda: "host node3 was lost" in job.running.err)
    hosts[1].hasten()
    job.hurry()
    assert set(job.finish()) >= {0, 1}


def test_another_host_gives_the_state_if_the_one_that_gives_it_is_lost(hosts: Sequence[Host]) -> None:
    job = in_mid_stream(hosts, "node2,node3,node4", to=3)
    os.kill(agent(hosts[1]), signal.SIGKILL)
    job.running.wait_until(lambda: job.events("joined"))
    job.hurry()
    assert set(job.finish()) >= {1}
    assert sent(job) > 1


@pytest.mark.slow
def test_a_job_ends_with_the_last_host_that_has_its_state(hosts: Sequence[Host]) -> None:
    job = in_mid_stream(hosts)
    os.kill(agent(hosts[1]), signal.SIGKILL)
    assert job.end() == 1
    assert "host node2 was lost" in job.running.err
    assert "no workers remain" in job.running.err.splitlines()[-1]
    assert job.digests() == {}
