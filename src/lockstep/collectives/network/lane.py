"""The connections of one worker to the workers of the same lane on the other hosts."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, Self

from lockstep.collectives.call import MAX_BLOCK_SECONDS, REASON_LIMIT, CallWait, CollectiveCall
from lockstep.collectives.contract import WaitObserver, WaitPolicy
from lockstep.collectives.network.frames import (
    HEADER_SIZE,
    Frame,
    FrameError,
    Header,
)
from lockstep.collectives.network.streams import Buffer, Incoming, Outgoing, Stream
from lockstep.collectives.plan import HostPlan
from lockstep.collectives.shared.control_segment import ControlSegment
from lockstep.errors import PeerLostError
from lockstep.system.clock import Clock

_PIECE = 1 << 20
"""Bytes of a blob for which memory is taken before they arrive."""


@dataclass(frozen=True)
class Link:
    """The two streams between a worker and the worker of its lane on another host, one for each direction.

    Attributes:
        outgoing: the stream to the other worker.
        incoming: the stream from the other worker.
    """

    outgoing: Stream
    incoming: Stream


class Lane:
    """The connections of one lane; for the thread of its worker.

    `index` is the number of the lane, and of its worker among those of each host.

    Attributes:
        announced: the number of the newest call that this worker has announced to the other hosts.
        waited: seconds for which this worker has waited for other hosts to make a call, or for data while
            nothing arrived.
    """

    def __init__(
        self,
        index: int,
        links: Mapping[int, Link],
        hosts: HostPlan,
        names: Sequence[str],
        segment: ControlSegment,
        policy: WaitPolicy,
        observe: WaitObserver | None,
        clock: Clock,
    ) -> None:
        self._outgoing = {host: Outgoing(links[host].outgoing, len(hosts.hosts)) for host in hosts.others}
        self._incoming = {host: Incoming(links[host].incoming) for host in hosts.others}
        self._index = index
        self._hosts = hosts
        self._names = names
        self._segment = segment
        self._policy = policy
        self._observe = observe
        self._clock = clock
        self._has_ended = False
        self._sent = b""
        self.waited = 0.0
        self.announced = 0

    def send(self, header: Header, *payload: Buffer) -> None:
        """Send a frame to all other hosts; return at once."""
        self.announced = max(self.announced, header.number)
        self._sent = encoded = header.encode()
        for outgoing in self._outgoing.values():
            outgoing.send(encoded, *payload)

    def send_to(self, host: int, header: Header, *payload: Buffer) -> None:
        """Send a frame to one host; return at once."""
        self.announced, self._sent = max(self.announced, header.number), b""
        self._outgoing[host].send(header.encode(), *payload)

    def send_buffers(self, host: int, buffers: Iterable[Buffer]) -> None:
        """Send the data after a header; another thread iterates `buffers`."""
        self._outgoing[host].send_each(buffers)

    def send_chunk(self, chunk: Buffer) -> None:
        """Send the data after a header to all other hosts."""
        for outgoing in self._outgoing.values():
            outgoing.send_each((chunk,))

    def headers(self, call: CollectiveCall, sent: Header) -> dict[int, Header]:
        """Receive the headers with which other hosts answer `sent`; headers that equal it are this object.

        Raises:
            PeerLostError, PeerStuckError: as `Communicator` states.
        """
        remaining = list(self._hosts.others)
        begun, before = time.perf_counter(), self.waited
        headers = {}
        try:
            with self.wait(call, remaining) as wait:
                for host in self._hosts.others:
                    headers[host] = self._header(host, call, sent, wait)
                    remaining.remove(host)
        finally:
            # This is the whole wait, not only the silence that the wait has counted.
            self.waited = before + time.perf_counter() - begun
        return headers

    def header(self, host: int, call: CollectiveCall, sent: Header) -> Header:
        """Receive the header of one other host; see `headers`."""
        with self.wait(call, [host]) as wait:
            return self._header(host, call, sent, wait)

    def _header(self, host: int, call: CollectiveCall, sent: Header, wait: "HostWait") -> Header:
        data = bytearray(HEADER_SIZE)
        self.receive(host, memoryview(data), wait)
        if data == self._sent:
            return sent
        try:
            header = Header.decode(bytes(data))
            if header.frame is Frame.ABORT:
                self._end_with(host, header, wait)
            if header.frame is Frame.LEFT:
                raise PeerLostError(f"worker {header.step} has left while others wait in {call}")
            if (header.frame, header.number, header.step) != (sent.frame, sent.number, sent.step):
                raise FrameError(
                    f"{header.frame.name} {header.step} of call {header.number} "
                    f"instead of {sent.frame.name} {sent.step} of call {sent.number}"
                )
        except FrameError as error:
            raise self.malformed(host, call, error) from error
        return header

    def _end_with(self, host: int, header: Header, wait: "HostWait") -> NoReturn:
        if header.length > REASON_LIMIT:
            raise FrameError(f"a reason of {header.length} bytes")
        data = bytearray(header.length)
        self.receive(host, memoryview(data), wait)
        reason = data.decode("utf-8", "replace")
        self._segment.abort(reason)
        raise PeerLostError(reason)

    def malformed(self, host: int, call: CollectiveCall, error: Exception) -> PeerLostError:
        """Return the error for malformed data from another host."""
        return PeerLostError(f"{self._peer(host)} sent data in {call} that are not of this exchange: {error}")

    def check_length(self, host: int, call: CollectiveCall, length: int, expected: int) -> None:
        """Check how many bytes follow a header of another host.

        Raises:
            PeerLostError: not as many as expected.
        """
        if length != expected:
            raise self.malformed(host, call, FrameError(f"{length} bytes instead of {expected}"))

    def receive(self, host: int, view: memoryview, wait: "HostWait") -> None:
        """Fill `view` with data of another host.

        Raises:
            PeerLostError, PeerStuckError: as `Communicator` states.
        """
        try:
            self._incoming[host].receive(view, wait)
        except OSError as error:
            raise self._lost(host, wait.call, error) from error

    def receive_blob(self, host: int, length: int, wait: "HostWait") -> bytes:
        """Receive `length` bytes; memory is allocated as they arrive."""
        parts, rest = [], length
        while rest:
            part = bytearray(min(rest, _PIECE))
            self.receive(host, memoryview(part), wait)
            parts.append(part)
            rest -= len(part)
        return b"".join(parts)

    def drain(self, host: int, length: int, wait: "HostWait") -> None:
        """Receive `length` bytes, and drop them."""
        part = memoryview(bytearray(min(length, _PIECE)))
        while length:
            self.receive(host, part[: min(length, _PIECE)], wait)
            length -= min(length, _PIECE)

    def flush(self, call: CollectiveCall) -> None:
        """Wait until everything has been sent, so that it arrives even if this process ends.

        Raises:
            PeerLostError, PeerStuckError: as `Communicator` states.
        """
        before = self.waited
        try:
            for host, outgoing in self._outgoing.items():
                if not outgoing.is_idle:
                    with self.wait(call, [host]) as wait:
                        while not outgoing.flush(MAX_BLOCK_SECONDS):
                            if outgoing.error is not None:
                                raise self._lost(host, call, outgoing.error)
                            wait.blocked()
        finally:
            # The data of this worker may have left during the whole time.
            self.waited = before

    def wait(self, call: CollectiveCall, remaining: Sequence[int]) -> "HostWait":
        """Return a wait for the hosts in `remaining`, from which the caller may remove hosts."""
        return HostWait(self, call, remaining)

    def farewell(self, reason: str) -> None:
        """Tell the other hosts, if connections allow it, that the view has ended."""
        text = reason.encode("utf-8", "replace")[:REASON_LIMIT]
        self._end(Header(Frame.ABORT, length=len(text)), text)

    def close(self) -> None:
        """Tell the other hosts that this worker makes no more calls, and close the connections."""
        if not self._has_ended:
            worker = self._hosts.workers_here[self._index]
            self._end(Header(Frame.LEFT, step=worker))
        for outgoing in self._outgoing.values():
            outgoing.close()
        for incoming in self._incoming.values():
            incoming.close()

    def _end(self, header: Header, text: bytes = b"") -> None:
        if not self._has_ended:
            self._has_ended = True
            for outgoing in self._outgoing.values():
                if outgoing.is_idle:
                    outgoing.send(header.encode(), text)
                outgoing.end()

    def raise_if_broken(self, call: CollectiveCall) -> None:
        """Check that the view still exists, and that all sending has succeeded.

        Raises:
            PeerLostError: the view has ended, or sending has failed.
        """
        reason = self._segment.reason()
        if reason is not None:
            raise PeerLostError(reason)
        for host, outgoing in self._outgoing.items():
            if outgoing.error is not None and not self._incoming[host].is_readable():
                raise self._lost(host, call, outgoing.error)

    def _lost(self, host: int, call: CollectiveCall, error: Exception) -> PeerLostError:
        return PeerLostError(f"lost the connection to {self._peer(host)} in {call}: {error}")

    def _peer(self, host: int) -> str:
        return f"worker {self._hosts.hosts[host][self._index]} on {self._names[host]}"


class HostWait:
    """The context of a wait for other hosts: it reports, and ends with the view or if nothing arrives."""

    def __init__(self, lane: Lane, call: CollectiveCall, remaining: Sequence[int]) -> None:
        self.call = call
        self._lane = lane
        self._remaining = remaining
        self._wait: CallWait | None = None
        self._silent_since = 0.0
        self._shown = len(lane._hosts.workers_here) > 1

    def __enter__(self) -> Self:
        self._show(self._remaining)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._end_silence()
        self._show(())

    def advanced(self) -> None:
        """Note that bytes have arrived, which restarts the time limit."""
        self._end_silence()
        reason = self._lane._segment.reason()
        if reason is not None:
            raise PeerLostError(reason)

    def blocked(self) -> None:
        """Report, if due, that nothing has arrived.

        Raises:
            PeerLostError: the view has ended, or a connection is lost.
            PeerStuckError: the policy's timeout has passed.
        """
        lane = self._lane
        lane.raise_if_broken(self.call)
        if self._wait is None:
            self._wait = CallWait(self.call, lane._policy, lane._observe, lane._clock)
            self._silent_since = time.perf_counter() - MAX_BLOCK_SECONDS
        missing = [host for host in self._remaining if not lane._incoming[host].is_readable()]
        missing = missing or list(self._remaining)
        self._show(missing)
        self._wait.check(tuple(worker for host in sorted(missing) for worker in lane._hosts.hosts[host]))

    def _end_silence(self) -> None:
        if self._wait is not None:
            self._wait = None
            self._lane.waited += time.perf_counter() - self._silent_since

    def _show(self, missing: Sequence[int]) -> None:
        """Tell the other workers of this host which hosts this worker waits for."""
        if self._shown:
            self._lane._segment.post_missing(self._lane._index, sum(1 << host for host in missing))
