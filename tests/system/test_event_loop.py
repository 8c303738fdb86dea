"""One loop serves all parts of a process."""

import fcntl
import os
import resource
from collections.abc import Iterator
from typing import Any

import pytest

from lockstep.system.event_loop import EventLoop, wait_for

Pipe = tuple[int, int]


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    with EventLoop() as made:
        yield made


@pytest.fixture
def pipes() -> Iterator[tuple[Pipe, Pipe]]:
    made = os.pipe(), os.pipe()
    yield made
    for pipe in made:
        for descriptor in pipe:
            os.close(descriptor)


def test_readable_descriptors_are_served_until_they_are_unwatched(
    loop: EventLoop, pipes: tuple[Pipe, Pipe]
) -> None:
    (reading, writing), _ = pipes
    seen: list[bytes] = []
    for _ in range(2):
        loop.watch(reading, lambda: seen.append(os.read(reading, 1)))
    os.write(writing, b"abc")
    loop.turn(None)
    loop.turn(None)
    for _ in range(2):
        loop.unwatch(reading)
    loop.turn(0)
    assert seen == [b"a", b"b"]


def test_writable_descriptors_are_served(loop: EventLoop, pipes: tuple[Pipe, Pipe]) -> None:
    (_, writing), _ = pipes
    seen: list[str] = []
    loop.watch(writing, lambda: seen.append("now"), writes=True)
    loop.turn(None)
    assert seen == ["now"]


def test_a_descriptor_that_is_unwatched_in_the_same_turn_is_not_served(
    loop: EventLoop, pipes: tuple[Pipe, Pipe]
) -> None:
    seen: list[int] = []

    def serve(own: int, other: int) -> None:
        seen.append(own)
        loop.unwatch(other)

    ends = [reading for reading, _ in pipes]
    for own, other in (ends, reversed(ends)):
        loop.watch(own, lambda own=own, other=other: serve(own, other))  # type: ignore[misc]
    for _, writing in pipes:
        os.write(writing, b"x")
    loop.turn(None)
    assert len(seen) == 1


def test_actions_before_each_wait_limit_it(loop: EventLoop) -> None:
    seen: list[float | None] = []
    limits: list[float | None] = [None, 7.0, 3.0]
    for limit in limits:
        loop.before_each_wait(lambda limit=limit: limit)  # type: ignore[misc]

    def select(seconds: float | None) -> list[Any]:
        seen.append(seconds)
        return []

    loop._selector.select = select  # type: ignore[method-assign]
    loop.turn(None)
    loop.turn(5.0)
    loop.turn(1.0)
    loop.before_each_wait(lambda: -1.0)
    loop.turn(5.0)
    assert seen == [3.0, 3.0, 1.0, 0.0]


def test_an_action_before_each_wait_may_watch_descriptors(loop: EventLoop, pipes: tuple[Pipe, Pipe]) -> None:
    (reading, writing), _ = pipes
    seen: list[bytes] = []
    loop.before_each_wait(lambda: loop.watch(reading, lambda: seen.append(os.read(reading, 9))))
    os.write(writing, b"x")
    loop.turn(None)
    assert seen == [b"x"]


def test_a_wait_returns_the_descriptors_that_are_ready(pipes: tuple[Pipe, Pipe]) -> None:
    (first, to_first), (second, to_second) = pipes
    assert wait_for([first, second], 0.0) == set()
    assert wait_for([first, second], writable=[to_second]) == {to_second}
    os.write(to_first, b"a")
    assert wait_for([first, second]) == {first}
    os.write(to_second, b"b")
    assert wait_for([first, second], 60.0, writable=[to_first]) == {first, second, to_first}


def test_a_descriptor_whose_peer_has_closed_it_is_ready() -> None:
    reading, writing = os.pipe()
    os.close(writing)
    try:
        assert wait_for([reading]) == {reading}
    finally:
        os.close(reading)


def test_a_wait_takes_the_descriptors_of_a_program_with_many_open_files(pipes: tuple[Pipe, Pipe]) -> None:
    (reading, writing), _ = pipes
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip("the limit on open files is too low")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    high = fcntl.fcntl(reading, fcntl.F_DUPFD, 2048)
    try:
        assert wait_for([high], 0.0) == set()
        os.write(writing, b"a")
        assert wait_for([high]) == {high}
    finally:
        os.close(high)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
