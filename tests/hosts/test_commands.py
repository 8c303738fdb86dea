"""What users do with a job over hosts from other terminals, and how its script ends."""

import signal
from collections.abc import Sequence

import pytest
from host_network import Host
from stepping_job import SteppingJob

PACED = "0:1:after apply:pace"


def test_list_and_scale(hosts: Sequence[Host]) -> None:
    """A job is listed where its command is; workers leave, and others join on the hosts with fewest."""
    steps = 2000
    job = SteppingJob(hosts, "--hosts node1,node2", steps, PACED)
    job.running.wait_until(lambda: job.steps(1) > 3)
    listed = [host.lockstep("list") for host in hosts[:2]]
    assert [one.end() for one in listed] == [0, 0]
    assert "stepping.py" in listed[0].out
    assert "no job is running" in listed[1].out
    for wanted, event, times in ((1, "left", 1), (4, "joined", 3)):
        scaling = hosts[0].lockstep("scale", "run", str(wanted))
        assert scaling.end() == 0, scaling.err
        job.running.wait_until(lambda event=event, times=times: len(job.events(event)) == times)  # type: ignore[misc]
    assert job.events("view")[-1]["workers"]
    job.hurry()
    assert set(job.finish()) == {0, 2, 3, 4}


ENDINGS = {"stop": 143, "interrupt": 130}


@pytest.mark.parametrize("how", ENDINGS)
def test_stopping(hosts: Sequence[Host], how: str) -> None:
    job = SteppingJob(hosts, "--hosts node1,node2:2", 12, "0:3:after apply:hold")
    job.wait_held(3)
    if how == "interrupt":
        job.running.process.send_signal(signal.SIGINT)
    else:
        stop = hosts[0].lockstep("stop", "run")
        assert stop.end() == 0, stop.err
    assert job.end() == ENDINGS[how]
    assert job.digests() == {}


def test_resuming(hosts: Sequence[Host]) -> None:
    """After SIGTERM, the chief saves a checkpoint within the grace; other hosts resume from it."""
    steps, options = 500, "--checkpoint saved --checkpoint-every 1000 --grace 60s"
    job = SteppingJob(hosts, f"--hosts node1,node2:2 {options}", steps, PACED)
    job.running.wait_until(lambda: job.steps(0) > 3)
    job.running.process.send_signal(signal.SIGTERM)
    assert job.end() == 143
    assert job.digests() == {}
    assert "lockstep: checkpoint " in job.running.err
    made = job.steps(0)
    assert made < steps
    again = SteppingJob(hosts, f"--hosts node1:2,node3,node2 {options}", steps, run="again")
    again.finish()
    assert again.steps(0) == steps - made
