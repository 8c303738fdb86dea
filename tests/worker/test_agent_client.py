"""What a worker learns of views while its script is busy elsewhere."""

from collections.abc import Iterator

import pytest

from lockstep.protocol.channel import Attachment
from lockstep.protocol.worker import (
    AbortExchange,
    AgentMessage,
    EnterView,
    SharedMemoryEndpoint,
    WorkerMessage,
)
from lockstep.transport.local_channel import LocalChannel
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
