"""Aimed scenarios of coordinators that are lost, with complete traces of what they and the agents hear.

A scenario file is its own golden trace: unindented lines say what happens, indented lines what arrives then.
Instruction n follows from the n-th report that a coordinator takes.
"""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_coordinator_session import Record, SimulatedAgent, SimulatedCoordinator, Wire

from lockstep.coordinator.host_agent import HostAgent
from lockstep.coordinator.job_record import HostRecord, newest
from lockstep.hosts.coordinator_process import continued
from lockstep.protocol.host import (
    AgentStanding,
    KeepAlive,
    KeepRecord,
    RepeatReports,
    StartWorker,
    TakeOver,
    WorkerArrived,
)

SCENARIOS = sorted((Path(__file__).parent / "takeovers").glob("*.txt"))
END = "everything arrives"


def shown(message: Any) -> str:
    """One line about a message."""
    match message:
        case KeepRecord(term, serial, record):
            taken = msgspec.msgpack.decode(record, type=Record).taken
            reports = ", ".join(f"{number} of agent {host}" for host, number in taken)
            return f"record {term}.{serial} with reports: {reports or 'none'}"
        case StartWorker(number):
            return f"instruction {number}"
        case WorkerArrived(number):
            return f"report {number}"
        case KeepAlive(received):
            return f"alive, has {received}"
        case TakeOver(term):
            return f"term {term} begins"
        case RepeatReports(after):
            return f"repeat reports after {after}"
        case AgentStanding(_, received, acknowledged, kept):
            newest_kept = f"record {kept.term}.{kept.serial}" if kept else "no record"
            return f"stands at {newest_kept}, instruction {received}; reports to {acknowledged} are forgotten"
    return type(message).__name__


class Conversation:
    """Agents and their coordinators, one after the other, and what was said."""

    def __init__(self, agents: int) -> None:
        self.trace: list[str] = []
        self.agents = [SimulatedAgent() for _ in range(agents)]
        ends = self.connect()
        self.coordinator = SimulatedCoordinator(1, [HostAgent(end, remote=True) for end in ends])

    def connect(self) -> list[Wire]:
        """Connect a coordinator with the agents, so that the trace shows what each end receives."""
        ends = []
        for number, agent in enumerate(self.agents):
            own, other = Wire.pair()
            self.note(own, f"coordinator <- agent {number}:")
            self.note(other, f"agent {number} <-")
            agent.session.attach(other)
            ends.append(own)
        return ends

    def note(self, end: Wire, who: str) -> None:
        receive = end.receive

        def noted() -> Any:
            message = receive()
            if isinstance(message, msgspec.Struct):
                self.trace.append(f"    {who} {shown(message)}")
            return message

        end.receive = noted  # type: ignore[method-assign]

    def happen(self, line: str) -> None:
        """Let what a line says happen."""
        self.trace.append(line)
        numbers = [int(number) for number in re.findall(r"\d+", line)]
        match re.sub(r"\d+", "N", line):
            case "agent N reports":
                self.agents[numbers[0]].session.send(WorkerArrived(self.numbered(numbers[0])))
            case "agent N listens":
                self.agents[numbers[0]].work()
            case "agent N says that it lives":
                self.agents[numbers[0]].session.keep_alive()
            case "the coordinator listens to agent N":
                self.listen(numbers[0])
            case "the coordinator sends the record and the instructions":
                self.coordinator.commit()
            case "the coordinator says that it lives":
                self.coordinator.acknowledge()
            case text if text.startswith("the coordinator is lost; "):
                for agent, delivered in zip(self.coordinator.agents, numbers[1::2], strict=True):
                    assert isinstance(agent.channel, Wire)
                    agent.channel.lost(delivered)
            case "another one takes over":
                self.take_over()
            case _:
                pytest.fail(f"nothing is known about: {line}")

    def listen(self, agent: int) -> None:
        """Let the coordinator take what has arrived from an agent."""
        channel = self.coordinator.agents[agent].channel
        assert isinstance(channel, Wire)
        while channel.arrived:
            self.coordinator.take_one(agent)

    def numbered(self, agent: int) -> int:
        self.agents[agent].reported += 1
        return self.agents[agent].reported

    def take_over(self) -> None:
        for agent in self.agents:
            # They notice that the connection ended, and carry out what has arrived.
            agent.work()
        term, ends = self.coordinator.term + 1, self.connect()
        standings = []
        for end, agent in zip(ends, self.agents, strict=True):
            end.send(TakeOver(term))
            agent.work()
            standing = end.receive()
            assert isinstance(standing, AgentStanding)
            standings.append(standing)
        kept = newest(standing.kept for standing in standings)
        known = msgspec.msgpack.decode(kept.record, type=Record) if kept else Record((), ())
        hosts = known.hosts or tuple(HostRecord("", None) for _ in ends)
        agents = [continued(*one, kept) for one in zip(hosts, ends, standings, strict=True)]
        self.coordinator = SimulatedCoordinator(term, agents, list(known.taken))

    def settle(self) -> None:
        """Let everything arrive that is under way; every report and every instruction has counted once."""
        self.trace.append(END)
        for _ in range(2):
            for number in range(len(self.agents)):
                self.listen(number)
            self.coordinator.commit()
            for agent in self.agents:
                agent.work()
        taken = self.coordinator.taken
        for number, agent in enumerate(self.agents):
            assert [report for host, report in taken if host == number] == list(range(1, agent.reported + 1))
            assert agent.taken == list(range(1, len(taken) + 1))
            agent.session.close()
        self.trace.append(f"each agent has carried out {len(taken)} instructions")


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_a_takeover(path: Path) -> None:
    first, *lines = path.read_text().splitlines()
    agents = next(line for line in lines if line.startswith("agents "))
    conversation = Conversation(int(agents.removeprefix("agents ")))
    happens = [line for line in lines if not line.startswith(" ") and line != agents]
    for line in happens[: happens.index(END)]:
        conversation.happen(line)
    conversation.settle()
    assert "\n".join((first, agents, *conversation.trace, "")) == path.read_text()
