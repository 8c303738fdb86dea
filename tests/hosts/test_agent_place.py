"""The place of an agent on its host, which a later agent of the same job takes."""

from collections.abc import Iterator

import pytest

from lockstep.hosts.agent_place import AgentPlace
from lockstep.system.event_loop import EventLoop


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    with EventLoop() as made:
        yield made


def test_a_later_agent_takes_the_place(loop: EventLoop) -> None:
    first, second = AgentPlace(b"job", loop), AgentPlace(b"job", loop)
    loop.turn(0.0)
    assert first.is_wanted
    assert not second.is_wanted
    first.close()
    second.close()


def test_an_agent_of_another_job_does_not(loop: EventLoop) -> None:
    first, other = AgentPlace(b"job", loop), AgentPlace(b"another", loop)
    loop.turn(0.0)
    assert not first.is_wanted
    first.close()
    other.close()
