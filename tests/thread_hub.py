"""A view whose members are threads of this process."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lockstep.collectives.adder import common_layout
from lockstep.collectives.call import (
    CallWait,
    CollectiveCall,
    abort_reason,
    check_length,
    check_parts,
    compare,
)
from lockstep.collectives.contract import Bytes, Communicator, Leaves, Span, WaitObserver, WaitPolicy
from lockstep.collectives.layout import joined
from lockstep.collectives.loopback import ReusedTotal
from lockstep.collectives.plan import ReducePlan
from lockstep.errors import InternalError, LockstepError, PeerLostError
from lockstep.system.clock import Clock, SystemClock

Payload = TypeVar("Payload")
Result = TypeVar("Result")


@dataclass(frozen=True)
class _Entry:
    """One member's arguments of a call; `payload` depends on the kind of the call."""

    call: CollectiveCall
    describe: Callable[[], list[str]]
    payload: Any


@dataclass
class _Round:
    """One collective call: the entries of the members, and the outcome."""

    entries: dict[int, _Entry] = field(default_factory=dict)
    notice: int = 0
    outcome: Any = None
    error: LockstepError | None = None
    is_over: bool = False


class Hub:
    """Connects the members of one view that are threads of this process.

    The last member to arrive executes the call while the others wait.
    """

    def __init__(
        self,
        plan: ReducePlan,
        policy: WaitPolicy | None = None,
        observe: WaitObserver | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.plan = plan
        self._policy = policy or WaitPolicy(timeout=600.0)
        self._observe = observe
        self._clock = clock or SystemClock()
        self._changed = threading.Condition()
        self._round = _Round()
        self._reason: str | None = None
        self._left: set[int] = set()
        self._total = ReusedTotal()
        self._notice = 0
        self.waited = [0.0] * plan.members

    def member(self, rank: int) -> Communicator:
        """Return the communicator of the member at `rank` among the view's workers."""
        return ThreadCommunicator(self, rank)

    def abort(self, reason: str) -> None:
        """End the view for all members; the first reason stays."""
        with self._changed:
            if self._reason is None:
                self._reason = reason
            self._changed.notify_all()

    def post_notice(self, notice: int) -> None:
        """Set the notice of the view; all members see it from the same call on."""
        self._notice = notice

    def leave(self, rank: int) -> None:
        """Record that a member makes no more calls."""
        with self._changed:
            self._left.add(rank)
            self._changed.notify_all()

    def call(
        self, rank: int, entry: _Entry, execute: Callable[[Sequence[_Entry]], Result]
    ) -> tuple[Result, int]:
        """Wait for all members; return the result of `execute` on their entries, and the notice.

        Raises:
            InternalError: this member was closed.
            LockstepError: as the contract states, or the error that `execute` raised, on every member.
        """
        with self._changed:
            if rank in self._left:
                raise InternalError(f"{entry.call} on a closed communicator")
            if self._reason is not None:
                raise PeerLostError(self._reason)
            current = self._round
            current.entries[rank] = entry
            if rank == 0:
                current.notice = self._notice
            if len(current.entries) == self.plan.members:
                self._execute(current, execute)
            else:
                self._wait(current, rank, entry.call)
        if current.error is not None:
            raise type(current.error)(*current.error.args)
        outcome: Result = current.outcome
        return outcome, current.notice

    def _execute(self, current: _Round, execute: Callable[[Sequence[_Entry]], Result]) -> None:
        self._round = _Round()
        entries = [current.entries[rank] for rank in range(self.plan.members)]
        try:
            calls = [entry.call for entry in entries]
            compare(calls, self.plan.workers, lambda: [entry.describe() for entry in entries])
            current.outcome = execute(entries)
        except LockstepError as error:
            current.error = error
        except BaseException as error:
            self.abort(f"{entries[0].call} ended with {type(error).__name__}: {error}")
            raise
        current.is_over = True
        current.entries.clear()
        self._changed.notify_all()

    def _wait(self, current: _Round, rank: int, call: CollectiveCall) -> None:
        workers = self.plan.workers
        wait = CallWait(call, self._policy, self._observe, self._clock)
        begun = time.perf_counter()
        try:
            while not current.is_over:
                if self._reason is not None:
                    raise PeerLostError(self._reason)
                missing = [other for other in range(len(workers)) if other not in current.entries]
                for other in missing:
                    if other in self._left:
                        raise PeerLostError(f"worker {workers[other]} has left while others wait in {call}")
                self._changed.wait(wait.check(tuple(workers[other] for other in missing)))
        except BaseException as error:
            # This member cannot withdraw its entry, so the others cannot continue without it.
            self.abort(abort_reason(workers[rank], call, error))
            raise
        finally:
            self.waited[rank] += time.perf_counter() - begun

    def sum(self, entries: Sequence[_Entry]) -> Leaves:
        """Sum the partials of all members in tree order."""
        given = {span: leaves for entry in entries for span, leaves in entry.payload.items()}
        return self._total.of(self.plan.whole, given)


class ThreadCommunicator:
    """The communicator of one member of a `Hub`; implements `Communicator`."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self._hub = hub
        self._rank = rank
        self._notice = 0

    @property
    def notice(self) -> int:
        """The notice of the view; see `Communicator`."""
        return self._notice

    @property
    def waited(self) -> float:
        """Seconds of waiting for others; see `Communicator`."""
        return self._hub.waited[self._rank]

    def reduce(self, partials: Mapping[Span, Leaves], *, check: bytes = b"", what: str = "reduce") -> Leaves:
        """Sum the leaves of all replicas; see `Communicator`."""
        check_length(check)
        layout = common_layout(self._hub.plan, self._rank, partials)
        call = CollectiveCall("reduce", what, check, layout=layout.digest)
        return self._call(_Entry(call, layout.describe, partials), self._hub.sum)

    def gather(self, blob: bytes, *, what: str = "gather") -> list[bytes]:
        """Give every member the blobs of all members; see `Communicator`."""
        return list(self._gather(CollectiveCall("gather", what), blob))

    def all_to_all(self, parts: Sequence[Sequence[Bytes]], *, what: str = "all_to_all") -> list[Bytes]:
        """Give each member the part that each member has for it; see `Communicator`."""
        check_parts(parts, self._hub.plan.members)
        given = self._gather(CollectiveCall("all_to_all", what), parts)
        return [joined(sent[self._rank]) for sent in given]

    def barrier(self, *, what: str = "barrier") -> None:
        """Return once every member has called it; see `Communicator`."""
        self._gather(CollectiveCall("barrier", what), b"")

    def _gather(self, call: CollectiveCall, blob: Payload) -> list[Payload]:
        return self._call(_Entry(call, list, blob), lambda entries: [entry.payload for entry in entries])

    def _call(self, entry: _Entry, execute: Callable[[Sequence[_Entry]], Result]) -> Result:
        outcome, self._notice = self._hub.call(self._rank, entry, execute)
        return outcome

    def abort(self, reason: str) -> None:
        """End this view for all members; see `Communicator`."""
        self._hub.abort(reason)

    def close(self) -> None:
        """Make no more calls; members that wait for this one raise `PeerLostError`. See `Communicator`."""
        self._hub.leave(self._rank)
