"""A channel between two parts of one process; messages are passed as objects."""

import os
from collections import deque
from typing import Any, Generic, TypeVar

from lockstep.protocol.channel import PeerGone, Unreadable

Out = TypeVar("Out")
In = TypeVar("In")


class LocalChannel(Generic[Out, In]):
    """One end of a channel within one thread; see `Channel`. `pair` creates both ends."""

    def __init__(self) -> None:
        # Its count is nonzero while there is something to receive, so that a selector wakes.
        self._arrivals = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._queue: deque[In] = deque()
        self._peer: LocalChannel[In, Out] | None = None

    @classmethod
    def pair(cls) -> "tuple[LocalChannel[Any, Any], LocalChannel[Any, Any]]":
        """Return both ends of a channel.

        Raises:
            OSError: this process has too many descriptors.
        """
        first: LocalChannel[Any, Any] = cls()
        try:
            second: LocalChannel[Any, Any] = cls()
        except OSError:
            first.close()
            raise
        first._peer, second._peer = second, first
        return first, second

    def send(self, message: Out, patience: float = 0.0) -> bool:
        """Send a message; see `Channel`."""
        if self._peer is None:
            return False
        self._peer._queue.append(message)
        os.eventfd_write(self._peer._arrivals, 1)
        return True

    def receive(self) -> In | Unreadable | PeerGone | None:
        """Return the next message, if any; see `Channel`."""
        if self._queue:
            message = self._queue.popleft()
            if not self._queue and self._peer is not None:
                os.eventfd_read(self._arrivals)
            return message
        return PeerGone() if self._peer is None else None

    def fileno(self) -> int:
        """Return a descriptor that is readable when a message has arrived or the peer is gone."""
        return self._arrivals

    def close(self) -> None:
        """Close this end; safe to call more than once."""
        if self._arrivals < 0:
            return
        if self._peer is not None:
            os.eventfd_write(self._peer._arrivals, 1)
            self._peer._peer = None
            self._peer = None
        os.close(self._arrivals)
        self._arrivals = -1
