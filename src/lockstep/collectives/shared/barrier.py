"""The barrier of a view, in a control segment: members announce a call, arrive, wait, and compare calls.

A member arrives by adding to its own word in the shared memory. It polls for a millisecond, yielding the
core each time, and then sleeps in `futex(2)`. It reads the abort word at least every 0.2 s, so no member
waits for a lost worker.

A call completes for all members or for none. A member may arrive while others already give up, so members
that see the abort settle under the segment's lock whether all had arrived (`ControlSegment.settle`): the
first one decides. A member that sees all arrivals and then no abort need not ask: a member that settles
later finds all arrivals too.
"""

import os
import time
from collections.abc import Callable, Sequence

from lockstep.collectives.call import (
    MAX_BLOCK_SECONDS,
    CallWait,
    CollectiveCall,
    abort_reason,
    agree,
    compare,
)
from lockstep.collectives.contract import WaitObserver, WaitPolicy
from lockstep.collectives.shared import futex
from lockstep.collectives.shared.control_segment import MAILBOX, SLOT, ControlSegment, decode, encode
from lockstep.errors import (
    DisagreementError,
    InternalError,
    PeerLostError,
    PeerStuckError,
    SharedMemoryError,
)
from lockstep.system.clock import Clock

SPIN = 1e-3
"""Seconds to spin before blocking: about the skew between members that start a call together, even if several
share a core. Blocking and waking take longer than yielding."""

_BEHIND = 1 << 31
"""Arrivals are counted modulo 2**32: a difference of at least this value is negative."""


