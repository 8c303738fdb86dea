"""The two ends of a stream. They block, but never longer than the view lives."""

import contextlib
import functools
import itertools
import select
import socket
import ssl
import struct
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeAlias

import numpy as np

from lockstep.collectives.call import MAX_BLOCK_SECONDS

Buffer: TypeAlias = memoryview | bytes
"""Contiguous bytes."""

Stream: TypeAlias = socket.socket
"""A connected stream socket; an `ssl.SSLSocket` after its handshake is one."""

SEND_BUFFERS = 1 << 20
"""Bytes that the kernel takes from all members that send to one. It would choose more itself; then the bytes
that are under way do not stay in the processor's cache."""
_SMALLEST_SEND_BUFFER = 1 << 17
RECEIVE_BATCH = 1 << 17
"""Bytes for which a receiver sleeps, if it needs twice as many: waking up for each packet takes longer than
to copy it."""
_SMALLEST_RECEIVE_BATCH = 1 << 15
_JOIN_LIMIT = 1 << 18
"""Bytes up to which the buffers of one message are joined for TLS, which encrypts record by record."""


class Wait(Protocol):
    """The methods that a receiver calls while it waits."""

    def advanced(self) -> None:
        """Note that some bytes have arrived."""

    def blocked(self) -> None:
        """Note that nothing has arrived for `MAX_BLOCK_SECONDS`; raise an error to end the wait."""


