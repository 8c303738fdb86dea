"""Streams of states between hosts: exact bytes, bounded memory, and a clear end of those that fail."""

import contextlib
import fcntl
import os
import socket
import ssl
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import CheckpointError, NetworkError
from lockstep.protocol.channel import Attachment
from lockstep.protocol.greeting import SIZE, ConnectionKind, Greeting
from lockstep.transport import state_stream
from lockstep.transport.addresses import join_address
from lockstep.transport.dial import accept, dial
from lockstep.transport.keys import JobKey
from lockstep.transport.state_stream import PIECE, receive_state, send_state

LONG = 120.0
KEY = JobKey.generate()


def nothing() -> None:
    """Let a stream continue."""


def memory(data: bytes) -> Attachment:
    state = Attachment(os.memfd_create("test", os.MFD_CLOEXEC))
    with os.fdopen(os.dup(state.descriptor), "wb") as file:
        file.write(data)
    return state


def contents(state: Attachment) -> bytes:
    return os.pread(state.descriptor, 1 << 30, 0)


def stream_of(data: bytes) -> bytes:
    return data + xxhash.xxh3_128_digest(data)


@contextlib.contextmanager
def at_the_other_end(connection: socket.socket, act: Callable[[socket.socket], Any]) -> Iterator[None]:
    """Act on a connection in a thread, then close it; a connection that ends early ends the act."""

    def run() -> None:
        with connection, contextlib.suppress(OSError, NetworkError):
            act(connection)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join(LONG)
    assert not thread.is_alive()


def send(data: bytes) -> Callable[[socket.socket], None]:
    return lambda connection: send_state(connection, memory(data), nothing)


@settings(deadline=None, derandomize=True)
@given(st.binary(max_size=100), st.integers(1, 30))
def test_any_state_arrives_exactly(data: bytes, piece: int) -> None:
    here, there = socket.socketpair()
    with patch.object(state_stream, "PIECE", piece), here, at_the_other_end(there, send(data)):
        state = receive_state(here, len(data), nothing)
    assert contents(state) == data
    assert fcntl.fcntl(state.descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK


@settings(deadline=None, derandomize=True)
@given(st.binary(max_size=60), st.data())
def test_a_stream_that_ends_early_is_no_state(data: bytes, drawn: st.DataObject) -> None:
    here, there = socket.socketpair()
    part = stream_of(data)[: drawn.draw(st.integers(0, len(data) + 15))]
    with (
        here,
        at_the_other_end(there, lambda connection: connection.sendall(part)),
        pytest.raises(NetworkError, match="is broken: the other host has closed it"),
    ):
        receive_state(here, len(data), nothing)


@settings(deadline=None, derandomize=True)
@given(st.binary(min_size=1, max_size=60), st.data())
def test_a_changed_byte_is_found(data: bytes, drawn: st.DataObject) -> None:
    changed = bytearray(stream_of(data))
    changed[drawn.draw(st.integers(0, len(changed) - 1))] ^= 1 << drawn.draw(st.integers(0, 7))
    here, there = socket.socketpair()
    with (
        here,
        at_the_other_end(there, lambda connection: connection.sendall(changed)),
        pytest.raises(NetworkError, match="differs from the one that was sent"),
    ):
        receive_state(here, len(data), nothing)


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_a_large_state_needs_little_memory(encrypted: bool) -> None:
    credentials = KEY.mint(encrypted=encrypted)
    data = os.urandom(PIECE) * 12 + b"end"
    state = memory(data)
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialed: list[socket.socket] = []

        def give(connection: socket.socket) -> None:
            connection.recv(SIZE, socket.MSG_WAITALL)
            with accept(connection, credentials, LONG) as accepted:
                send_state(accepted, state, nothing)

        with at_the_other_end(server, lambda listening: give(listening.accept()[0])):
            greeting = Greeting(ConnectionKind.STATE, view=2, lane=1)
            dialed.append(dial(join_address(server.getsockname()), greeting, credentials, LONG))
            assert isinstance(dialed[0], ssl.SSLSocket) == encrypted
            tracemalloc.start()
            with dialed[0]:
                found = receive_state(dialed[0], len(data), nothing)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
    assert contents(found) == data
    assert peak < 4 * PIECE


def test_no_memory_is_taken_for_a_state_that_does_not_fit() -> None:
    here, there = socket.socketpair()
    with (
        here,
        there,
        pytest.raises(CheckpointError, match=rf"it has {2**62} bytes, and \d+ bytes of memory are"),
    ):
        receive_state(here, 2**62, nothing)


def test_memory_that_ends_while_the_state_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda *_: os.pread(-1, 1, 0))
    here, there = socket.socketpair()
    there.sendall(stream_of(b"abc"))
    with here, there, pytest.raises(CheckpointError, match="does not fit into memory: Bad file descriptor"):
        receive_state(here, 3, nothing)


def trickle(connection: socket.socket) -> None:
    while connection.send(b"x"):
        time.sleep(0.01)


STALLED = r"a piece took more than 0\.1 s"


@pytest.mark.parametrize("act", [lambda connection: connection.recv(1), trickle], ids=["silent", "slow"])
def test_a_stream_that_stalls_ends(monkeypatch: pytest.MonkeyPatch, act: Any) -> None:
    monkeypatch.setattr(state_stream, "STALL", 0.1)
    here, there = socket.socketpair()
    with at_the_other_end(there, act), here, pytest.raises(NetworkError, match=STALLED):
        receive_state(here, PIECE, nothing)


def test_a_receiver_that_stalls_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_stream, "STALL", 0.1)
    here, there = socket.socketpair()
    with here, there, pytest.raises(NetworkError, match=STALLED):
        send_state(here, memory(bytes(4 * PIECE)), nothing)


@pytest.mark.parametrize(
    "act",
    [
        lambda here, check: send_state(here, memory(bytes(4 * PIECE)), check),
        lambda here, check: receive_state(here, 1, check),
    ],
    ids=["sent", "received"],
)
def test_a_stream_that_is_no_longer_needed_ends(act: Callable[..., None]) -> None:
    looks = iter(range(3))

    def check() -> None:
        if next(looks, None) is None:
            raise KeyError("not needed")

    here, there = socket.socketpair()
    with here, there, pytest.raises(KeyError):
        act(here, check)
