"""What an agent reports of states: where one is that the chief has given, and what has not arrived."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.agent.agent import Agent
from lockstep.agent.host_load import LoadMeter
from lockstep.agent.worker_handle import WorkerHandle
from lockstep.collectives.shared.control_segment import ControlSegment
from lockstep.protocol.channel import Attachment
from lockstep.protocol.host import (
    HostReport,
    PositionMissed,
    SendPosition,
    SendState,
    StartView,
    StartWorker,
    StateArrived,
)
from lockstep.protocol.job_spec import JobSpec
from lockstep.protocol.worker import EventReport, HostMembers, Position, StateGiven, StateSource
from lockstep.system.event_loop import EventLoop
from lockstep.transport.local_channel import LocalChannel

SOURCE = StateSource(1, 1, 5, 2, "10.0.0.3", 4000)
"""Where the agent says that the first state is that the chief has given."""


class Host:
    """An agent with one worker, and its coordinator."""

    def __init__(self, loop: EventLoop, folder: Path) -> None:
        self._loop = loop
        self.coordinator, theirs = LocalChannel.pair()
        self.worker, channel = LocalChannel.pair()
        exited, self._exit = os.pipe()
        handle: Any = SimpleNamespace(pid=1, exited=exited, channel=channel, close=lambda: os.close(exited))
        nothing: Any = SimpleNamespace(
            start=lambda *_, **__: WorkerHandle(0, 0, handle, None, (), folder / "stack"),
            waits=lambda worker: False,
            prepare=lambda: None,
            reap=lambda owned: None,
            end=lambda grace: (),
            close=lambda: None,
        )
        pool = Attachment.missing()
        meter = LoadMeter()
        spec = JobSpec(target="a.py", run_dir=Path("a"))
        self.agent = Agent(
            *(spec, theirs, loop, nothing, ControlSegment.create, pool, nothing, nothing, meter),
            host=2,
            name="node3",
        )
        self.tell(StartView(1, (HostMembers(2, (0,), "node3", "10.0.0.3", 4000, 5),)), StartWorker(0))

    def close(self) -> None:
        self.agent.close()
        for channel in (self.coordinator, self.worker):
            channel.close()
        os.close(self._exit)

    def tell(self, *instructions: Any) -> list[HostReport]:
        """Let instructions arrive; return the reports on states that follow."""
        for instruction in instructions:
            self.coordinator.send(instruction)
        self._loop.turn(0.0)
        reports = list(iter(self.coordinator.receive, None))
        return [report for report in reports if not isinstance(report, EventReport)]

    def give(self, view: int, state: Attachment) -> list[HostReport]:
        """Let the worker give a state in a view; return what the agent reports."""
        self.worker.send(StateGiven(view, whole=True, state=state))
        self._loop.turn(0.0)
        return self.tell()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with EventLoop() as loop:
        made = Host(loop, tmp_path)
        yield made
        made.close()


def test_where_a_state_is_that_the_chief_has_given(host: Host) -> None:
    for number in (1, 2):
        (report,) = host.give(1, Attachment.holding(b"state"))
        assert report == StateGiven(1, True, source=StateSource(1, number, 5, 2, "10.0.0.3", 4000))


def test_a_state_of_another_view_is_released(host: Host) -> None:
    assert host.give(0, Attachment.holding(b"state")) == [StateGiven(0, True, "view 0 has ended")]


def test_a_state_that_did_not_arrive_is_a_failure(host: Host) -> None:
    failure = "the agent has too many open files to take the state"
    assert host.give(1, Attachment.missing()) == [StateGiven(1, True, failure)]


def test_a_state_that_is_held_here_reaches_joiners_at_once(host: Host) -> None:
    host.give(1, Attachment.holding(b"state"))
    assert host.tell(SendState(2, SOURCE)) == [StateArrived(2, 1)]
    assert host.tell(SendPosition(0, SOURCE)) == []
    messages = list(iter(host.worker.receive, None))
    assert isinstance(messages[-1], Position)
    assert messages[-1].state.content() == b"state"


def test_what_has_not_arrived_is_reported_with_the_host(host: Host) -> None:
    why = "view 1 has ended"
    assert host.tell(SendState(2, SOURCE)) == [StateArrived(2, 1, f"node3 has not received the state: {why}")]
    assert host.tell(SendPosition(0, SOURCE)) == [
        PositionMissed(0, 1, f"node3 has not received the position: {why}")
    ]
