"""Publish and subscribe: the publisher of an event does not depend on its subscribers.

A bus calls subscribers on the publisher's thread, in the order in which they subscribed, so that files and
messages have the order of the events. A subscriber must not block. A slow reader (a terminal that shows the
run, a user's code) takes events from a `Feed` instead: a bounded queue that drops the oldest events and
counts them. A subscriber that raises is removed, and the bus reports that once.

Events of a worker pass through its agent to the coordinator, which publishes them again on the bus of the
run; the log `events.jsonl` is one of its subscribers. The event of a step, with the seconds of its parts, is
measured only while it has a subscriber, and stays in its worker.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from lockstep.observability.events import Event
from lockstep.system.clock import Clock
from lockstep.system.notes import note


class PublishedEvent(NamedTuple):
    """An event, and its origin.

    Attributes:
        time: the time at which it was published, in seconds since 1970.
        worker: the worker that published it; None for the coordinator.
        event: the event.
    """

    time: float
    worker: int | None
    event: Event


Subscriber = Callable[[PublishedEvent], None]
"""Processes an event, on any thread; must not block."""


class Bus:
    """Delivers the events of one process. Every method may be called from any thread.

    Args:
        clock: dates events.
        worker: the worker that publishes; None in the coordinator.
        complain: shows a line about a subscriber that raised.
    """

    def __init__(
        self, clock: Clock, worker: int | None = None, complain: Callable[[str], None] = note
    ) -> None:
        self._clock = clock
        self._worker = worker
        self._complain = complain
        self._lock = threading.Lock()
        self._subscribers: dict[type[Event], tuple[Subscriber, ...]] = {}

    def subscribe(self, subscriber: Subscriber, *kinds: type[Event]) -> Callable[[], None]:
        """Call `subscriber` for each event of these classes; return a function that ends this."""
        with self._lock:
            for kind in kinds:
                self._subscribers[kind] = (*self._subscribers.get(kind, ()), subscriber)
        return lambda: self._remove(subscriber)

    def feed(self, *kinds: type[Event], size: int = 1024) -> "Feed":
        """Return a queue of the newest `size` events of these classes."""
        return Feed(self, kinds, size)

    def has_subscribers(self, kind: type[Event]) -> bool:
        """Whether events of this class have a subscriber; cheaper than creating an event."""
        return kind in self._subscribers

    def publish(self, event: Event, worker: int | None = None) -> None:
        """Call the subscribers to the event's class; their errors do not reach the caller.

        Args:
            event: the event.
            worker: the worker that published it first, if the coordinator publishes it again.
        """
        subscribers = self._subscribers.get(type(event))
        if subscribers is None:
            return
        published = PublishedEvent(self._clock.wall(), self._worker if worker is None else worker, event)
        for subscriber in subscribers:
            try:
                subscriber(published)
            except Exception as error:
                self._remove(subscriber)
                self._complain(f"a subscriber of events failed and is removed: {error!r}")

    def _remove(self, subscriber: Subscriber) -> None:
        with self._lock:
            for kind, subscribers in list(self._subscribers.items()):
                left = tuple(other for other in subscribers if other != subscriber)
                if left:
                    self._subscribers[kind] = left
                else:
                    del self._subscribers[kind]


class Feed:
    """A bounded queue of events, for a reader on a separate thread.

    Publishing never waits for the reader: it replaces the oldest event when the queue is full.
    """

    def __init__(self, bus: Bus, kinds: tuple[type[Event], ...], size: int) -> None:
        self._changed = threading.Condition()
        self._events: deque[PublishedEvent] = deque(maxlen=size)
        self._lost = 0
        self._closed = False
        self._unsubscribe = bus.subscribe(self._put, *kinds)

    def take(self, seconds: float | None = None) -> tuple[list[PublishedEvent], int]:
        """Wait until there are events, the feed is closed, or `seconds` have passed.

        Returns:
            The events since the last call, the oldest first, and the number of lost events before them.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._events or self._closed, seconds)
            events, lost = list(self._events), self._lost
            self._events.clear()
            self._lost = 0
        return events, lost

    def close(self) -> None:
        """End the subscription; a reader that waits returns."""
        self._unsubscribe()
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _put(self, published: PublishedEvent) -> None:
        with self._changed:
            self._lost += len(self._events) == self._events.maxlen
            self._events.append(published)
            self._changed.notify()
