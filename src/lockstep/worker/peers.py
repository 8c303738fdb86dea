"""The other processes of a job, for a process that does not wait for them, and how workers join these.

Such a process is apart from its view, or between two calls in which all processes meet. It reads the
announcements of the coordinator, and connects to others by itself. On the chief, `Joiners` reads them too,
and gives the state to workers that join. With the next exchange, all enter the view that follows.
"""

import math
import socket
import time
from collections.abc import Callable, Collection
from typing import Protocol

from lockstep.checkpoint.checkpoint_files import Contents
from lockstep.protocol.worker import Notice

_POSITION_EVERY = 1.0
"""Seconds between two answers to a request for the position, which stays posted for a moment."""


class Peers(Protocol):
    """The other processes, as far as a process learns of them without an exchange; for the main thread."""

    def announced(self) -> tuple[int, tuple[int, ...]]:
        """Return the number and the workers of the newest announced view."""

    def lost_workers(self, workers: Collection[int]) -> frozenset[int]:
        """Return the workers among these that are not in the newest announced view."""

    def posted(self) -> tuple[int, Notice]:
        """Return the number of the newest announced view, and its notice."""

    def answers_at(self, entrance: bytes) -> None:
        """Let the agent pass connections from other hosts to an address of this process."""

    def dial(self, worker: int) -> Callable[[], socket.socket] | None:
        """Return a function that connects to a worker that has called `answers_at`, or None on this host.

        Raises:
            NetworkError: raised by the returned function if the other worker cannot be reached.
        """

    @property
    def accept(self) -> Callable[[socket.socket], socket.socket] | None:
        """The function that completes a connection from another host; None in a job on one host.

        It raises NetworkError if that fails.
        """


class NoPeers:
    """The `Peers` of a process without an agent."""

    def announced(self) -> tuple[int, tuple[int, ...]]:
        """Return the view of a process on its own."""
        return 1, (0,)

    def lost_workers(self, workers: Collection[int]) -> frozenset[int]:
        """Return no worker."""
        return frozenset()

    def posted(self) -> tuple[int, Notice]:
        """Return a view without a notice."""
        return 1, Notice.NOTHING

    def answers_at(self, entrance: bytes) -> None:
        """Do nothing: there is no other host."""

    def dial(self, worker: int) -> Callable[[], socket.socket] | None:
        """Return None: there is no other host."""
        return None

    @property
    def accept(self) -> Callable[[socket.socket], socket.socket] | None:
        """None: there is no other host."""
        return None


class HandsOver(Protocol):
    """Gives the state to workers that join, or refuses them."""

    def hand_over(self, contents: Contents, *, whole: bool, view: int | None = None) -> None:
        """Give the state, or only the position; see `Membership`."""

    def refuse_joiners(self, why: str, view: int) -> None:
        """Tell the coordinator, which has posted a request in a view, that no worker can join."""


class Joiners:
    """How the chief lets workers join while others do not wait for it.

    Args:
        peers: returns the requests of the coordinator.
        hands_over: gives the state.
        enter_next: called with the number of a view; the next exchange is in a later one.
    """

    def __init__(self, peers: Peers, hands_over: HandsOver, enter_next: Callable[[int], None]) -> None:
        self._peers = peers
        self._hands_over = hands_over
        self._enter_next = enter_next
        self._closed = ""
        self._given_in: int | None = None
        self._refused_in: int | None = None
        self._gave_position_at = -math.inf

    def admit(self, take: Callable[[bool], Contents]) -> int | None:
        """Let workers join, if the coordinator requests it; with the next exchange, all enter the next view.

        Args:
            take: returns the state; with False, only the position.

        Returns:
            The number of the view in which the state was given to workers; None if it was not.

        Raises:
            PeerLostError: the job is over.
        """
        if self._closed:
            self.admit_none(self._closed)
            return None
        view, notice = self._peers.posted()
        now = time.monotonic()
        if notice is Notice.POSITION and now - self._gave_position_at >= _POSITION_EVERY:
            self._gave_position_at = now
            self._hands_over.hand_over(take(False), whole=False, view=view)
        elif notice is Notice.CHANGE and self._given_in != view:
            self._given_in = view
            self._enter_next(view)
            self._hands_over.hand_over(take(True), whole=True, view=view)
            return view
        return None

    def close(self, why: str) -> None:
        """Let `admit` admit no worker from now on."""
        self._closed = why

    def admit_none(self, why: str) -> None:
        """Let no worker join."""
        view, notice = self._peers.posted()
        if notice is not Notice.NOTHING and self._refused_in != view:
            self._refused_in = view
            self._hands_over.refuse_joiners(why, view)
