"""Waits for descriptors and calls their handlers: one loop serves all parts of a process."""

import contextlib
import select
import selectors
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import Self

ARRIVES = select.EPOLLIN | select.EPOLLET
"""How `epoll` watches a listener for `arrived`."""


def wait_for(
    readable: Iterable[int], seconds: float | None = None, *, writable: Iterable[int] = ()
) -> set[int]:
    """Wait until a descriptor is ready, or its peer has closed it; return all these descriptors.

    Unlike `select.select`, it takes descriptors above 1023, which a program with many open files has.

    Args:
        readable: the descriptors to read from.
        seconds: the longest wait; None for no limit.
        writable: the descriptors to write to, other than those of `readable`.
    """
    poll = select.poll()
    for descriptor in readable:
        poll.register(descriptor, select.POLLIN)
    for descriptor in writable:
        poll.register(descriptor, select.POLLOUT)
    return {descriptor for descriptor, _ in poll.poll(None if seconds is None else max(0.0, seconds) * 1e3)}


def arrived(listener: socket.socket, events: select.epoll, most: int) -> Iterator[socket.socket]:
    """Yield the connections that have arrived at a listener, which does not block; at most `most` of them.

    `events` watches the listener with `ARRIVES`. It stays readable if there may be more connections, so that
    a loop can serve others first. A connection that cannot be accepted makes it readable only once: otherwise
    the loop would be busy with it.
    """
    with contextlib.suppress(OSError):
        for _ in range(most):
            yield listener.accept()[0]
        events.modify(listener, ARRIVES)


class EventLoop:
    """Serves all parts of one process in one thread.

    Watching a watched descriptor, or unwatching another one, has no effect.
    """

    def __init__(self) -> None:
        self._selector = selectors.PollSelector()
        self._before: list[Callable[[], float | None]] = []
        self._check: Callable[[], object] = lambda: None

    def before_each_wait(self, call: Callable[[], float | None]) -> None:
        """Call `call` at the beginning of each turn. It returns the longest wait of the turn, in seconds."""
        self._before.append(call)

    def before_each_handler(self, check: Callable[[], object]) -> None:
        """Call `check` before each handler, because this process may have been stopped since the last one."""
        self._check = check

    def watch(self, descriptor: int, call: Callable[[], object], *, writes: bool = False) -> None:
        """Call `call` when a descriptor is readable, or writable if `writes`, until it is unwatched."""
        if descriptor not in self._selector.get_map():
            self._selector.register(
                descriptor, selectors.EVENT_WRITE if writes else selectors.EVENT_READ, call
            )

    def watch_if(
        self, wanted: bool, descriptor: int, call: Callable[[], object], *, writes: bool = False
    ) -> None:
        """Watch a descriptor if `wanted`, otherwise stop watching it."""
        if wanted:
            self.watch(descriptor, call, writes=writes)
        else:
            self.unwatch(descriptor)

    def unwatch(self, descriptor: int) -> None:
        """Stop watching a descriptor."""
        if descriptor in self._selector.get_map():
            self._selector.unregister(descriptor)

    def turn(self, seconds: float | None) -> None:
        """Wait until a descriptor is ready, for at most `seconds`, and call the handlers."""
        limits = [limit for call in self._before if (limit := call()) is not None]
        if seconds is not None:
            limits.append(seconds)
        seconds = max(0.0, min(limits)) if limits else None
        for key, _ in self._selector.select(seconds):
            # An earlier handler of this turn may have unwatched it.
            if key.fd in self._selector.get_map():
                self._check()
                key.data()

    def close(self) -> None:
        """Stop watching all descriptors."""
        self._selector.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
