"""The place of an agent on its host, which a later agent takes."""

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


def test_a_job_that_leads_takes_the_places_of_others_with_its_store(loop: EventLoop) -> None:
    old, other, none, leads = (
        AgentPlace(b"old", loop, "s3://bucket/job"),
        AgentPlace(b"other", loop, "s3://bucket/another"),
        AgentPlace(b"none", loop),
        AgentPlace(b"new", loop, "s3://bucket/job"),
    )
    loop.turn(0.0)
    assert not old.is_wanted
    leads.replace_other_jobs()
    none.replace_other_jobs()
    loop.turn(0.0)
    assert [place.is_wanted for place in (old, other, none, leads)] == [True, False, False, False]
    for place in (old, other, none, leads):
        place.close()
