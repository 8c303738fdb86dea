"""A member that waits for the permission to end a call: what ends its wait."""

import threading
from collections.abc import Callable

import pytest

from lockstep.collectives.call import CollectiveCall
from lockstep.collectives.contract import WaitPolicy
from lockstep.collectives.shared.barrier import Barrier
from lockstep.collectives.shared.control_segment import ControlSegment
from lockstep.errors import PeerLostError, PeerStuckError
from virtual_clock import VirtualClock

CALL = CollectiveCall("reduce", "step 3")


class Waiting:
    """A member for which something happens each time when it blocks."""

    def __init__(self, *happens: Callable[["Waiting"], object]) -> None:
        self.clock, self.segment = VirtualClock(100.0), ControlSegment.create(1)
        self.barrier = Barrier(self.segment, 0, [7], WaitPolicy(timeout=60.0), None, self.clock)
        self.happens = list(happens)
        self.segment.wait_for_permit = lambda _: self.happens.pop(0)(self)  # type: ignore[method-assign]

    def wait(self) -> None:
        self.barrier.await_permission(CALL)


def test_without_a_limit_calls_end_at_any_time() -> None:
    member = Waiting()
    member.clock.advance(1e9)
    member.wait()


def test_calls_end_until_the_time_is_over() -> None:
    member = Waiting(lambda it: it.clock.advance(5.0), lambda it: it.segment.permit(105.5))
    member.segment.permit(100.0)
    member.wait()
    assert len(member.happens) == 2
    member.clock.advance(0.5)
    member.wait()
    assert member.happens == []
    assert member.barrier.waited == 5.0


def test_the_end_of_the_view_ends_the_wait() -> None:
    member = Waiting(lambda it: it.segment.abort("worker 2 was lost"))
    member.segment.permit(99.0)
    with pytest.raises(PeerLostError, match="worker 2 was lost"):
        member.wait()


def test_a_wait_without_end_is_given_up() -> None:
    member = Waiting(*[lambda it: it.clock.advance(25.0)] * 3)
    member.segment.permit(0.0)
    with pytest.raises(PeerStuckError, match=r"not let reduce for step 3 end for 75\.0 s: it is stopped, or"):
        member.wait()


@pytest.mark.parametrize("wake", [lambda it: it.permit(1.0), lambda it: it.abort("over")])
def test_a_permission_and_the_end_of_the_view_wake_members(wake: Callable[[ControlSegment], None]) -> None:
    segment, attached = ControlSegment.create(1), threading.Event()

    def block() -> None:
        attached.set()
        segment.wait_for_permit(60.0)

    member = threading.Thread(target=block)
    member.start()
    assert attached.wait(60.0)
    while member.is_alive():
        wake(segment)
    segment.close()
