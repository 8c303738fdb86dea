"""A channel between two processes of any hosts: a TCP connection, encrypted or not, or two pipes.

Its frames are a length in 4 bytes and a packet as in `packet_channel`. Attachments cannot leave a host.

Its descriptor is an epoll instance, readable when there is something to receive, to write, or to do for the
handshake. So the event loop serves it like any channel, and encryption needs neither a thread nor a blocking
call. A length is checked before memory is allocated, and the queue for a slow peer is limited.
"""

import contextlib
import fcntl
import os
import select
import socket
import ssl
import struct
import sys
import termios
import threading
import time
from collections import deque
from typing import Any, Generic, Self, TypeVar

import msgspec

from lockstep.protocol.channel import Attachment, PeerGone, Unreadable, too_long
from lockstep.protocol.credentials import Credentials
from lockstep.transport.packet_channel import MAX_PACKET, PacketDecoder, encode
from lockstep.transport.tls import describe_tls_error, job_context

MAX_QUEUED = 8 * MAX_PACKET
"""Maximum bytes that a channel keeps for a slow peer; `send` refuses more."""

_LENGTH = struct.Struct(">I")
_CHUNK = 64 * 1024
_ACKNOWLEDGED = 0.001
"""Seconds between two questions whether the peer has acknowledged everything."""

Out = TypeVar("Out", bound=msgspec.Struct)
In = TypeVar("In")


class _LastPacket:
    """Encodes messages; one that goes to many hosts in a row is encoded once. May be used by any thread."""

    def __init__(self) -> None:
        self._last: tuple[msgspec.Struct | None, bytes] = None, b""

    def of(self, message: msgspec.Struct) -> bytes:
        """Return the packet of a message, which never changes; see `encode`.

        Raises:
            TypeError: the message has an attachment.
        """
        last, packet = self._last
        if last is not message:
            attachments: list[Attachment] = []
            packet = encode(message, attachments)
            if attachments:
                raise TypeError(f"a {type(message).__name__} with an attachment cannot leave its host")
            self._last = message, packet
        return packet


_last_packet = _LastPacket()


