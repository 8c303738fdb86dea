"""What the coordinator sends to many hosts that join, are lost and come back, in virtual time."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from simulated_hosts import ManyHosts, Traffic

from lockstep.cli.job_restarts import earlier_starts
from lockstep.observability.events import HostLost, HostRetired, JobTotals, VerificationFailed
from lockstep.observability.run_lines import happenings
from lockstep.observability.run_state import RunState
from lockstep.protocol.host import ALIVE_EVERY, SILENCE, WorkerSaid
from lockstep.protocol.worker import EventReport
from lockstep.system.paths import RunPaths

HOSTS = 120
LOST = 12
ARRIVING = 1.0
"""Seconds in which all hosts arrive."""
_PER_HOST = ("Prepare", "BeginJob", "StartWorker", "SendPosition", "SendState")
"""What the coordinator sends to each host that joins, once."""


def totals(folder: Path) -> JobTotals:
    """Return what the events of a run add up to, which is what its last event says."""
    state = RunState(keeps_history=False)
    for event in happenings(RunPaths(folder).events.read_bytes()):
        before, state = state.totals, state.after(event)
    assert state.totals == before
    return state.totals


def test_many_hosts(tmp_path: Path) -> None:
    """A view costs a message for each host, and a change as many views as the protocol makes."""
    job = ManyHosts(tmp_path, HOSTS, 1)
    found: dict[str, tuple[int, Traffic]] = {}

    def until(name: str, size: int) -> Iterator[Callable[[], bool]]:
        before = job.coordinator.state.view.number
        job.loop.take_traffic()
        yield lambda: job.has(size)
        found[name] = job.coordinator.state.view.number - before, job.loop.take_traffic()

    def scenario() -> Iterator[Callable[[], bool]]:
        yield lambda: job.coordinator.state.elastic
        for _ in range(HOSTS - 1):
            job.arrive(job.dice.uniform(0.0, ARRIVING))
        yield from until("joined", HOSTS)
        for host in job.hosts[1 : LOST + 1]:
            host.die()
        yield from until("lost", HOSTS - LOST)
        alive = [host for host in job.hosts if host.alive]
        for host in alive[-LOST:]:
            host.fall_silent()
        cut = job.clock.now()
        changed = until("silent", HOSTS - 2 * LOST)
        received = next(changed)
        yield lambda: len(job.coordinator.state.view.workers) == HOSTS - 2 * LOST
        assert SILENCE - ALIVE_EVERY <= job.clock.now() - cut <= SILENCE
        yield received
        next(changed, None)
        # One record or two are kept until then, each of which takes up to 0.1 s.
        assert job.clock.now() - cut <= SILENCE + 0.2
        job.finish()
        yield lambda: False

    assert job.run(scenario()) == 0
    done = totals(tmp_path)
    assert (done.joined_hosts, done.lost_hosts, done.joined, done.lost) == (
        HOSTS - 1,
        2 * LOST,
        HOSTS - 1,
        2 * LOST,
    )
    joins, traffic = found["joined"]
    assert {kind: traffic.sent[kind] for kind in _PER_HOST} == dict.fromkeys(_PER_HOST, HOSTS - 1)
    assert joins < HOSTS // 3
    assert traffic.sent["StartView"] < HOSTS * (joins + 1)
    # The change of a notice is sent to all hosts: some times for each view.
    assert traffic.sent["AskMembers"] < 8 * HOSTS * (joins + 1)
    changes = [found[name] for name in ("lost", "silent")]
    assert [views for views, _ in changes] == [LOST, LOST]
    # Hosts that are lost together cost one view; silence is noticed one host after the other.
    assert found["lost"][1].sent["StartView"] <= HOSTS
    assert found["silent"][1].sent["StartView"] <= LOST * HOSTS
    for _, traffic in changes:
        assert traffic.sent["KeepAlive"] <= HOSTS * (SILENCE / ALIVE_EVERY + 1)
        assert traffic.sent_bytes["StartView"] <= traffic.sent["StartView"] * 200 * HOSTS


def test_hosts_that_come_back_one_after_the_other(tmp_path: Path) -> None:
    """After the coordinator was cut off from all of them, the first one does not cost the others."""
    job = ManyHosts(tmp_path, 3, 1)

    def passed(seconds: float) -> Callable[[], bool]:
        end = job.clock.now() + seconds
        return lambda: job.clock.now() >= end

    def scenario() -> Iterator[Callable[[], bool]]:
        yield lambda: job.coordinator.state.elastic
        for _ in range(2):
            job.arrive(0.0)
        yield lambda: job.has(3)
        view = job.coordinator.state.view
        for host in job.hosts:
            host.silent = True
        yield passed(3 * SILENCE)
        for host in job.hosts:
            host.silent = False
            yield passed(SILENCE / 3)
        yield passed(2 * SILENCE)
        assert job.coordinator.state.view == view
        # Later, a silent host counts as lost again.
        job.hosts[1].fall_silent()
        yield lambda: len(job.coordinator.state.view.workers) == 2
        job.finish()
        yield lambda: False

    assert job.run(scenario()) == 0


def test_a_job_that_starts_again_knows_the_hosts_that_were_named(tmp_path: Path) -> None:
    job = ManyHosts(tmp_path, 3, 3)
    job.coordinator.state = replace(job.coordinator.state, avoid_host_after=1)
    verdict = VerificationFailed(step=3, arrays=("kernel",), workers=(1,), verdict="worker")

    def scenario() -> Iterator[Callable[[], bool]]:
        yield lambda: job.coordinator.state.elastic
        job.hosts[0].tell(WorkerSaid(0, EventReport(verdict)))
        yield lambda: job.coordinator.state.retiring == {1}
        job.finish()
        yield lambda: False

    changes: list[object] = []
    job.coordinator.events.subscribe(lambda published: changes.append(published.event), HostLost, HostRetired)
    assert job.run(scenario()) == 0
    (change,) = changes
    assert isinstance(change, HostRetired)
    assert change.host == "host1"
    assert earlier_starts(tmp_path, 0).named_hosts == ("host1",)


def test_a_host_that_is_avoided_when_it_comes_back_counts_as_retired(tmp_path: Path) -> None:
    job = ManyHosts(tmp_path, 3, 3)
    job.coordinator.state = replace(job.coordinator.state, avoid_host_after=1, named=("host3",))

    def scenario() -> Iterator[Callable[[], bool]]:
        yield lambda: job.coordinator.state.elastic
        job.arrive(0.0)
        yield lambda: job.coordinator.state.retiring == {3}
        job.finish()
        yield lambda: False

    retired: list[HostRetired] = []
    job.coordinator.events.subscribe(lambda published: retired.append(published.event), HostRetired)
    assert job.run(scenario()) == 0
    assert [change.host for change in retired] == ["host3"]
    assert "its workers were found at fault 1 time" in retired[0].reason
