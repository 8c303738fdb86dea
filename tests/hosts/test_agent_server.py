"""An agent that joins a running job is served by one part at a time, which gets all of its messages."""

import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import pytest

from lockstep.hosts.agent_server import AgentServer, JoiningAgent
from lockstep.hosts.gathering import AwaitedHost
from lockstep.hosts.host_listener import WITHOUT_KEY
from lockstep.hosts.keeper import ConnectedHost
from lockstep.hosts.newcomers import Newcomers
from lockstep.protocol.channel import Channel
from lockstep.protocol.greeting import ConnectionKind, Greeting
from lockstep.protocol.host import (
    SILENCE,
    BeginJob,
    HostFacts,
    HostOffer,
    KeepAlive,
    Prepare,
    RemoteInstruction,
    RemoteReport,
)
from lockstep.protocol.job_spec import JobHost, JobSpec
from lockstep.protocol.rendezvous import KeepWaiting, Rejected
from lockstep.system import disk_work
from lockstep.system.event_loop import EventLoop
from lockstep.transport.stream_channel import StreamChannel
from virtual_clock import VirtualClock

FACTS = HostFacts("n", "3.11.2", "x86_64", {}, 4, "", "10.0.0.1", 4000, 7)
PREPARE = Prepare(bytes(16), "", False, "train.py", False, (), "jax", "", {})

Agent = StreamChannel[RemoteReport, RemoteInstruction]


@dataclass
class Job:
    """A running job, which agents join; `at_once` is what an agent does before `consider` has returned."""

    spec: JobSpec
    at_once: Callable[[Agent], object] = lambda agent: None
    clock: VirtualClock = field(default_factory=VirtualClock)
    notes: list[str] = field(default_factory=list)
    admitted: list[ConnectedHost] = field(default_factory=list)

    def __post_init__(self) -> None:
        clock, self.loop = self.clock, EventLoop()
        self.newcomers = Newcomers(self.spec, PREPARE, FACTS, self.notes.append, self.loop, clock)
        self.newcomers.serve(self.admitted.append, lambda: False)
        self.server = AgentServer(
            WITHOUT_KEY, lambda agent, offer: "", self.notes.append, loop=self.loop, clock=clock
        )
        self.server.pass_on(lambda agent, offer: "", self._take)
        own, theirs = socket.socketpair()
        self.server.admit(Greeting(ConnectionKind.CONTROL), own, "10.0.0.2:50000")
        self.agent: Agent = Agent.over(theirs, RemoteInstruction, None, accepted=False)

    def _take(self, agent: JoiningAgent) -> None:
        self.newcomers.consider(AwaitedHost(agent.peer, agent.channel, lambda: "its agent has ended"), 1)
        self.at_once(self.agent)

    def close(self) -> None:
        self.newcomers.close()
        self.server.close()
        self.agent.close()
        for host in self.admitted:
            assert isinstance(host.agent, StreamChannel)
            host.agent.close()
        self.loop.close()


@pytest.fixture
def join(tmp_path: Any) -> Iterator[Callable[..., Job]]:
    """Return a job to which an agent has just connected; the arguments are those of `Job`."""
    jobs: list[Job] = []

    def begin(*arguments: Any) -> Job:
        spec = JobSpec(target="train.py", threads=1, run_dir=tmp_path, hosts=(JobHost("10.0.0.1", 1),))
        jobs.append(Job(spec, *arguments))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.close()


def received(agent: Channel[Any, Any], kind: type) -> Any:
    """Return the first message of this type that has arrived; None if there is none."""
    while (message := agent.receive()) is not None:
        if isinstance(message, kind):
            return message
    return None


def test_an_agent_answers_before_the_coordinator_has_turned_to_something_else(
    join: Callable[..., Job],
) -> None:
    def answer(agent: Agent) -> None:
        assert received(agent, Prepare) == PREPARE
        agent.send(FACTS)

    job = join(answer)
    job.agent.send(HostOffer(1))
    job.loop.turn(0.0)
    job.loop.turn(0.0)
    assert [host.name for host in job.admitted] == ["10.0.0.2"]
    assert received(job.agent, BeginJob).host == 1
    assert job.notes == []


