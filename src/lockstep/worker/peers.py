"""How a worker gets from view to view, and the other processes as seen by one that does not wait for them.

Such a process is apart from its view, or between two calls in which all processes meet. It reads the
announcements of the coordinator, and connects to others by itself. On the chief, `Joiners` reads them too,
and gives the state to workers that join. With the next exchange, all enter the view that follows.
"""

import math
import socket
import time
from collections.abc import Callable, Collection
from typing import NoReturn, Protocol

from lockstep.checkpoint.checkpoint_files import Contents
from lockstep.collectives.contract import Communicator
from lockstep.errors import DisagreementError, InternalError, PeerLostError
from lockstep.protocol.worker import Notice
from lockstep.topology import View

_POSITION_EVERY = 1.0
"""Seconds between two answers to a request for the position, which stays posted for a moment."""


class Peers(Protocol):
    """The other processes, as a process learns of them without an exchange; for the main thread."""

    def announced(self) -> tuple[int, tuple[int, ...]]:
        """Return the number and the workers of the newest announced view."""

    def lost_workers(self, workers: Collection[int]) -> frozenset[int]:
        """Return those of these workers that are not in the newest announced view."""

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


EnteredView = tuple[View, Communicator]
"""A view, and this worker's end of its exchange."""


class Membership(Protocol):
    """How a worker gets from view to view, as the coordinator decides."""

    def next_view(self, lost: PeerLostError, *, expected: bool = False) -> EnteredView:
        """Wait for the view after the one that ended with `lost`, and enter it.

        Args:
            lost: why the view ended.
            expected: whether it ends because this worker has handed over the state, which takes time.

        Raises:
            PeerLostError: no view follows; `lost` itself, or an error with another reason.
        """

    def end_differing(self, differs: DisagreementError, advice: str = "") -> NoReturn:
        """End this process at once, because its results differ from those of the others.

        Args:
            differs: the difference.
            advice: the remedy, for the user.

        Raises:
            DisagreementError: the process cannot be ended.
        """

    def hand_over(self, contents: Contents, *, whole: bool, view: int | None = None) -> None:
        """Give the state, or only the position, to joining workers.

        Args:
            contents: the state, or the position.
            whole: whether it is the state.
            view: the number of the view in which it was requested; None for the current view.
        """

    def refuse_joiners(self, why: str, view: int) -> None:
        """Tell the coordinator, which has posted a request in a view, that no worker can join."""

    def prepare(self, contents: Contents) -> None:
        """Prepare to hand over contents like these."""

    def position(self) -> Contents:
        """Wait for the position, which the members send; for a joining worker.

        Raises:
            PeerLostError: the job is over.
        """

    def join(self) -> tuple[Contents, EnteredView]:
        """Wait for the state, and for the view that admits this worker; for a joining worker.

        Raises:
            PeerLostError: the job is over.
        """

    def join_later(self) -> tuple[Contents, tuple[int, ...]]:
        """Wait for the state, and for the view that admits this worker; leave the view to `next_view`.

        Returns:
            The state, and the workers of the view.

        Raises:
            PeerLostError: the job is over.
        """

    @property
    def peers(self) -> Peers:
        """The other processes, for a process that does not wait for them."""


class Alone:
    """The `Membership` and the `Peers` of a process without an agent."""

    @property
    def peers(self) -> Peers:
        """No other processes."""
        return self

    def next_view(self, lost: PeerLostError, *, expected: bool = False) -> EnteredView:
        """Raise `lost`: no view follows."""
        raise lost

    def end_differing(self, differs: DisagreementError, advice: str = "") -> NoReturn:
        """Raise `differs`: there are no other workers."""
        raise differs

    def hand_over(self, contents: Contents, *, whole: bool, view: int | None = None) -> None:
        """Do nothing: no worker joins."""

    def refuse_joiners(self, why: str, view: int) -> None:
        """Do nothing: no worker joins."""

    def prepare(self, contents: Contents) -> None:
        """Do nothing: no worker joins."""

    def position(self) -> Contents:
        """Raise InternalError: there is no job to join."""
        raise InternalError("a process by itself has no job to join")

    def join(self) -> tuple[Contents, EnteredView]:
        """Raise InternalError: there is no job to join."""
        raise InternalError("a process by itself has no job to join")

    def join_later(self) -> tuple[Contents, tuple[int, ...]]:
        """Raise InternalError: there is no job to join."""
        raise InternalError("a process by itself has no job to join")

    def announced(self) -> tuple[int, tuple[int, ...]]:
        """Return the view of a process by itself."""
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


class Joiners:
    """How the chief lets workers join while others do not wait for it.

    Args:
        peers: returns the requests of the coordinator.
        membership: gives the state.
        enter_next: called with the number of a view; the next exchange is in a later view.
    """

    def __init__(self, peers: Peers, membership: Membership, enter_next: Callable[[int], None]) -> None:
        self._peers = peers
        self._membership = membership
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
            self._membership.hand_over(take(False), whole=False, view=view)
        elif notice is Notice.CHANGE and self._given_in != view:
            self._given_in = view
            self._enter_next(view)
            self._membership.hand_over(take(True), whole=True, view=view)
            return view
        return None

    def close(self, why: str) -> None:
        """From now on, admit no worker."""
        self._closed = why

    def admit_none(self, why: str) -> None:
        """Let no worker join."""
        view, notice = self._peers.posted()
        if notice is not Notice.NOTHING and self._refused_in != view:
            self._refused_in = view
            self._membership.refuse_joiners(why, view)
