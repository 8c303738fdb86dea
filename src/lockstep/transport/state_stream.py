"""A state on its way to another host: the bytes of the memory in which it was published, then their hash.

The receiver knows the size before the first byte arrives. Both ends work in pieces, so a stream needs no
memory beyond the state and a piece at each end. Streams run in threads, because an event loop must not wait
for gigabytes.
"""

import fcntl
import os
import select
import socket
import ssl
import time
from collections.abc import Callable

import xxhash

from lockstep.errors import CheckpointError, NetworkError
from lockstep.protocol.channel import Attachment
from lockstep.system.memory import available_memory
from lockstep.transport.dial import wait_for

PIECE = 1 << 20
"""Maximum bytes that are read, sent and written at once."""

STALL = 10.0
"""Seconds that a piece may take; a stream that takes longer breaks off."""

_DIGEST = 16


def send_state(connection: socket.socket, state: Attachment, check: Callable[[], None]) -> None:
    """Send a state.

    Args:
        connection: the result of `dial` or `accept`; it becomes non-blocking.
        state: the state.
        check: called at least every 0.2 s; an error that it raises ends the stream.

    Raises:
        NetworkError: the connection has ended, or is too slow.
    """
    hashed, buffer, sent = xxhash.xxh3_128(), memoryview(bytearray(PIECE)), 0
    connection.setblocking(False)
    while length := os.preadv(state.descriptor, [buffer], sent):
        hashed.update(buffer[:length])
        _transfer(connection, buffer[:length], connection.send, select.POLLOUT, check)
        sent += length
    _transfer(connection, memoryview(hashed.digest()), connection.send, select.POLLOUT, check)


def receive_state(
    connection: socket.socket,
    size: int,
    check: Callable[[], None],
    arrived: Callable[[int], object] = lambda received: None,
) -> Attachment:
    """Return a state that arrives.

    Args:
        connection: the result of `dial` or `accept`; it becomes non-blocking.
        size: the size of the state, in bytes.
        check: called at least every 0.2 s; an error that it raises ends the stream.
        arrived: called after each piece, with the number of bytes so far.

    Raises:
        CheckpointError: there is too little memory.
        NetworkError: the connection has ended, is too slow, or has changed a byte.
    """
    if size > (room := available_memory()):
        raise CheckpointError(f"it has {size} bytes, and {room} bytes of memory are available")
    hashed, buffer, received = xxhash.xxh3_128(), memoryview(bytearray(PIECE)), 0
    connection.setblocking(False)
    try:
        state = Attachment(os.memfd_create("lockstep-state", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        while received < size:
            piece = buffer[: min(PIECE, size - received)]
            _transfer(connection, piece, connection.recv_into, select.POLLIN, check)
            hashed.update(piece)
            while piece:
                written = os.pwrite(state.descriptor, piece, received)
                piece, received = piece[written:], received + written
            arrived(received)
        # Reading beyond the end of a truncated file kills the process.
        fcntl.fcntl(state.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    except OSError as error:
        raise CheckpointError(f"it does not fit into memory: {error.strerror}") from None
    digest = memoryview(bytearray(_DIGEST))
    _transfer(connection, digest, connection.recv_into, select.POLLIN, check)
    if digest != hashed.digest():
        raise NetworkError("the state that has arrived differs from the one that was sent")
    return state


def _transfer(
    connection: socket.socket,
    piece: memoryview,
    move: Callable[[memoryview], int],
    event: int,
    check: Callable[[], None],
) -> None:
    """Send or receive the whole of a piece with `move`, which waits for `event`."""
    check()
    until = time.monotonic() + STALL
    late = f"the stream of the state has stalled: a piece took more than {STALL:g} s"
    while piece:
        wanted = event
        try:
            moved = move(piece)
            if not moved:
                raise NetworkError("the stream of the state is broken: the other host has closed it")
            piece = piece[moved:]
            if piece and time.monotonic() >= until:
                raise NetworkError(late)
            continue
        except BlockingIOError:
            pass
        except ssl.SSLWantReadError:
            wanted = select.POLLIN
        except ssl.SSLWantWriteError:
            wanted = select.POLLOUT
        except OSError as error:
            raise NetworkError(f"the stream of the state is broken: {error.strerror or error}") from None
        wait_for(connection, wanted, until, check, late)
