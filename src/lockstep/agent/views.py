"""The agent's side of views: where the members of one meet, and what its chief gives."""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from lockstep.agent.worker_handle import WorkerHandle
from lockstep.protocol.request import Request
from lockstep.protocol.worker import JobOver, Leave, NewView, Position
from lockstep.topology import View


class ExchangeHandle(NamedTuple):
    """What the agent needs to know of the memory in which the members of a view meet.

    Attributes:
        descriptor: every member gets it.
        abort: makes every member that waits there raise `PeerLostError` with the given reason.
        leave_notice: leaves a number for the members.
        close: forgets it; the members still have it.
    """

    descriptor: int
    abort: Callable[[str], None]
    leave_notice: Callable[[int], None]
    close: Callable[[], None]


class Views:
    """The present view of a job.

    Args:
        open_exchange: makes what the members of a view, so many, share.

    Attributes:
        workers: the members.
    """

    def __init__(self, open_exchange: Callable[[int], ExchangeHandle]) -> None:
        self._open_exchange = open_exchange
        self._exchange: ExchangeHandle | None = None
        self.workers: tuple[int, ...] = ()
        self._given: int | None = None

    def open(self, workers: tuple[int, ...]) -> int:
        """Begin the first view; return the descriptor of its memory.

        Raises:
            LockstepError: this machine has too little memory.
        """
        self._exchange, self.workers = self._open_exchange(len(workers)), workers
        return self._exchange.descriptor

    def renew(
        self, view: View, reason: str, members: Mapping[int, WorkerHandle], leaving: Iterable[int]
    ) -> None:
        """Give the members of `view` the memory of a new exchange, and wake those of the old one.

        Args:
            view: to begin.
            reason: why the old one ends.
            members: all workers that were started.
            leaving: those that are told to leave, if they were in the old view.

        Raises:
            LockstepError: this machine has too little memory.
        """
        exchange = self._open_exchange(len(view.workers))
        message = NewView(view.number, view.workers)
        for worker in view.workers:
            state = () if worker in self.workers or self._given is None else (self._given,)
            members[worker].tell(message, exchange.descriptor, *state)
        for worker in leaving:
            if worker in self.workers:
                members[worker].tell(Leave())
        self.abort(reason)
        self._forget_exchange()
        self._exchange, self.workers = exchange, view.workers
        self.take(None)

    def ask(self, request: Request) -> None:
        """Ask the members for something."""
        if self._exchange is not None:
            self._exchange.leave_notice(request)

    def take(self, descriptor: int | None) -> None:
        """Take over the memory that the chief has given, instead of what it gave before."""
        if self._given is not None:
            os.close(self._given)
        self._given = descriptor

    def deliver(self, member: WorkerHandle) -> None:
        """Tell a worker that joins what the chief has given."""
        if self._given is not None:
            member.tell(Position(), self._given)

    def end(self, over: JobOver, members: Mapping[int, WorkerHandle]) -> None:
        """Tell all workers that no view follows, and wake them."""
        for member in members.values():
            if not member.exited:
                member.tell(over)
        self.abort(over.reason)

    def abort(self, reason: str) -> None:
        """Wake the members of the view."""
        if self._exchange is not None:
            self._exchange.abort(reason)

    def close(self) -> None:
        """Forget the memory."""
        self._forget_exchange()
        self.take(None)

    def _forget_exchange(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None