def test_an_agent_ends_before_the_coordinator_has_turned_to_something_else(join: Callable[..., Job]) -> None:
    job = join(lambda agent: agent.close())
    job.agent.send(HostOffer(1))
    job.loop.turn(0.0)
    job.loop.turn(0.0)
    assert job.notes == ["the agent of 10.0.0.2 cannot join: its agent has ended"]
    assert job.newcomers.names == ["10.0.0.1"]


def test_an_agent_that_corrects_its_offer_joins_once(join: Callable[..., Job]) -> None:
    job = join()
    job.agent.send(HostOffer(1))
    job.agent.send(HostOffer(2))
    job.agent.send(FACTS)
    job.loop.turn(0.0)
    job.loop.turn(0.0)
    assert [host.name for host in job.admitted] == ["10.0.0.2"]


def test_a_rejected_agent_learns_whether_the_job_runs(join: Callable[..., Job]) -> None:
    """If it may try again, the agent exits with status 75, and whatever started it may try again."""
    job = join()

    def judge(agent: JoiningAgent, offer: HostOffer) -> str:
        return "the hosts of the job are complete"

    job.server.pass_on(judge, job._take)
    job.agent.send(HostOffer(1))
    job.loop.turn(0.0)
    assert received(job.agent, Rejected) == Rejected("the hosts of the job are complete", again=True)
    assert job.newcomers.names == ["10.0.0.1"]

    own, theirs = socket.socketpair()
    server = AgentServer(WITHOUT_KEY, judge, job.notes.append, loop=job.loop, clock=job.clock)
    server.admit(Greeting(ConnectionKind.CONTROL), own, "10.0.0.3:50000")
    early: Agent = Agent.over(theirs, RemoteInstruction, None, accepted=False)
    early.send(HostOffer(1))
    job.loop.turn(0.0)
    assert received(early, Rejected) == Rejected("the hosts of the job are complete", again=False)
    server.close()
    early.close()


@pytest.mark.parametrize("still", ["the agent", "the coordinator"])
def test_a_coordinator_that_stood_still_reads_before_it_judges(join: Callable[..., Job], still: str) -> None:
    """An agent that was silent while the coordinator looked has left, and may connect again."""
    job, accept = join(), lambda agent, offer: ""
    own, theirs = socket.socketpair()
    server = AgentServer(WITHOUT_KEY, accept, job.notes.append, loop=job.loop, clock=job.clock)
    with closing(server), closing(Agent.over(theirs, RemoteInstruction, None, accepted=False)) as agent:
        server.admit(Greeting(ConnectionKind.CONTROL), own, "10.0.0.3:50000")
        agent.send(HostOffer(1))
        job.loop.turn(0.0)
        if still == "the coordinator":
            agent.send(KeepAlive())
        job.clock.advance(SILENCE + 1.0)
        job.loop.turn(0.0)
        left = [] if still == "the coordinator" else ["the agent of 10.0.0.3 has left"]
        assert job.notes == left
        assert len(server.agents) == 1 - len(left)


def test_the_wait_for_an_agent_that_only_lives_is_named_and_ends(join: Callable[..., Job]) -> None:
    job = join()
    job.agent.send(HostOffer(1))
    job.loop.turn(0.0)
    waited = 0.0
    while job.newcomers.names == ["10.0.0.1", "10.0.0.2"]:
        job.clock.advance(60.0)
        waited += 60.0
        assert waited <= disk_work.PATIENCE + 120.0
        job.agent.send(KeepAlive())
        job.loop.turn(0.0)
        if waited == 60.0:
            named = "the agent of 10.0.0.2 to describe its host, 60 s"
            assert job.notes == [f"waiting for {named}"]
            assert received(job.agent, KeepWaiting) == KeepWaiting(named)
    assert job.notes[-1] == f"the agent of 10.0.0.2 cannot join: no answer within {waited:.0f} s"
    assert waited == disk_work.PATIENCE + 120.0