class Barrier:
    """One member's side of the barrier. Only `abort` is safe to call from any thread.

    Attributes:
        notice: as the contract states.
        waited: seconds that this member has waited for others.
    """

    def __init__(
        self,
        segment: ControlSegment,
        rank: int,
        workers: Sequence[int],
        policy: WaitPolicy,
        observe: WaitObserver | None,
        clock: Clock,
        hosts: Sequence[Sequence[int]] = (),
    ) -> None:
        """Take part in the barrier.

        Args:
            segment: the memory of the view.
            rank: the rank of this member.
            workers: ids of all members.
            policy: the limits of waits.
            observe: receives reports on waits.
            clock: measures waits.
            hosts: the worker ids of all hosts, if members also wait for other hosts.
        """
        self._segment = segment
        self._hosts = hosts
        self._rank = rank
        self._workers = tuple(workers)
        self._others = [other for other in range(len(workers)) if other != rank]
        self._policy = policy
        self._observe = observe
        self._clock = clock
        self._arrive = futex.adder(segment.address(rank))
        self._slots = [
            [segment.slot(member, arrival) for member in range(len(workers))] for arrival in range(2)
        ]
        self._arrival = 0
        self._closed = False
        self.notice = 0
        self.waited = 0.0

    def during(self, call: CollectiveCall) -> "CallScope":
        """Return a context manager for everything that this member does in `call`.

        A member that leaves a call early cannot withdraw what it has published, so the view ends, unless all
        members leave the call at the same point.

        Raises:
            InternalError: this member is closed.
            PeerLostError: the view has ended.
        """
        if self._closed:
            raise InternalError(f"{call} on a closed communicator")
        self._raise_if_aborted()
        return CallScope(self.abort_call, call)

    def abort_call(self, call: CollectiveCall, error: BaseException) -> None:
        """End the view for all members: this one does not complete `call`."""
        self._segment.abort(abort_reason(self._workers[self._rank], call, error))

    def arrive_and_compare(
        self,
        call: CollectiveCall,
        blob: bytes = b"",
        describe: Callable[[], Sequence[str]] = list,
        within: CollectiveCall | None = None,
    ) -> list[bytes]:
        """Wait until all members have arrived with the same call, and return the blobs that they passed.

        Args:
            call: the call that this member makes.
            blob: the bytes that it passes.
            describe: returns a line for each of its leaves; called if layouts differ.
            within: the call that messages name, if this one is a part of it.

        Raises:
            DisagreementError: the calls differ; every member raises it.
            PeerLostError, PeerStuckError: as the contract states.
        """
        calls, blobs = self.arrive_and_collect(call, blob, within)
        if calls is not None:

            def described() -> list[list[str]]:
                texts = self.arrive_and_compare(
                    CollectiveCall("describe", "describe"), "\n".join(describe()).encode()
                )
                return [text.decode().splitlines() for text in texts]

            compare(calls, self._workers, described)
        return blobs

    def arrive_and_collect(
        self, call: CollectiveCall, blob: bytes = b"", within: CollectiveCall | None = None
    ) -> tuple[list[CollectiveCall] | None, list[bytes]]:
        """Wait until all members have arrived; return their calls, if these differ, or else their blobs.

        Args:
            call, blob, within: see `arrive_and_compare`.

        Raises:
            PeerLostError, PeerStuckError: as the contract states.
        """
        segment, arrival = self._segment, self._arrival + 1
        if not self._others:
            segment.publish_notice(arrival)
            self.notice = segment.notice(arrival)
            return None, [blob]
        announcement = encode(call, len(blob))
        slots = self._slots[arrival % 2]
        segment.control[slots[self._rank] : slots[self._rank] + len(announcement)] = announcement
        if blob:
            self._send(blob, 0)
        if self._rank == 0:
            segment.publish_notice(arrival)
        self.arrive_and_wait(within or call)
        self.notice = segment.notice(arrival)
        for start in slots:
            if segment.control[start : start + len(announcement)] != announcement:
                announced = [decode(segment.control[start : start + SLOT]) for start in slots]
                calls, lengths = [each for each, _ in announced], [length for _, length in announced]
                if not agree(calls):
                    return calls, []
                break
        else:
            lengths = [len(blob)] * len(slots)
        return None, self._receive(within or call, blob, lengths) if any(lengths) else [b""] * len(slots)

    def arrive_and_wait(self, call: CollectiveCall) -> None:
        """Arrive, and return once all members have arrived. Calls are not compared.

        The view may be aborted while some members have seen that all have arrived, and others have not. So a
        member that sees an abort settles whether the arrival is complete; see the top of this file.
        """
        self._arrival = (self._arrival + 1) % (1 << 32)
        self._arrive()
        begun = time.perf_counter()
        try:
            if not self._spin(begun + SPIN):
                self._block(call)
            elif self._segment.is_aborted and not self._is_settled(call):
                self._raise_if_aborted()
        finally:
            self.waited += time.perf_counter() - begun

    def await_permission(self, call: CollectiveCall) -> None:
        """Return once calls may end on this host.

        Each member calls this before it arrives for the last time in `call`. So the call ends for all members
        or for none, even if the time runs out meanwhile.

        Raises:
            PeerLostError: the view has ended.
            PeerStuckError: the policy's timeout has passed.
        """
        segment, begun = self._segment, self._clock.now()
        if begun <= segment.permitted_until:
            return
        while (now := self._clock.now()) > segment.permitted_until:
            self._raise_if_aborted()
            if now - begun >= self._policy.timeout:
                raise PeerStuckError(
                    f"the agent of this host has not let {call} end for {now - begun:.1f} s: it is stopped, "
                    "or has no answer from the coordinator"
                )
            segment.wait_for_permit(MAX_BLOCK_SECONDS)
        self.waited += self._clock.now() - begun

    def abort(self, reason: str) -> None:
        """End the view for all members."""
        self._segment.abort(reason)

    def close(self) -> None:
        """Make no more calls."""
        if not self._closed:
            self._closed = True
            if not self._segment.control.closed:
                self._segment.leave(self._rank)

    def _send(self, blob: bytes, part: int) -> None:
        """Write a part of `blob` to the mailbox that the other members read after the next arrival."""
        data = blob[part * MAILBOX : (part + 1) * MAILBOX]
        start = self._segment.mailbox(self._rank, self._arrival + 1)
        self._segment.control[start : start + len(data)] = data

    def _receive(self, call: CollectiveCall, blob: bytes, lengths: Sequence[int]) -> list[bytes]:
        received: list[list[bytes]] = [[] for _ in lengths]
        rounds = -(-max(lengths) // MAILBOX)
        for part in range(rounds):
            if part > 0:
                self._send(blob, part)
                self.arrive_and_wait(call)
            for other in self._others:
                start = self._segment.mailbox(other, self._arrival)
                size = min(max(lengths[other] - part * MAILBOX, 0), MAILBOX)
                received[other].append(self._segment.control[start : start + size])
        received[self._rank] = [blob]
        return [b"".join(parts) for parts in received]

    def _has_arrived(self, rank: int) -> bool:
        return (self._segment.arrivals(rank) - self._arrival) % (1 << 32) < _BEHIND

    def _spin(self, end: float) -> bool:
        """Spin until `end`, yielding the core; return whether all members have arrived."""
        for other in self._others:
            while not self._has_arrived(other):
                if time.perf_counter() >= end:
                    return False
                os.sched_yield()
        for other in self._others:
            futex.confirm(self._segment.address(other), self._segment.arrivals(other))
        return True

    def _block(self, call: CollectiveCall) -> None:
        wait = CallWait(call, self._policy, self._observe, self._clock)
        while True:
            # Read `left` before the arrivals: a member may arrive and then leave.
            left = [other for other in self._others if self._segment.has_left(other)]
            seen = [(other, self._segment.arrivals(other)) for other in self._others]
            missing = [(other, count) for other, count in seen if not self._has_arrived(other)]
            for other, count in seen:
                futex.confirm(self._segment.address(other), count)
            if self._segment.is_aborted:
                if self._is_settled(call):
                    return
                self._raise_if_aborted()
            if not missing:
                return
            for other, _ in missing:
                if other in left:
                    raise PeerLostError(f"worker {self._workers[other]} has left while others wait in {call}")
            try:
                seconds = wait.check(self._awaited([other for other, _ in missing]))
            except PeerStuckError as stuck:
                # The missing members may arrive now.
                self.abort_call(call, stuck)
                if self._is_settled(call):
                    return
                raise
            first, count = missing[0]
            futex.wait(self._segment.address(first), count, seconds)

    def _is_settled(self, call: CollectiveCall) -> bool:
        """Return whether the arrival is complete, after an abort; see `ControlSegment.settle`."""

        def have_all_arrived() -> bool:
            return all(map(self._has_arrived, self._others))

        try:
            return self._segment.settle(self._arrival, have_all_arrived, self._policy.timeout)
        except TimeoutError:
            raise PeerStuckError(
                f"another member has not settled for {self._policy.timeout:g} s whether {call} is complete: "
                "its process is stopped"
            ) from None

    def _awaited(self, missing: Sequence[int]) -> tuple[int, ...]:
        """Return the workers for which this member waits. Missing members may themselves wait for hosts."""
        awaited = list[int]()
        for other in missing:
            hosts = self._segment.missing(other) if self._hosts else 0
            absent = [worker for host, ids in enumerate(self._hosts) if hosts >> host & 1 for worker in ids]
            awaited += absent or [self._workers[other]]
        return tuple(dict.fromkeys(awaited))

    def _raise_if_aborted(self) -> None:
        reason = self._segment.reason()
        if reason is not None:
            raise PeerLostError(reason)


class CallScope:
    """The context of a call; a class, because a generator would take longer than the rest of the call.

    Args:
        leave: called with the call and the error if a member leaves it, unless all members raise the error.
        call: the call.
    """

    def __init__(self, leave: Callable[[CollectiveCall, BaseException], None], call: CollectiveCall) -> None:
        self._leave = leave
        self._call = call

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, DisagreementError | SharedMemoryError):
            self._leave(self._call, error)
