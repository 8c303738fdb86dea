"""The sessions of agents with coordinators that are lost: every report and every instruction counts once."""

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from lockstep.coordinator.host_agent import HostAgent
from lockstep.coordinator.job_record import HostRecord, newest
from lockstep.hosts.coordinator_process import continued
from lockstep.hosts.coordinator_session import CoordinatorSession
from lockstep.protocol.channel import PeerGone
from lockstep.protocol.host import (
    AgentStanding,
    AllReported,
    HostEnded,
    KeepAlive,
    KeepRecord,
    OutputWritten,
    RepeatReports,
    StartView,
    StartWorker,
    TakeOver,
    WorkerArrived,
    WorkerEvidence,
)
from lockstep.transport.local_channel import LocalChannel
from virtual_clock import VirtualClock


@dataclass
class Wire:
    """One end of a connection; `lost` cuts it, and the other end gets a part of what was sent.

    Its descriptor is that of a real channel, which is always quiet: the tests call `receive` themselves.
    """

    arrived: deque[Any] = field(default_factory=deque)
    other: "Wire | None" = None
    quiet: LocalChannel[Any, Any] = field(default_factory=LocalChannel)

    @classmethod
    def pair(cls) -> "tuple[Wire, Wire]":
        one, other = cls(), cls()
        one.other, other.other = other, one
        return one, other

    def send(self, message: Any, patience: float = 0.0) -> bool:
        if self.other is None:
            return False
        self.other.arrived.append(message)
        return True

    def receive(self) -> Any:
        if self.arrived:
            return self.arrived.popleft()
        return PeerGone() if self.other is None else None

    def fileno(self) -> int:
        return self.quiet.fileno()

    def close(self) -> None:
        if self.other is not None:
            self.other.other = None
            self.other = None
        self.quiet.close()

    def lost(self, delivered: int) -> None:
        """End the process at this end; the other one gets only so many of the messages under way."""
        if self.other is not None:
            while len(self.other.arrived) > delivered:
                self.other.arrived.pop()
        self.close()


class Record(msgspec.Struct, frozen=True):
    """A job whose state is the reports that it has taken."""

    taken: tuple[tuple[int, int], ...]
    hosts: tuple[HostRecord, ...]


@dataclass
class SimulatedAgent:
    """An agent that reports numbers, and notes the instructions that it gets."""

    session: CoordinatorSession = field(default_factory=CoordinatorSession)
    reported: int = 0
    taken: list[int] = field(default_factory=list)

    def report(self) -> None:
        self.session.send(OutputWritten(0, 1, b"x"))
        self.reported += 1
        assert self.session.send(WorkerArrived(self.reported))

    def work(self) -> None:
        while (instruction := self.session.receive()) is not None:
            if isinstance(instruction, StartWorker):
                self.taken.append(instruction.worker)


@dataclass
class SimulatedCoordinator:
    """Takes reports, and tells all agents of each: instruction n follows from the n-th report of all."""

    term: int
    agents: list[HostAgent]
    taken: list[tuple[int, int]] = field(default_factory=list)
    serial: int = 0
    changed: bool = False

    def take_one(self, host: int) -> None:
        report = self.agents[host].receive()
        if isinstance(report, WorkerArrived):
            self.changed = True
            self.taken.append((host, report.host))
            for agent in self.agents:
                agent.send(StartWorker(len(self.taken)))

    def commit(self) -> None:
        self.serial += 1
        self.changed = False
        hosts = tuple(
            HostRecord("", None, False, one.received, one.sent, tuple(one.outbox)) for one in self.agents
        )
        record = msgspec.msgpack.encode(Record(tuple(self.taken), hosts))
        for agent in self.agents:
            agent.send(KeepRecord(self.term, self.serial, record))
        for agent in self.agents:
            agent.flush()

    def acknowledge(self) -> None:
        """Acknowledge reports; output alone changes nothing that a record contains."""
        if self.changed:
            self.commit()
        for agent in self.agents:
            agent.acknowledge(0.0)


