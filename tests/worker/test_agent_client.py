"""What a worker learns of views while its script is busy elsewhere."""

import socket
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.errors import PeerLostError
from lockstep.observability.bus import PublishedEvent
from lockstep.observability.events import StrategyInstalled
from lockstep.protocol.channel import Attachment
from lockstep.protocol.worker import (
    AbortExchange,
    AgentMessage,
    EnterView,
    SharedMemoryEndpoint,
    StateGiven,
    WorkerMessage,
)
from lockstep.transport.local_channel import LocalChannel
from lockstep.transport.packet_channel import PacketChannel
from lockstep.worker import agent_client
from lockstep.worker.agent_client import AgentClient


@pytest.fixture
def ends() -> Iterator[tuple[LocalChannel[AgentMessage, WorkerMessage], AgentClient]]:
    agent, worker = LocalChannel[AgentMessage, WorkerMessage].pair()
    yield agent, AgentClient(worker, 0)
    agent.close()


def view(number: int, *workers: int) -> EnterView:
    return EnterView(number, (workers,), SharedMemoryEndpoint(Attachment(-1)))


def test_the_newest_view_is_known_before_it_is_received(
    ends: tuple[LocalChannel[AgentMessage, WorkerMessage], AgentClient],
) -> None:
    agent, client = ends
    assert client.newest_view() is None
    for number, workers in ((2, (0, 1, 2)), (3, (0, 1))):
        agent.send(view(number, *workers))
    for _ in range(2):
        newest = client.newest_view()
        assert newest is not None
        assert (newest.number, newest.hosts) == (3, ((0, 1),))
    agent.send(AbortExchange("the end"))
    assert [getattr(client.receive(0.0), "number", 0) for _ in range(2)] == [2, 3]
    assert client.receive(0.0) == AbortExchange("the end")


def test_the_end_of_the_agent_is_kept_once(
    ends: tuple[LocalChannel[AgentMessage, WorkerMessage], AgentClient],
) -> None:
    agent, client = ends
    agent.close()
    assert client.newest_view() is None
    assert client.newest_view() is None
    assert client.receive(0.0) == AbortExchange("the agent has ended")


def test_reports_on_which_supervision_depends_wait_for_a_slow_agent() -> None:
    """A joiner whose request is dropped would wait for ever, and so would members whose state is dropped."""
    patience: list[float] = []

    def send(message: WorkerMessage, seconds: float = 0.0) -> bool:
        patience.append(seconds)
        return True

    channel: Any = SimpleNamespace(send=send)
    client = AgentClient(channel, 0)
    client.started()
    client.request_to_join(whole=True)
    client.send_state(StateGiven(1, True, failure="no memory"))
    client.broken(1, "lost", fatal=True)
    client.failed(1, "E: x", "", blames=False, prints=True)
    client.report(PublishedEvent(0.0, 0, StrategyInstalled("jax")))
    client.finished()
    client.awaits_last_line()
    assert len(patience) == 8
    assert min(patience) > 59.0


def test_a_report_for_which_others_wait_is_not_dropped_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_client, "_PATIENCE", 0.05)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    agent = PacketChannel[AgentMessage, WorkerMessage](ours, WorkerMessage)
    worker = PacketChannel[WorkerMessage, AgentMessage](theirs, AgentMessage)
    client = AgentClient(worker, 0)
    state = StateGiven(1, True, failure="no memory")
    while worker.send(state):
        pass
    client.finished()
    for send in (partial(client.request_to_join, whole=True), partial(client.send_state, state)):
        with pytest.raises(PeerLostError, match=r"no report of this worker was read for 0\.05 s"):
            send()
    agent.close()
    client.send_state(state)
    assert client.receive(None) == AbortExchange("the agent has ended")
    worker.close()
