"""Publishing: order, isolation, and queues that lose the oldest."""

import threading
from collections.abc import Callable

import pytest

from lockstep.observability.bus import Bus, PublishedEvent
from lockstep.observability.events import CallStarted, DistributionBegan, Event, FirstStepEnded
from virtual_clock import VirtualClock

PATIENCE = 120.0


def names(events: list[PublishedEvent]) -> list[str]:
    return [event.event.name for event in events if isinstance(event.event, CallStarted)]


def test_subscribers_are_called_in_order_with_time_and_worker() -> None:
    clock, received = VirtualClock(5.0), list[tuple[str, PublishedEvent]]()
    bus = Bus(clock, worker=3)
    for name in ("first", "second"):
        bus.subscribe(lambda event, name=name: received.append((name, event)), CallStarted, FirstStepEnded)
    bus.publish(CallStarted("fit 1"))
    clock.advance(1.5)
    bus.publish(DistributionBegan())
    bus.publish(FirstStepEnded(), worker=7)
    assert received == [
        ("first", PublishedEvent(5.0, 3, CallStarted("fit 1"))),
        ("second", PublishedEvent(5.0, 3, CallStarted("fit 1"))),
        ("first", PublishedEvent(6.5, 7, FirstStepEnded())),
        ("second", PublishedEvent(6.5, 7, FirstStepEnded())),
    ]


def test_a_bus_knows_which_events_have_subscribers() -> None:
    bus = Bus(VirtualClock())
    assert not bus.has_subscribers(CallStarted)
    ends = [bus.subscribe(lambda event: None, CallStarted) for _ in range(2)]
    assert bus.has_subscribers(CallStarted)
    assert not bus.has_subscribers(FirstStepEnded)
    ends[0]()
    assert bus.has_subscribers(CallStarted)
    ends[1]()
    assert not bus.has_subscribers(CallStarted)


def test_a_subscriber_that_raises_is_removed_and_others_continue() -> None:
    complaints, received = list[str](), list[Event]()
    bus = Bus(VirtualClock(), complain=complaints.append)

    def fails(event: PublishedEvent) -> None:
        raise RuntimeError("no")

    bus.subscribe(fails, CallStarted, FirstStepEnded)
    bus.subscribe(lambda event: received.append(event.event), CallStarted, FirstStepEnded)
    for event in (CallStarted("a"), CallStarted("b"), FirstStepEnded()):
        bus.publish(event)
    assert received == [CallStarted("a"), CallStarted("b"), FirstStepEnded()]
    assert complaints == ["a subscriber of events failed and is removed: RuntimeError('no')"]


def test_a_subscriber_may_publish_and_subscribe() -> None:
    bus, received = Bus(VirtualClock()), list[Event]()

    def follow(event: PublishedEvent) -> None:
        bus.subscribe(lambda event: received.append(event.event), FirstStepEnded)
        bus.publish(FirstStepEnded())

    bus.subscribe(follow, CallStarted)
    bus.publish(CallStarted("a"))
    assert received == [FirstStepEnded()]


def test_a_full_feed_drops_the_oldest_events_and_counts_them() -> None:
    bus = Bus(VirtualClock())
    feed = bus.feed(CallStarted, size=3)
    for name in "abcde":
        bus.publish(CallStarted(name))
    events, lost = feed.take(0)
    assert (names(events), lost) == (["c", "d", "e"], 2)
    bus.publish(CallStarted("f"))
    events, lost = feed.take(0)
    assert (names(events), lost) == (["f"], 0)
    assert feed.take(0) == ([], 0)


def test_an_event_and_the_end_wake_a_reader_of_a_feed() -> None:
    bus, taken, called = Bus(VirtualClock()), list[tuple[list[str], int]](), threading.Semaphore(0)
    feed = bus.feed(CallStarted)

    def read() -> None:
        while events := feed.take(PATIENCE)[0]:
            taken.append((names(events), 0))
            called.release()

    reader = threading.Thread(target=read)
    reader.start()
    bus.publish(CallStarted("a"))
    assert called.acquire(timeout=PATIENCE)
    feed.close()
    reader.join(PATIENCE)
    assert not reader.is_alive()
    assert taken == [(["a"], 0)]
    assert not bus.has_subscribers(CallStarted)


def test_publishing_does_not_wait_for_a_reader_that_hangs() -> None:
    """The reader takes no events while 50,000 are published."""
    bus = Bus(VirtualClock())
    feed = bus.feed(CallStarted, size=10)
    event = CallStarted("a")
    for _ in range(50_000):
        bus.publish(event)
    events, lost = feed.take(0)
    assert (len(events), lost) == (10, 49_990)


@pytest.mark.parametrize("act", [lambda feed: feed.take(0), lambda feed: feed.close()])
def test_no_event_is_lost_or_repeated_between_threads(act: Callable[..., object]) -> None:
    """Events of several publishers reach the reader once each, in each publisher's order."""
    bus, count, publishers = Bus(VirtualClock()), 2000, 4
    feed = bus.feed(CallStarted, size=count * publishers)

    def publish(publisher: int) -> None:
        for number in range(count):
            bus.publish(CallStarted(f"{publisher} {number}"))

    threads = [threading.Thread(target=publish, args=(publisher,)) for publisher in range(publishers)]
    for thread in threads:
        thread.start()
    seen: list[str] = []
    while len(seen) < count * publishers:
        events, lost = feed.take(PATIENCE)
        assert events
        assert lost == 0
        seen += names(events)
    for thread in threads:
        thread.join(PATIENCE)
    for publisher in range(publishers):
        own = [name for name in seen if name.startswith(f"{publisher} ")]
        assert own == [f"{publisher} {number}" for number in range(count)]
    act(feed)
