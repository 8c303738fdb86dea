"""Waits for descriptors and calls their handlers: one loop serves all parts of a process."""

import selectors
from collections.abc import Callable
from typing import Self


class EventLoop:
    """Serves all parts of one process in one thread.

    Watching a watched descriptor, or unwatching another one, has no effect.
    """

    def __init__(self) -> None:
        self._selector = selectors.PollSelector()
        self._before: list[Callable[[], float | None]] = []

    def before_each_wait(self, call: Callable[[], float | None]) -> None:
        """Call `call` at the beginning of each turn; the turn waits at most the seconds that it returns."""
        self._before.append(call)

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
                key.data()

    def close(self) -> None:
        """Stop watching all descriptors."""
        self._selector.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
