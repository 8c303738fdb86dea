"""Jobs with a hold: hosts without an answer of the coordinator pause, and continue with the same bits."""

import os
import signal
import time
from collections.abc import Callable, Sequence

import pytest
from host_network import Host
from stepping_job import SteppingJob
from test_losses import SLACK, agent, wait_until
from test_lost_coordinators import coordinator

HOLD = 2.5
BEYOND = 1.0
"""Seconds in which training would make many steps."""
PACED = [f"{worker}:0:after apply:pace" for worker in range(3)]
NOTE = f"the coordinator has not answered for {HOLD:g} s; training pauses until one answers"


class PausingJob(SteppingJob):
    """A job of which hosts have no answer from the coordinator for a while."""

    def __init__(self, hosts: Sequence[Host], options: str, at: int, **variables: str) -> None:
        super().__init__(hosts, options, 400, *PACED, at=at, hold=HOLD, **variables)
        self.await_steps(time.monotonic())

    def made(self, worker: int) -> list[float]:
        """When a worker has made its steps; its host knows, even if nobody else does."""
        paths = [host.work / f"made-{worker}" for host in self._hosts]
        return [float(line) for path in paths if path.exists() for line in path.read_text().split()]

    def await_steps(self, since: float) -> None:
        """Wait until a worker has made a step since a time, which takes all members of the view."""
        self.running.wait_until(lambda: any(at > since for worker in range(3) for at in self.made(worker)))

    def pause(self, cut: Callable[[], object]) -> float:
        """Let hosts have no answer any more, and check that they stop; return when the time was over."""
        cut()
        over = time.monotonic() + HOLD
        self.running.wait_until(lambda: time.monotonic() > over + BEYOND)
        self.check_stopped(over)
        return over

    def check_stopped(self, over: float) -> None:
        """Check that each worker has made at most the step whose calls had ended when the time was over."""
        late = {worker: [at for at in self.made(worker) if at > over] for worker in range(3)}
        assert max(map(len, late.values())) <= 1, late

    def resume(self, mend: Callable[[], object]) -> None:
        """Let them have answers again; wait until they make steps."""
        mend()
        self.await_steps(time.monotonic())


@pytest.mark.slow
def test_a_host_that_has_all_members(hosts: Sequence[Host]) -> None:
    """It pauses if what it sends to the coordinator is lost, and while its agent is stopped."""
    here, _, there, *_ = hosts
    job = PausingJob(hosts, "--hosts node1:2", at=2)
    job.pause(lambda: here.part_from(there))
    job.resume(here.reconnect)
    pid = agent(here)
    job.pause(lambda: os.kill(pid, signal.SIGSTOP))
    job.resume(lambda: os.kill(pid, signal.SIGCONT))
    job.hurry()
    assert set(job.finish()) == {0, 1}
    assert NOTE in job.running.err
    assert job.events("lost") == []


def test_a_coordinator_that_is_stuck(hosts: Sequence[Host]) -> None:
    """All hosts pause, although their workers reach each other, until another one takes over."""
    job = PausingJob(hosts, "--hosts node1,node2:2", at=0)
    pid = coordinator(hosts[0])
    assert pid is not None
    job.pause(lambda: os.kill(pid, signal.SIGSTOP))
    job.resume(lambda: os.kill(pid, signal.SIGKILL))
    job.hurry()
    assert set(job.finish()) == {0, 1, 2}
    assert NOTE in job.running.err
    assert [event["term"] for event in job.events("coordinator")] == [2]
    assert job.events("lost") == []


@pytest.mark.slow
@pytest.mark.parametrize("names", ["node1:2", "node1,node2"])
@pytest.mark.parametrize("ways", ["to it", "from it", "both"])
def test_hosts_that_are_cut_off_from_the_coordinator(hosts: Sequence[Host], names: str, ways: str) -> None:
    """Their workers reach each other."""
    *workers, there = hosts[: names.count("node") + 1]
    job = PausingJob(hosts, f"--hosts {names}", at=hosts.index(there))

    def cut() -> None:
        for host in workers:
            if ways != "from it":
                host.part_from(there)
            if ways != "to it":
                there.part_from(host)

    def mend() -> None:
        for host in (*workers, there):
            host.reconnect()

    job.pause(cut)
    job.resume(mend)
    job.hurry()
    # Connections recover at different times, so that the coordinator may give a host up.
    assert set(job.finish()) <= {0, 1, 2}
    assert NOTE in job.running.err


@pytest.mark.slow
def test_answers_that_come_late(hosts: Sequence[Host]) -> None:
    """What the coordinator has sent before the host was cut off does not let it continue."""
    job = PausingJob(hosts, "--hosts node1:2", at=2)
    pid = agent(hosts[0])
    over = job.pause(lambda: os.kill(pid, signal.SIGSTOP))
    hosts[0].cut()
    os.kill(pid, signal.SIGCONT)
    job.pause(lambda: None)
    job.check_stopped(over)
    job.resume(hosts[0].reconnect)
    job.hurry()
    assert set(job.finish()) == {0, 1}


@pytest.mark.slow
def test_a_worker_that_is_lost_during_the_pause(hosts: Sequence[Host]) -> None:
    """The others continue without it when the coordinator is back."""
    job = PausingJob(hosts, "--hosts node1:2 --max-restarts 0", at=2)
    job.pause(lambda: hosts[0].part_from(hosts[2]))
    os.kill(job.process(1), signal.SIGKILL)
    hosts[0].reconnect()
    job.running.wait_until(lambda: "worker 0 continues" in job.running.err)
    job.hurry()
    assert set(job.finish()) == {0}


@pytest.mark.slow
def test_a_pause_ends_with_the_limit(hosts: Sequence[Host]) -> None:
    """The host makes no step before, and ends its processes."""
    job = PausingJob(hosts, "--hosts node1:2 --timeout 10", at=2)
    over = job.pause(hosts[0].cut)
    assert job.end() == 1
    assert wait_until(lambda: not hosts[0].matching("lockstep"), SLACK), hosts[0].processes()
    job.check_stopped(over)
    # The server of ssh does not notice for hours that its client is gone.
    hosts[0].signal_all(signal.SIGKILL)
