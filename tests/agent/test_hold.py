"""What the exchange of a view has when its members enter: until when calls may end, and the first notice."""

import math
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from lockstep.agent.agent import Agent
from lockstep.agent.host_load import LoadMeter
from lockstep.collectives.shared.control_segment import ControlSegment
from lockstep.protocol.channel import Attachment
from lockstep.protocol.host import KeepAlive, StartView
from lockstep.protocol.job_spec import JobSpec
from lockstep.protocol.worker import HostMembers, Notice
from lockstep.system.event_loop import EventLoop
from lockstep.transport.local_channel import LocalChannel


class NotedExchange(ControlSegment):
    """An exchange that notes until when its calls may end."""

    permitted: list[float]

    def permit(self, until: float) -> None:
        assert not self.control.closed
        self.permitted = [*getattr(self, "permitted", ()), until]


class Host:
    """An agent without workers, and its coordinator."""

    def __init__(self, loop: EventLoop, hold: float | None) -> None:
        self._loop = loop
        self._coordinator, theirs = LocalChannel.pair()
        self.exchanges: list[NotedExchange] = []
        nothing: Any = SimpleNamespace(
            prepare=lambda: None, reap=lambda owned: None, end=lambda grace: (), close=lambda: None
        )
        self.agent = Agent(
            JobSpec(target="a.py", run_dir=Path("a"), hold=hold),
            theirs,
            loop,
            nothing,
            self._open,
            Attachment.missing(),
            nothing,
            nothing,
            LoadMeter(),
        )

    def _open(self, members: int) -> NotedExchange:
        self.exchanges.append(NotedExchange.create(members))
        return self.exchanges[-1]

    def hear(self, *messages: Any) -> None:
        """Let messages of the coordinator arrive."""
        for message in messages:
            self._coordinator.send(message)
        self._loop.turn(0.0)

    @property
    def permitted(self) -> list[list[float]]:
        # The first is that of a new exchange.
        return [exchange.permitted[1:] for exchange in self.exchanges]


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    with EventLoop() as made:
        yield made


def view(number: int) -> StartView:
    return StartView(number, (HostMembers(0, (0, 1), "node1", "10.0.0.1", 4000, 5),))


def test_before_the_first_view_no_worker_is_lost(loop: EventLoop) -> None:
    host = Host(loop, None)
    with closing(host.agent):
        assert not host.agent.lacks_workers
        host.hear(view(1))
        assert not host.agent.lacks_workers


def test_the_time_counts_from_what_the_coordinator_has_answered(loop: EventLoop) -> None:
    """Not from the answer: neither a view that begins nor one that comes late makes it longer."""
    host = Host(loop, 6.0)
    with closing(host.agent):
        host.hear(view(1), KeepAlive())
        assert host.permitted == [[0.0]]
        assert not host.agent.pauses(1e9)
        host.hear(KeepAlive(0, 100.0))
        host.hear(KeepAlive(0, 103.0), KeepAlive(0, 101.0))
        assert host.permitted == [[0.0, 106.0, 109.0, 109.0]]
        host.hear(view(2))
        assert host.permitted[1:] == [[109.0]]
        host.hear(KeepAlive(0, 104.0))
        assert host.permitted[1:] == [[109.0, 110.0]]
        assert not host.agent.pauses(110.0)
        assert host.agent.pauses(110.5)


def test_a_host_without_members_counts_too(loop: EventLoop) -> None:
    """Its workers may join with a later view."""
    host = Host(loop, 6.0)
    with closing(host.agent):
        host.hear(KeepAlive(0, 50.0), view(1))
        assert host.permitted == [[56.0]]


def test_members_that_enter_a_view_find_its_notice(loop: EventLoop) -> None:
    """Even if the next instruction of the coordinator comes late: a short training would end before it."""
    host, posted = Host(loop, None), list[int]()
    channel = SimpleNamespace(send=lambda message: posted.append(host.exchanges[-1].posted))
    member: Any = SimpleNamespace(channel=channel, exited=True, streams=(), close=lambda: None)
    with closing(host.agent):
        host.agent._workers[0] = member
        for notice in (Notice.NOTHING, Notice.CHANGE, Notice.POSITION):
            host.hear(structs.replace(view(len(posted) + 1), notice=notice))
    assert posted == [Notice.NOTHING, Notice.CHANGE, Notice.POSITION]


def test_without_a_hold_calls_always_end(loop: EventLoop) -> None:
    host = Host(loop, None)
    with closing(host.agent):
        host.hear(view(1), KeepAlive(0, 100.0))
        assert host.permitted == [[math.inf]]
        assert not host.agent.pauses(1e9)
