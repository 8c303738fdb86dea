"""The parts of a step, on a clock that the test moves."""

from collections.abc import Callable

import pytest

from lockstep.observability.bus import Bus, Feed
from lockstep.observability.measurements import RestEnded, StepEnded
from lockstep.observability.step_timer import StepTimer
from virtual_clock import VirtualClock


class Peers(VirtualClock):
    """A clock that also counts the time spent waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def waited(self) -> float:
        return self.seconds

    def wait(self, seconds: float) -> None:
        self.seconds += seconds
        self.advance(seconds)


Timed = tuple[Peers, Feed, StepTimer]


@pytest.fixture
def timed() -> Timed:
    peers = Peers()
    bus = Bus(peers, worker=0)
    return peers, bus.feed(StepEnded), StepTimer(bus, peers.waited, peers.now)


def step(clock: Peers, timer: StepTimer, call: str, number: int) -> None:
    """Take a step whose parts last 1, 2, 4, 8, 16 and 32 seconds."""
    timer.begin(call)
    timer.lap("wait")
    clock.advance(2)
    read: Callable[[], object] = timer.charging("input", lambda: clock.advance(1))
    read()
    timer.lap("compute")
    clock.wait(4)
    clock.advance(8)
    timer.lap("exchange")
    clock.advance(16)
    timer.lap("update")
    clock.advance(32)
    timer.end(number, {"loss": 0.5}, trained=10 * number, examples=64, replicas=2)


def ended(
    call: str, number: int, seconds: float, input_: float = 1, wait: float = 4, other: float = 32
) -> StepEnded:
    return StepEnded(
        call=call,
        number=number,
        trained=10 * number,
        examples=64,
        replicas=2,
        seconds=seconds,
        input=input_,
        compute=2,
        wait=wait,
        exchange=8,
        update=16,
        other=other,
        logs={"loss": 0.5},
    )


def test_the_parts_of_a_step_sum_up_to_the_time_since_the_last_step(timed: Timed) -> None:
    clock, feed, timer = timed
    step(clock, timer, "fit 1", 1)
    clock.advance(64)
    timer.lap("other")
    clock.advance(128)
    clock.wait(256)
    step(clock, timer, "fit 1", 2)
    events, lost = feed.take(0)
    assert [event.event for event in events] == [
        ended("fit 1", 1, 63),
        ended("fit 1", 2, 63 + 64 + 128 + 256, input_=1 + 128, wait=4 + 256, other=32 + 64),
    ]
    assert lost == 0


@pytest.mark.parametrize("between", ["another call", "no step"])
def test_the_first_step_of_a_call_begins_with_its_batch(timed: Timed, between: str) -> None:
    clock, feed, timer = timed
    step(clock, timer, "fit 1", 1)
    clock.advance(100)
    if between == "no step":
        timer.stop()
        timer.lap("wait")
    else:
        step(clock, timer, "validation 1 within fit 1", 1)
    clock.advance(1000)
    timer.lap("other")
    step(clock, timer, "fit 1", 2)
    events, _ = feed.take(0)
    assert events[-1].event == ended("fit 1", 2, 63)


def test_a_step_that_is_repeated_in_a_new_view_has_waited_for_it(timed: Timed) -> None:
    clock, feed, timer = timed
    timer.begin("fit 1")
    timer.lap("wait")
    clock.wait(3)
    clock.advance(2)
    timer.lap("compute")
    clock.advance(500)
    timer.lap("wait")
    clock.advance(4)
    timer.lap("compute")
    clock.wait(7)
    clock.advance(1)
    timer.lap("exchange")
    timer.end(1, None)
    ((_, _, event),) = feed.take(0)[0]
    assert isinstance(event, StepEnded)
    assert (event.compute, event.wait, event.exchange, event.seconds) == (6, 510, 1, 517)


def test_a_pause_is_that_of_the_step_and_the_call_in_which_training_paused(timed: Timed) -> None:
    clock, feed, timer = timed
    timer.begin("fit 1")
    timer.note_pause(2)
    timer.note_pause(1)
    with timer.within("evaluate"):
        timer.begin("validation 1 within fit 1")
        timer.note_pause(8)
        timer.end(1, None)
    timer.note_pause(4)
    timer.end(1, None)
    step(clock, timer, "fit 1", 2)
    timer.stop()
    timer.note_pause(16)
    step(clock, timer, "fit 2", 1)
    events, _ = feed.take(0)
    assert [event.event.paused for event in events] == [8, 7, 0, 0]


def test_without_a_subscriber_no_clock_is_read() -> None:
    def forbidden() -> float:
        raise AssertionError

    bus = Bus(VirtualClock())
    timer = StepTimer(bus, forbidden, forbidden)
    step(Peers(), timer, "fit 1", 1)
    assert not timer.running
    read: Callable[[], object] = object
    assert timer.charging("input", read) is read


def test_subscribers_may_change_between_steps() -> None:
    clock = Peers()
    bus = Bus(clock)
    timer = StepTimer(bus, clock.waited, clock.now)
    step(clock, timer, "fit 1", 1)
    feed = bus.feed(StepEnded)
    step(clock, timer, "fit 1", 2)
    feed.close()
    step(clock, timer, "fit 1", 3)
    again = bus.feed(StepEnded)
    step(clock, timer, "fit 1", 4)
    assert [event.event for event in feed.take(0)[0]] == [ended("fit 1", 2, 63)]
    assert [event.event for event in again.take(0)[0]] == [ended("fit 1", 4, 63)]


def test_a_call_within_a_call_counts_for_the_next_step_of_the_outer_one(timed: Timed) -> None:
    clock, feed, timer = timed
    with timer.within("fit"):
        step(clock, timer, "fit 1", 1)
        clock.advance(64)
        with timer.within("validation"):
            clock.advance(1000)
            step(clock, timer, "validation 1 within fit 1", 1)
            clock.wait(500)
        clock.advance(128)
        with timer.within("predict"):
            timer.stop()
            clock.advance(2000)
        step(clock, timer, "fit 1", 2)
    steps = [event.event for event in feed.take(0)[0]]
    assert steps[1] == ended("validation 1 within fit 1", 1, 63)
    second = steps[2]
    assert isinstance(second, StepEnded)
    assert (second.nested, second.calls) == (1563 + 2000, {"validation": 1563, "predict": 2000})
    assert (second.wait, second.other, second.seconds) == (4, 32 + 64 + 128, 63 + 64 + 128 + 3563)


def test_the_time_after_the_last_step_is_the_rest_of_the_call(timed: Timed) -> None:
    clock, feed, timer = timed
    rests = timer._events.feed(RestEnded)
    with timer.within("fit"):
        step(clock, timer, "fit 1", 1)
        clock.advance(3)
        with timer.within("validation"):
            clock.advance(5)
        clock.wait(7)
        timer.note_pause(6)
        timer.end_call()
        clock.advance(100)
    # No call is in progress: nothing follows.
    timer.end_call()
    assert [event.event for event in rests.take(0)[0]] == [
        RestEnded(
            call="fit 1",
            paused=6,
            input=0,
            compute=0,
            wait=7,
            exchange=0,
            update=0,
            other=3,
            nested=5,
            calls={"validation": 5},
        )
    ]
    assert len(feed.take(0)[0]) == 1