@dataclass
class SimulatedHosts:
    """Some agents, and one coordinator after the other."""

    dice: random.Random

    def __post_init__(self) -> None:
        self.agents = [SimulatedAgent() for _ in range(self.dice.randint(1, 4))]
        self.coordinator = SimulatedCoordinator(1, [HostAgent(end, remote=True) for end in self.connect()])
        self.coordinator.commit()

    def connect(self) -> list[Wire]:
        ends = []
        for agent in self.agents:
            own, other = Wire.pair()
            agent.session.attach(other)
            ends.append(own)
        return ends

    def replace(self) -> None:
        """Lose the coordinator at any point, and let another one take over."""
        before = self.coordinator
        for agent in before.agents:
            channel = agent.channel
            assert isinstance(channel, Wire)
            under_way = len(channel.other.arrived) if channel.other else 0
            channel.lost(self.dice.randint(0, under_way))
        for agent in self.agents:
            if self.dice.random() < 0.5:
                agent.work()
            if self.dice.random() < 0.5:
                agent.report()
        term, ends = before.term + 1, self.connect()
        for end in ends:
            end.send(TakeOver(term))
        for agent in self.agents:
            agent.report()
            agent.work()
            agent.report()
        standings = [self.standing(end, term) for end in ends]
        kept = newest(standing.kept for standing in standings)
        known = msgspec.msgpack.decode(kept.record, type=Record) if kept else Record((), ())
        hosts = known.hosts or tuple(HostRecord("", None) for _ in ends)
        agents = [continued(*one, kept) for one in zip(hosts, ends, standings, strict=True)]
        self.coordinator = SimulatedCoordinator(term, agents, list(known.taken))

    def standing(self, end: Wire, term: int) -> AgentStanding:
        while not isinstance(report := end.receive(), AgentStanding):
            assert report is not None
        assert report.term == term
        return report

    def play(self, events: int) -> None:
        for _ in range(events):
            host = self.dice.randrange(len(self.agents))
            match self.dice.choices(range(6), (4, 4, 4, 3, 2, 0.5))[0]:
                case 0:
                    self.agents[host].report()
                case 1:
                    self.agents[host].work()
                case 2:
                    self.coordinator.take_one(host)
                case 3:
                    self.coordinator.commit()
                case 4:
                    self.agents[host].session.keep_alive()
                    self.coordinator.acknowledge()
                case 5:
                    self.replace()
        for _ in range(10_000):
            for host in range(len(self.agents)):
                for _ in range(2):
                    self.coordinator.take_one(host)
            self.coordinator.commit()
            for agent in self.agents:
                agent.work()
            if all(not self.arrives(host) for host in range(len(self.agents))):
                break
        else:
            pytest.fail("messages without end")

    def arrives(self, host: int) -> int:
        channel = self.coordinator.agents[host].channel
        assert isinstance(channel, Wire)
        return len(channel.arrived)


@pytest.mark.parametrize("seed", range(8))
def test_every_message_counts_once(seed: int) -> None:
    for game in range(150):
        hosts = SimulatedHosts(random.Random(f"{seed}/{game}"))
        hosts.play(120)
        taken = hosts.coordinator.taken
        for host, agent in enumerate(hosts.agents):
            assert [number for at, number in taken if at == host] == list(range(1, agent.reported + 1))
            assert agent.taken == list(range(1, len(taken) + 1))
            agent.session.close()
            hosts.coordinator.agents[host].channel.close()


def test_a_report_that_is_too_large_takes_no_number() -> None:
    session, (own, other) = CoordinatorSession(), LocalChannel.pair()
    evidence = WorkerEvidence(0, True, ("x" * 2000,) * 400, ())
    assert not session.send(HostEnded((), (evidence,)))
    assert session.send(WorkerArrived(0))
    session.attach(other)
    own.send(TakeOver(2))
    assert session.receive() is None
    assert own.receive() == AgentStanding(2, 0, 0)
    own.send(RepeatReports(0))
    assert session.receive() is None
    assert own.receive() == WorkerArrived(0)
    assert own.receive() is None
    session.close()


def test_output_is_kept_until_it_is_acknowledged() -> None:
    session, (own, other) = CoordinatorSession(), LocalChannel.pair()
    session.attach(other)
    session.send(OutputWritten(0, 1, b"abc"))
    session.send(OutputWritten(0, 1, b"de"))
    assert session.output == 5
    own.send(KeepAlive(1))
    assert session.receive() == KeepAlive(1)
    assert session.output == 2
    session.close()


def test_an_answer_names_what_it_answers() -> None:
    """When the agent sent what the coordinator has heard last; one that takes over has heard nothing yet."""
    clock = VirtualClock(100.0)
    session = CoordinatorSession(clock)
    for first in (100.0, 160.0):
        own, other = Wire.pair()
        session.attach(other)
        agent = HostAgent(own, remote=True)
        session.keep_alive()
        agent.acknowledge(0.0)
        assert session.receive() == KeepAlive()
        clock.advance(30.0)
        session.keep_alive()
        for sent in (first, first + 30.0):
            agent.receive()
            agent.acknowledge(0.0)
            assert session.receive() == KeepAlive(0, sent)
        clock.advance(30.0)
    session.close()


def test_a_coordinator_that_only_repeats_does_not_lead() -> None:
    """It may hear from the store that another one leads the job. A record or a view of its own term tells."""
    for first in (KeepRecord(3, 1, b""), StartView(2, (), term=3)):
        session, (own, other) = CoordinatorSession(), LocalChannel.pair()
        session.attach(other)
        for message in (TakeOver(3), KeepRecord(2, 9, b""), StartView(1, (), term=2)):
            own.send(message)
        while session.receive() is not None:
            pass
        assert not session.leads
        own.send(first)
        session.receive()
        assert session.leads
        own.send(TakeOver(4))
        session.receive()
        assert not session.leads
        session.close()


def test_unnumbered_reports_are_not_repeated() -> None:
    session, (own, other) = CoordinatorSession(), LocalChannel.pair()
    assert not session.send(AllReported())
    session.attach(other)
    own.send(TakeOver(5))
    own.send(RepeatReports(0))
    assert session.receive() is None
    assert [own.receive() for _ in range(2)] == [AgentStanding(5, 0, 0), None]
    session.close()


def test_a_session_that_gives_up_says_that_the_peer_is_gone() -> None:
    session, (own, other) = CoordinatorSession(), LocalChannel.pair()
    session.attach(other)
    own.close()
    assert session.receive() is None
    assert session.lost == "the connection to the coordinator ended"
    session.give_up()
    assert session.receive() == PeerGone()
    session.close()