class StreamChannel(Generic[Out, In]):
    """One end of a stream of bytes; see `Channel`.

    `receive` does all the work: it also writes queued messages, and takes part in the handshake of
    encryption. `fileno` is readable when there is something to do, so a loop only has to call `receive` then.

    Args:
        incoming: the union of the types of messages that arrive here.
        reading: the descriptor from which to read, which now belongs to the channel.
        writing: the descriptor to which to write, which now belongs to the channel; it may be the same.
        tls: the context that encrypts the stream, if any.
        accepted: with `tls`, whether this end accepted the connection; the other end opened it.
        most_queued: maximum bytes to keep for a slow peer; `send` refuses more.
        tcp: whether the descriptors are a TCP connection.

    Attributes:
        received: number of bytes that have arrived.

    Raises:
        OSError: this process has too many descriptors. Those of the stream are closed.
    """

    def __init__(
        self,
        incoming: Any,
        reading: int,
        writing: int,
        *,
        tls: ssl.SSLContext | None = None,
        accepted: bool = False,
        most_queued: int = MAX_QUEUED,
        tcp: bool = False,
    ) -> None:
        self._most_queued, self._tcp = most_queued, tcp
        self.received = 0
        self._decoder: PacketDecoder[In] = PacketDecoder(incoming)
        self._reading, self._writing = reading, writing
        self._lock = threading.Lock()
        self._arrived = bytearray()
        self._ended = False
        self._fault: str | None = None
        # These are frames to encrypt, and bytes to write.
        self._frames: deque[bytes] = deque()
        self._frame_bytes = 0
        self._output = bytearray()
        self._deaf = False
        self._tls = _Tls(tls, accepted) if tls is not None else None
        self._has_more = False
        self._writes = False
        self._closed = False
        with contextlib.ExitStack() as opened:
            for descriptor in {reading, writing}:
                opened.callback(os.close, descriptor)
                os.set_blocking(descriptor, False)
            # Its count is nonzero while `receive` has something to return although nothing arrives.
            self._more = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            opened.callback(os.close, self._more)
            self._events = opened.enter_context(select.epoll())
            self._events.register(self._more, select.EPOLLIN)
            self._events.register(reading, select.EPOLLIN)
            opened.pop_all()
        with self._lock:
            self._step()

    @classmethod
    def over(
        cls,
        connection: socket.socket,
        incoming: Any,
        credentials: Credentials | None,
        *,
        accepted: bool,
        most_queued: int = MAX_QUEUED,
    ) -> Self:
        """Return a channel over a connected socket, which now belongs to it.

        Args:
            connection: the socket, after the greeting.
            incoming: the union of the types of messages that arrive here.
            credentials: the credentials with which the connection may be encrypted; None if it is not.
            accepted: whether this end accepted the connection; the other end opened it.
            most_queued: maximum bytes to keep for a slow peer.
        """
        tls = None
        if credentials is not None and credentials.encrypted:
            tls = job_context(credentials, accepted=accepted)
        tcp = connection.family != socket.AF_UNIX
        if tcp:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        descriptor = connection.detach()
        return cls(
            incoming, descriptor, descriptor, tls=tls, accepted=accepted, most_queued=most_queued, tcp=tcp
        )

    @property
    def established(self) -> bool:
        """Whether messages can travel: the handshake of encryption, if any, is complete."""
        return self._tls is None or self._tls.established

    def send(self, message: Out, patience: float = 0.0) -> bool:
        """Send a message, or queue it; see `Channel`.

        Raises:
            TypeError: the message has an attachment.
        """
        try:
            packet = _last_packet.of(message)
        except (ValueError, RecursionError):
            return False
        frame = _LENGTH.pack(len(packet)) + packet
        until = time.monotonic() + patience
        while True:
            with self._lock:
                if self._closed:
                    return False
                self._step()
                if self._ended or self._deaf:
                    return False
                if self.queued + len(frame) <= self._most_queued:
                    self._frames.append(frame)
                    self._frame_bytes += len(frame)
                    self._step()
                    return True
            if not self._wait_for_room(until):
                return False

    def receive(self) -> In | Unreadable | PeerGone | None:
        """Return the next message, if any; see `Channel`."""
        with self._lock:
            if self._closed:
                return PeerGone()
            try:
                self._step()
                return self._next()
            finally:
                self._announce()

    def flush(self, patience: float) -> bool:
        """Wait at most `patience` seconds until the host of the peer has all messages; return whether it has.

        It is not enough that this kernel has them: it drops messages on their way when the peer sends data to
        a connection that is closed here.
        """
        until = time.monotonic() + patience
        while True:
            with self._lock:
                if self._closed:
                    return False
                self._step()
                if self._deaf or not self._unseen:
                    return not self._deaf
            if not self._wait_for_room(until):
                return False

    def see_off(self, patience: float) -> bool:
        """Wait like `flush`, as long as the peer takes some bytes every `patience` seconds.

        Returns:
            Whether its host has all messages.
        """
        while True:
            before = self._unseen
            if self.flush(patience):
                return True
            if self._unseen >= before:
                return False

    def fileno(self) -> int:
        """Return a descriptor that is readable when `receive` has something to return, or to do."""
        return -1 if self._closed else self._events.fileno()

    def close(self) -> None:
        """Close this end; safe to call more than once. Messages that `flush` did not see off may be lost."""
        with self._lock:
            if self._closed:
                return
            self._flush()
            self._closed = True
            self._events.close()
            os.close(self._more)
            _close(self._reading)
            if self._writing != self._reading:
                os.close(self._writing)

    @property
    def queued(self) -> int:
        """Number of bytes that the kernel has not taken yet."""
        return self._frame_bytes + len(self._output)

    @property
    def _unseen(self) -> int:
        """Number of bytes that the host of the peer does not have yet, if this end can know it."""
        if self._closed or not self._tcp:
            return self.queued
        answer = fcntl.ioctl(self._writing, termios.TIOCOUTQ, bytes(4))
        return self.queued + int.from_bytes(answer, sys.byteorder)

    def _step(self) -> None:
        """Read a complete frame, and write, as much as is possible now."""
        while not self._ended and self._fault is None and not self._complete():
            if not self._read():
                break
        self._flush()
        self._announce()

    def _complete(self) -> bool:
        """Whether a whole frame, or one that is too long, has arrived."""
        if len(self._arrived) < _LENGTH.size:
            return False
        length: int = _LENGTH.unpack_from(self._arrived)[0]
        return length > MAX_PACKET or len(self._arrived) >= _LENGTH.size + length

    def _read(self) -> bool:
        """Read bytes that have arrived; return whether there may be more."""
        try:
            data = os.read(self._reading, _CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            # The peer ended without reading everything. Its own messages have been read before this error.
            data = b""
        if not data:
            self._ended = True
            return False
        self.received += len(data)
        if self._tls is None:
            self._arrived += data
            return True
        try:
            self._tls.decrypt(data, self._arrived)
        except ssl.SSLError as error:
            self._fail(describe_tls_error(error))
        self._output += self._tls.outgoing.read()
        return True

    def _fail(self, fault: str) -> None:
        """Give up the stream, because nothing that follows can be read."""
        self._fault = fault
        self._frames.clear()
        self._frame_bytes = 0
        self._deaf = True

    def _next(self) -> In | Unreadable | PeerGone | None:
        if self._complete():
            (length,) = _LENGTH.unpack_from(self._arrived)
            if length <= MAX_PACKET:
                packet = bytes(self._arrived[_LENGTH.size : _LENGTH.size + length])
                del self._arrived[: _LENGTH.size + length]
                try:
                    return self._decoder.decode(packet)
                except ValueError as error:
                    return Unreadable(str(error))
            self._arrived.clear()
            self._fail(too_long(length, MAX_PACKET))
        if self._fault is not None:
            fault, self._fault = self._fault, None
            self._ended = True
            return Unreadable(fault)
        return PeerGone() if self._ended else None

    def _flush(self) -> None:
        """Write as much as the kernel takes."""
        while True:
            if not self._output and self._frames and self.established:
                frame = self._frames.popleft()
                self._frame_bytes -= len(frame)
                self._output += frame if self._tls is None else self._tls.encrypt(frame)
            elif self._tls is not None and not self._output:
                self._output += self._tls.outgoing.read()
            if not self._output:
                break
            try:
                written = os.write(self._writing, self._output[:_CHUNK])
            except BlockingIOError:
                break
            except OSError:
                self._deaf = True
                self._frames.clear()
                self._frame_bytes = 0
                self._output.clear()
                break
            del self._output[:written]

    def _announce(self) -> None:
        """Make `fileno` readable if there is something to do, and otherwise not."""
        more = self._complete() or self._ended or self._fault is not None
        if more != self._has_more:
            self._has_more = more
            os.eventfd_write(self._more, 1) if more else os.eventfd_read(self._more)
        if (writes := bool(self._output)) != self._writes:
            self._writes = writes
            if self._writing == self._reading:
                wanted = select.EPOLLIN | (select.EPOLLOUT if writes else 0)
                self._events.modify(self._reading, wanted)
            elif writes:
                self._events.register(self._writing, select.EPOLLOUT)
            else:
                # A pipe without a reader is always ready.
                self._events.unregister(self._writing)

    def _wait_for_room(self, until: float) -> bool:
        """Wait until a step may make room in the queue; return False when it is `until`."""
        left = until - time.monotonic()
        if left <= 0:
            return False
        poll = select.poll()
        if self._output:
            poll.register(self._writing, select.POLLOUT)
        elif self._frames:
            # The handshake waits for the peer.
            poll.register(self._reading, select.POLLIN)
        else:
            # There is no event when bytes are acknowledged.
            left = min(left, _ACKNOWLEDGED)
        poll.poll(left * 1000)
        return True


class _Tls:
    """One end of an encrypted stream, apart from the descriptors."""

    def __init__(self, context: ssl.SSLContext, accepted: bool) -> None:
        self._incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._stream = context.wrap_bio(self._incoming, self.outgoing, server_side=accepted)
        self.established = False
        self._handshake()

    def _handshake(self) -> None:
        with contextlib.suppress(ssl.SSLWantReadError):
            self._stream.do_handshake()
            self.established = True

    def decrypt(self, data: bytes, plain: bytearray) -> None:
        """Decrypt as much as possible now that `data` has arrived, and add it to `plain`.

        Raises:
            ssl.SSLError: the peer is not trusted, does not trust this end, or does not encrypt.
        """
        self._incoming.write(data)
        if not self.established:
            self._handshake()
        if self.established:
            with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLZeroReturnError):
                while chunk := self._stream.read(_CHUNK):
                    plain += chunk

    def encrypt(self, data: bytes) -> bytes:
        """Return the encrypted bytes."""
        self._stream.write(data)
        return self.outgoing.read()


def _close(descriptor: int) -> None:
    """Close a descriptor; the peer of a connection still receives everything that was written."""
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:
        os.close(descriptor)
        return
    with connection, contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
        # If unread bytes remain, the kernel resets the connection, and the peer may lose data.
        while connection.recv(_CHUNK, socket.MSG_DONTWAIT):
            pass
