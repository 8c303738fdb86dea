"""Whose agents a command that takes over a job goes on with."""

from pathlib import Path
from typing import Any

from lockstep.coordinator.job_record import HostRecord, JobRecord
from lockstep.hosts.agent_server import JoiningAgent
from lockstep.hosts.takeover import taking_part
from lockstep.protocol.host import Prepare, RunningJob
from lockstep.protocol.job_spec import JobSpec
from lockstep.supervisor.state import JobSize, State, TimeLimits
from lockstep.transport.local_channel import LocalChannel


def test_agents_that_the_record_does_not_count_on_join_anew() -> None:
    """Those of lost hosts, of hosts that joined after the record was made, and of another job."""
    spec = JobSpec(target="a.py", workers=3, replicas=4, threads=1, run_dir=Path("run"))
    hosts = (HostRecord("node1", None), HostRecord("node2", None, lost=True), HostRecord("node3", None))
    record = JobRecord(spec, State.of(spec.view, TimeLimits(), JobSize.of(3, 1, 5)), hosts)
    ends: list[Any] = [LocalChannel.pair() for _ in range(5)]
    agents = [JoiningAgent(own, "", 0.0) for own, _ in ends]
    jobs = [(b"job", 0), (b"job", 1), (b"job", 3), (b"another", 2), (b"job", 2)]
    running = [
        (agent, RunningJob(Prepare(job, "", True, "a.py", False, (), None, "", {}), host, None))
        for agent, (job, host) in zip(agents, jobs, strict=True)
    ]
    assert taking_part(running, b"job", record) == {0: agents[0], 2: agents[4]}
    for pair in ends:
        for end in pair:
            end.close()