class Incoming:
    """The receiving end of a stream; for one thread.

    Methods raise OSError if the connection is lost.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._encrypted = isinstance(stream, ssl.SSLSocket)
        self._batch = 1
        if self._encrypted:
            stream.settimeout(MAX_BLOCK_SECONDS)
        else:
            # A time limit in the kernel needs no further system call, unlike Python's own.
            stream.settimeout(None)
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(MAX_BLOCK_SECONDS))

    def receive(self, view: memoryview, wait: Wait) -> None:
        """Fill `view`.

        Raises:
            OSError: the connection is lost.
        """
        while view:
            try:
                count = self._receive_some(view)
            except (BlockingIOError, TimeoutError):
                wait.blocked()
                continue
            if not count:
                raise ConnectionResetError("the other end has closed it")
            if count == len(view):
                return
            view = view[count:]
            wait.advanced()

    def _receive_some(self, view: memoryview) -> int:
        # At most half of the missing bytes: a part of them may have been copied before the kernel waits.
        batch = min(len(view) // 2, RECEIVE_BATCH)
        if batch < _SMALLEST_RECEIVE_BATCH:
            self._sleep_for(1)
            if not self._encrypted:
                return self._stream.recv_into(view, 0, socket.MSG_WAITALL)
        else:
            self._sleep_for(batch)
        return self._stream.recv_into(view)

    def _sleep_for(self, batch: int) -> None:
        """Let the kernel wake this thread when it has so many bytes."""
        if batch != self._batch:
            self._stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, batch)
            self._batch = batch

    def is_readable(self) -> bool:
        """Whether there are bytes to receive."""
        self._sleep_for(1)
        if isinstance(self._stream, ssl.SSLSocket) and self._stream.pending():
            return True
        return _poll(self._stream, select.POLLIN, 0.0)

    def close(self) -> None:
        """Close the stream."""
        self._stream.close()


class Outgoing:
    """The sending end of a stream: the calling thread sends what fits, and a separate thread the rest.

    So a member never blocks while it sends, and members that send to each other cannot block each other.
    The memory of a buffer must not change before the receiver has it.

    Attributes:
        error: why the connection is lost, if it is.
    """

    def __init__(self, stream: Stream, members: int) -> None:
        """Send on `stream`, one of the streams that connect so many `members`."""
        self._stream = stream
        self._encrypted = isinstance(stream, ssl.SSLSocket)
        if self._encrypted:
            stream.setblocking(False)
        else:
            stream.settimeout(None)
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(MAX_BLOCK_SECONDS))
        size = max(SEND_BUFFERS // members, _SMALLEST_SEND_BUFFER)
        if _allows_send_buffer(size):
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
        self._jobs: deque[Iterator[Buffer]] = deque()
        self._changed = threading.Condition()
        self._unfinished = 0
        self._thread: threading.Thread | None = None
        self._closing = False
        self.error: OSError | None = None

    @property
    def is_idle(self) -> bool:
        """Whether everything has been sent."""
        return not self._unfinished

    def send(self, *buffers: Buffer) -> None:
        """Send `buffers` after everything before; return at once."""
        rest = list(buffers)
        if not self._unfinished:
            try:
                rest = self._send_what_fits(buffers)
            except OSError as error:
                self.error = error
                return
        if rest:
            self.send_each(rest)

    def send_each(self, buffers: Iterable[Buffer]) -> None:
        """Send each of `buffers` after everything before; their iterator runs on the sending thread."""
        rest = iter(buffers)
        if not self._unfinished and not self._encrypted:
            try:
                for buffer in rest:
                    left = self._send_what_fits((buffer,))
                    if left:
                        rest = itertools.chain(left, rest)
                        break
                else:
                    return
            except OSError as error:
                self.error = error
                return
        with self._changed:
            self._jobs.append(rest)
            self._unfinished += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lockstep sender", daemon=True)
                self._thread.start()
            self._changed.notify()

    def flush(self, seconds: float) -> bool:
        """Wait until everything has been sent, for at most `seconds`; return whether it has."""
        with self._changed:
            self._changed.wait_for(lambda: self.error or not self._unfinished, seconds)
        return not self._unfinished

    def end(self) -> None:
        """Send nothing more; earlier data still arrives."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            # `SSLSocket.shutdown` ends encryption, so a thread that still sends would send plain text.
            socket.socket.shutdown(self._stream, socket.SHUT_WR)

    def close(self) -> None:
        """Send nothing more, and close the stream."""
        self.end()
        if self._thread is not None:
            self._thread.join()
        self._stream.close()

    def _send_what_fits(self, buffers: Sequence[Buffer]) -> list[Buffer]:
        if self._encrypted:
            if len(buffers) > 1 and sum(map(len, buffers)) <= _JOIN_LIMIT:
                buffers = [b"".join(buffers)]
            for index, buffer in enumerate(buffers):
                view = memoryview(buffer)
                while view:
                    try:
                        view = view[self._stream.send(view) :]
                    except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                        return [view, *buffers[index + 1 :]]
            return []
        try:
            sent = self._stream.sendmsg(buffers, (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return list(buffers)
        for index, buffer in enumerate(buffers):
            if sent < len(buffer):
                return [memoryview(buffer)[sent:], *buffers[index + 1 :]]
            sent -= len(buffer)
        return []

    def _run(self) -> None:
        with np.errstate(all="ignore"):
            while True:
                with self._changed:
                    while not self._jobs and not self._closing:
                        self._changed.wait()
                    if self._closing:
                        return
                    job = self._jobs.popleft()
                try:
                    for buffer in job:
                        self._send_all(memoryview(buffer))
                except OSError as error:
                    with self._changed:
                        self.error = error
                        self._changed.notify_all()
                    return
                with self._changed:
                    self._unfinished -= 1
                    if not self._unfinished:
                        self._changed.notify_all()

    def _send_all(self, view: memoryview) -> None:
        while view:
            if self._closing:
                raise ConnectionAbortedError("closed while sending")
            try:
                view = view[self._stream.send(view) :]
            except (BlockingIOError, TimeoutError):
                continue
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                _poll(self._stream, select.POLLOUT, MAX_BLOCK_SECONDS)


@functools.cache
def _allows_send_buffer(size: int) -> bool:
    """Whether the kernel allows such a buffer; it would itself choose a larger one than it allows."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
        # The kernel doubles the size, for its own records.
        return probe.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) >= 2 * size


def _poll(stream: Stream, event: int, seconds: float) -> bool:
    """Wait for an event, for at most `seconds`; return whether there is one."""
    poll = select.poll()
    poll.register(stream, event)
    return bool(poll.poll(seconds * 1e3))


def _timeval(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
