"""Waits for descriptors and calls their handlers: one loop serves all parts of a process."""

import selectors
from collections.abc import Callable
from typing import Self


class EventLoop:
    """What the parts of one process wait for, in one thread.

    Watching what is watched already, or unwatching what is not, does nothing.
    """

    def __init__(self) -> None:
        self._selector = selectors.PollSelector()
        self._before: list[Callable[[], None]] = []

    def before_each_wait(self, call: Callable[[], None]) -> None:
        """Have `call` called at the beginning of each turn."""
        self._before.append(call)

    def watch(self, descriptor: int, call: Callable[[], object], *, writes: bool = False) -> None:
        """Have `call` called when a descriptor becomes readable, or writable, until it is unwatched."""
        if descriptor not in self._selector.get_map():
            self._selector.register(
                descriptor, selectors.EVENT_WRITE if writes else selectors.EVENT_READ, call
            )

    def unwatch(self, descriptor: int) -> None:
        """Stop watching a descriptor."""
        if descriptor in self._selector.get_map():
            self._selector.unregister(descriptor)

    def turn(self, seconds: float | None) -> None:
        """Wait until something can be done, or for some seconds, and do it."""
        for call in self._before:
            call()
        for key, _ in self._selector.select(seconds):
            # An earlier handler of this turn may have unwatched it.
            if key.fd in self._selector.get_map():
                key.data()

    def close(self) -> None:
        """Stop watching all descriptors."""
        self._selector.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
