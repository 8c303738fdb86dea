"""Streams between hosts, beyond the contract of channels: frames, limits, encryption, the end of a peer."""

import contextlib
import errno
import os
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.protocol.channel import Attachment, PeerGone, Unreadable
from lockstep.protocol.credentials import Credentials
from lockstep.protocol.worker import StateGiven
from lockstep.system.event_loop import EventLoop
from lockstep.transport import stream_channel
from lockstep.transport.keys import JobKey
from lockstep.transport.local_channel import LocalChannel
from lockstep.transport.packet_channel import MAX_PACKET, encode
from lockstep.transport.stream_channel import MAX_QUEUED, StreamChannel
from lockstep.transport.tls import job_context

PATIENCE = 120.0


class Output(msgspec.Struct, frozen=True, tag="output"):
    data: bytes


class Number(msgspec.Struct, frozen=True, tag="number"):
    value: int


MESSAGES = Output | Number
Stream = StreamChannel[Any, Any]
KEY = JobKey.generate()


def frame(message: msgspec.Struct) -> bytes:
    packet = encode(message)
    return struct.pack(">I", len(packet)) + packet


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one, other


def pair(one: Credentials | None, other: Credentials | None) -> tuple[Stream, Stream]:
    ends = connected()
    return (
        Stream.over(ends[0], MESSAGES, one, accepted=False),
        Stream.over(ends[1], MESSAGES, other, accepted=True),
    )


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, Stream]]:
    """A connection, and a channel at its other end."""
    mine, theirs = connected()
    channel = Stream.over(theirs, MESSAGES, None, accepted=True)
    with mine, contextlib.closing(channel):
        yield mine, channel


@pytest.fixture(params=[False, True], ids=["plain", "encrypted"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[Stream, Stream]]:
    """Both ends of a channel, whose handshake may not have begun."""
    made = pair(*((KEY.mint(), KEY.mint()) if request.param else (None, None)))
    yield made
    for end in made:
        end.close()


def wait(channel: Stream) -> None:
    """Wait until a channel has something to do."""
    assert select.select([channel], [], [], PATIENCE)[0]


def received(channel: Stream, *others: Stream) -> Any:
    """Return the next message of a channel, while the others are served too."""
    deadline = time.monotonic() + PATIENCE
    while (message := channel.receive()) is None:
        for other in others:
            assert other.receive() is None
        assert select.select([channel, *others], [], [], deadline - time.monotonic())[0]
    return message


def test_one_loop_serves_both_ends(ends: tuple[Stream, Stream]) -> None:
    """A long text, bytes and a burst in both directions, from before the handshake."""
    one, other = ends
    messages = [Number(1), Output(os.urandom(300_000)), Output(bytes(range(256))), *map(Number, range(300))]
    got: dict[Stream, list[Any]] = {one: [], other: []}
    with EventLoop() as loop:
        for end in ends:
            loop.watch(end.fileno(), lambda end=end: got[end].append(end.receive()))  # type: ignore[misc]
        for message in messages:
            assert one.send(message)
            assert other.send(message)
        while any(len([message for message in got[end] if message]) < len(messages) for end in ends):
            loop.turn(PATIENCE)
        # Nothing is left to do, so the loop sleeps.
        for seen in got.values():
            seen.clear()
        loop.turn(0.0)
        assert got == {one: [], other: []}


def test_a_message_to_many_is_encoded_once(
    ends: tuple[Stream, Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = []

    def noted(message: msgspec.Struct, attachments: list[Attachment]) -> bytes:
        encoded.append(message)
        return encode(message, attachments)

    monkeypatch.setattr(stream_channel, "encode", noted)
    one, other = ends
    first, equal = Number(1), Number(1)
    for end in (one, other):
        assert end.send(first, PATIENCE)
    assert one.send(equal, PATIENCE)
    assert one.send(first, PATIENCE)
    assert [received(other, one) for _ in range(3)] == [first, equal, first]
    assert received(one, other) == first
    assert [id(message) for message in encoded] == [id(first), id(equal), id(first)]


def test_what_is_queued_arrives_while_the_peer_is_slow(ends: tuple[Stream, Stream]) -> None:
    """The loop writes what the kernel did not take at first."""
    one, other = ends
    got: list[Any] = []

    def receive() -> None:
        if (message := other.receive()) is not None:
            got.append(message)

    sent = 0
    with EventLoop() as loop:
        loop.watch(one.fileno(), one.receive)
        loop.watch(other.fileno(), receive)
        for _ in range(2):
            while one.send(Output(sent.to_bytes(4, "big") * 25_000)):
                sent += 1
            assert one.queued > MAX_QUEUED // 2
            while len(got) < sent:
                loop.turn(PATIENCE)
    assert got == [Output(number.to_bytes(4, "big") * 25_000) for number in range(sent)]


def test_the_queue_has_a_limit_before_the_handshake_too(ends: tuple[Stream, Stream]) -> None:
    one, _ = ends
    for patience in (0.0, 0.001):
        while one.send(Output(bytes(300_000)), patience):
            assert one.queued <= MAX_QUEUED


def test_send_waits_for_room_while_another_thread_receives(ends: tuple[Stream, Stream]) -> None:
    one, other = ends
    count = 2 * MAX_QUEUED // 300_000
    got: list[Any] = []

    def receive() -> None:
        while len(got) < count:
            wait(other)
            if (message := other.receive()) is not None:
                got.append(message)

    receiving = threading.Thread(target=receive)
    receiving.start()
    for number in range(count):
        assert one.send(Output(bytes([number]) * 300_000), patience=PATIENCE)
    assert one.flush(PATIENCE)
    receiving.join(PATIENCE)
    assert [message.data[:1] for message in got] == [bytes([number]) for number in range(count)]


def test_flush_sees_the_last_message_off_before_the_end(ends: tuple[Stream, Stream]) -> None:
    one, other = ends
    big = Output(os.urandom(380_000))
    got: list[Any] = []

    def receive() -> None:
        while PeerGone() not in got:
            wait(other)
            if (message := other.receive()) is not None:
                got.append(message)

    receiving = threading.Thread(target=receive)
    receiving.start()
    for _ in range(10):
        assert one.send(big, patience=PATIENCE)
    assert one.flush(PATIENCE)
    one.close()
    receiving.join(PATIENCE)
    assert got == [big] * 10 + [PeerGone()]
    assert not one.flush(PATIENCE)


def test_flush_waits_until_the_other_kernel_has_everything(raw: tuple[socket.socket, Stream]) -> None:
    mine, channel = raw
    mine.settimeout(PATIENCE)
    sent, found = 0, bytearray()
    while not channel.queued:
        assert channel.send(Output(bytes(10_000)))
        sent += 1
    while channel.queued:
        found += mine.recv(65536)
        channel.flush(0.0)
    # The kernel of this end has the rest, but that of the other end has no room for it.
    assert not channel.flush(0.0)
    flushed: list[bool] = []

    def flush() -> None:
        flushed.append(channel.flush(PATIENCE))
        channel.close()

    flushing = threading.Thread(target=flush)
    flushing.start()
    while data := mine.recv(65536):
        found += data
    flushing.join(PATIENCE)
    assert flushed == [True]
    assert found == frame(Output(bytes(10_000))) * sent


def test_flush_ends_when_its_time_is_over(ends: tuple[Stream, Stream]) -> None:
    one, _ = ends
    while one.send(Output(bytes(300_000))):
        pass
    assert not one.flush(0.001)


def test_a_message_arrives_byte_by_byte(raw: tuple[socket.socket, Stream]) -> None:
    mine, channel = raw
    for byte in frame(Number(5)) + frame(Number(6)):
        assert channel.receive() is None
        mine.send(bytes([byte]))
        wait(channel)
        if (message := channel.receive()) is not None:
            assert message == Number(5)
            break
    mine.send(frame(Number(6))[1:])


def test_a_length_is_checked_before_memory_is_taken(raw: tuple[socket.socket, Stream]) -> None:
    mine, channel = raw
    mine.send(frame(Number(1)) + struct.pack(">I", MAX_PACKET + 1) + b"x" * 100)
    assert received(channel) == Number(1)
    assert received(channel) == Unreadable(f"a message of {MAX_PACKET + 1} bytes is more than {MAX_PACKET}")
    assert len(channel._arrived) == 0
    mine.send(frame(Number(2)))
    assert channel.receive() == PeerGone()
    assert not channel.send(Number(3))
    assert channel.receive() == PeerGone()


def test_an_oversized_length_at_the_end_is_named_too(raw: tuple[socket.socket, Stream]) -> None:
    mine, channel = raw
    mine.send(struct.pack(">I", 2**32 - 1))
    mine.close()
    assert isinstance(received(channel), Unreadable)
    assert channel.receive() == PeerGone()


def test_no_more_is_read_than_one_message_needs(raw: tuple[socket.socket, Stream]) -> None:
    """A peer that sends faster than this end receives waits, and fills no memory here."""
    mine, channel = raw
    mine.setblocking(False)
    data = frame(Output(bytes(1000))) * 100
    with contextlib.suppress(BlockingIOError):
        while True:
            mine.send(data)
    for _ in range(100):
        assert received(channel) == Output(bytes(1000))
        assert channel.send(Number(1))
        assert len(channel._arrived) <= len(frame(Output(bytes(1000)))) + 64 * 1024


def test_a_message_of_another_type_is_unreadable_and_the_next_one_is_read(
    raw: tuple[socket.socket, Stream],
) -> None:
    mine, channel = raw
    mine.send(struct.pack(">I", 2) + b"[]" + struct.pack(">I", 0) + frame(Number(7)))
    assert isinstance(received(channel), Unreadable)
    assert isinstance(received(channel), Unreadable)
    assert received(channel) == Number(7)


def test_an_incomplete_message_at_the_end_is_dropped(raw: tuple[socket.socket, Stream]) -> None:
    mine, channel = raw
    mine.send(frame(Number(7)) + frame(Number(8))[:-1])
    mine.close()
    assert received(channel) == Number(7)
    assert received(channel) == PeerGone()


def test_a_message_with_an_attachment_cannot_leave_its_host(raw: tuple[socket.socket, Stream]) -> None:
    _, channel = raw
    with pytest.raises(TypeError, match="StateGiven with an attachment cannot leave its host"):
        channel.send(StateGiven(1, True, state=Attachment.missing()))


def test_bytes_are_never_cut(raw: tuple[socket.socket, Stream]) -> None:
    mine, channel = raw
    data = os.urandom(380_000)
    mine.settimeout(PATIENCE)
    sending = threading.Thread(target=mine.sendall, args=(frame(Output(data)),))
    sending.start()
    assert received(channel) == Output(data)
    sending.join()


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.lists(st.binary(max_size=40), max_size=5), st.booleans())
def test_any_bytes_are_messages_or_unreadable(parts: list[bytes], encrypted: bool) -> None:
    mine, theirs = socket.socketpair()
    channel = Stream.over(theirs, MESSAGES, CREDENTIALS if encrypted else None, accepted=True)
    with mine, contextlib.closing(channel):
        for part in parts:
            mine.send(part)
            channel.receive()
        mine.shutdown(socket.SHUT_WR)
        for _ in range(100):
            if (message := channel.receive()) == PeerGone():
                break
            assert message is None or isinstance(message, Unreadable | Output | Number)
        assert channel.receive() == PeerGone()


CREDENTIALS = KEY.mint()


def outcome(one: Stream, other: Stream) -> list[Any]:
    """Return what each end receives first, besides nothing; then it is closed."""
    got: list[Any] = [None, None]
    deadline = time.monotonic() + PATIENCE
    while None in got:
        waiting = [end for number, end in enumerate((one, other)) if got[number] is None]
        assert select.select(waiting, [], [], deadline - time.monotonic())[0]
        for number, end in enumerate((one, other)):
            if got[number] is None:
                got[number] = end.receive()
                if got[number] is not None:
                    assert not isinstance(got[number], Unreadable) or end.receive() == PeerGone()
                    assert not end.send(Number(3))
                    end.close()
    return got


def test_a_stranger_exchanges_no_message() -> None:
    one, other = pair(JobKey.generate().mint(), KEY.mint())
    one.send(Number(1))
    other.send(Number(2))
    why = Unreadable("its key is not the key of this job")
    assert outcome(one, other) == [why, why]


def test_a_stranger_that_trusts_this_job_exchanges_no_message() -> None:
    careless = msgspec.structs.replace(JobKey.generate().mint(), authority=CREDENTIALS.authority)
    one, other = pair(careless, KEY.mint())
    one.send(Number(1))
    other.send(Number(2))
    why = Unreadable("its key is not the key of this job")
    assert outcome(one, other) == [why, why]


def test_an_expired_key_opens_no_channel() -> None:
    expired = JobKey(KEY.secret, int(time.time()) - 10)
    one, other = pair(expired.mint(), expired.mint())
    one.send(Number(1))
    for found in outcome(one, other):
        assert "the key of the job has expired" in found.error


@pytest.mark.parametrize("encrypts", ["opener", "accepter"])
def test_both_ends_encrypt_or_none(encrypts: str) -> None:
    credentials = (KEY.mint(), None) if encrypts == "opener" else (None, KEY.mint())
    one, other = pair(*credentials)
    one.send(Number(1))
    other.send(Number(2))
    found = outcome(one, other)
    assert all(isinstance(message, Unreadable | PeerGone) for message in found), found
    assert any("does not encrypt" in message.error for message in found if isinstance(message, Unreadable))


def test_encryption_is_tls_1_3_and_hides_messages() -> None:
    """A proxy between the ends reads the bytes."""
    one, near = connected()
    far, other = connected()
    ends = (
        Stream.over(one, MESSAGES, KEY.mint(), accepted=False),
        Stream.over(other, MESSAGES, KEY.mint(), accepted=True),
    )
    seen = bytearray()
    secret = b"a secret of the job" * 10
    ends[0].send(Output(secret))
    with near, far:
        while True:
            for source, target in ((near, far), (far, near)):
                with contextlib.suppress(BlockingIOError):
                    data = source.recv(65536, socket.MSG_DONTWAIT)
                    seen += data
                    target.sendall(data)
            assert ends[0].receive() is None
            if (message := ends[1].receive()) is not None:
                break
        assert message == Output(secret)
        # The type of a handshake record, its version, and the extension that names TLS 1.3.
        assert seen.startswith(b"\x16\x03\x01")
        assert b"\x00\x2b" in seen
        assert b"\x03\x04" in seen
        assert encode(Output(secret))[:40] not in seen
        # A changed byte is noticed.
        ends[0].send(Number(1))
        ends[0].flush(PATIENCE)
        data = bytearray(near.recv(65536))
        data[-1] ^= 1
        far.sendall(data)
        assert isinstance(received(ends[1]), Unreadable)
        assert ends[1].receive() == PeerGone()
    for end in ends:
        end.close()


def test_a_slow_handshake_blocks_nothing() -> None:
    """A peer that sends a byte of its handshake at a time costs one short step for each."""
    mine, theirs = connected()
    channel = Stream.over(theirs, MESSAGES, KEY.mint(), accepted=True)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = job_context(KEY.mint(), accepted=False).wrap_bio(incoming, outgoing)
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    for byte in outgoing.read():
        mine.send(bytes([byte]))
        wait(channel)
        assert channel.receive() is None
    assert not channel.established
    assert mine.recv(65536)
    mine.close()
    assert received(channel) == PeerGone()
    channel.close()


def test_a_pipe_whose_reader_is_gone_causes_no_busy_loop() -> None:
    """The other pipe stays open: what the peer still says is received."""
    (there, to), (back, here) = os.pipe(), os.pipe()
    channel = Stream(MESSAGES, back, to)
    os.close(there)
    assert not select.select([channel], [], [], 0)[0]
    channel.send(Number(1))
    assert not channel.send(Number(2))
    assert channel.receive() is None
    assert not select.select([channel], [], [], 0)[0]
    os.write(here, frame(Number(3)))
    assert received(channel) == Number(3)
    os.close(here)
    assert received(channel) == PeerGone()
    channel.close()


def test_a_full_pipe_is_watched_until_it_is_drained_or_broken() -> None:
    (there, to), (back, here) = os.pipe(), os.pipe()
    channel = Stream(MESSAGES, back, to)
    for _ in range(2):
        while channel.send(Output(bytes(300_000))):
            pass
        assert not select.select([channel], [], [], 0)[0]
        while channel.queued:
            os.read(there, 65536)
            wait(channel)
            assert channel.receive() is None
        assert not select.select([channel], [], [], 0)[0]
        os.set_blocking(there, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.read(there, 65536)
        os.set_blocking(there, True)
    channel.send(Output(bytes(300_000)))
    os.close(there)
    wait(channel)
    assert channel.receive() is None
    assert not select.select([channel], [], [], 0)[0]
    assert not channel.send(Number(1))
    os.close(here)
    assert received(channel) == PeerGone()
    channel.close()


@pytest.mark.parametrize("connect", [connected, socket.socketpair])
def test_what_was_written_arrives_although_the_peer_ends_without_reading(
    connect: Callable[[], tuple[socket.socket, socket.socket]],
) -> None:
    mine, theirs = connect()
    channel = Stream.over(theirs, MESSAGES, None, accepted=True)
    assert channel.send(Number(1))
    mine.sendall(frame(Number(2)) + frame(Number(3)))
    assert select.select([mine], [], [], PATIENCE)[0]
    mine.close()
    assert [received(channel) for _ in range(4)] == [Number(2), Number(3), PeerGone(), PeerGone()]
    channel.close()


def test_what_the_kernel_has_arrives_although_the_channel_is_closed_without_receiving(
    raw: tuple[socket.socket, Stream],
) -> None:
    mine, channel = raw
    mine.settimeout(PATIENCE)
    sent, found = 0, bytearray()
    # Most of it waits in the buffer of the sender.
    while not channel.queued:
        assert channel.send(Output(bytes(10_000)))
        sent += 1
    while channel.queued:
        found += mine.recv(65536)
        channel.flush(0.0)
    mine.sendall(frame(Number(2)))
    wait(channel)
    channel.close()
    while data := mine.recv(65536):
        found += data
    assert found == frame(Output(bytes(10_000))) * sent


@pytest.mark.usefixtures("closes_descriptors")
def test_a_closed_channel_has_no_descriptors(ends: tuple[Stream, Stream]) -> None:
    made = pair(KEY.mint(), KEY.mint())
    for end in made:
        end.close()
        end.close()
        assert end.fileno() == -1
        assert end.receive() == PeerGone()
        assert not end.send(Number(1))


@pytest.mark.usefixtures("closes_descriptors")
def test_channels_that_find_no_descriptors_leave_none_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    one, other = connected()
    with monkeypatch.context() as patched, other:
        patched.setattr(select, "epoll", refuse)
        with pytest.raises(OSError, match="Too many open files"):
            StreamChannel.over(one, MESSAGES, None, accepted=True)
        assert other.recv(1) == b""
    events = iter([os.eventfd(0)])
    with monkeypatch.context() as patched:
        patched.setattr(os, "eventfd", lambda *_: next(events, None) or refuse())
        with pytest.raises(OSError, match="Too many open files"):
            LocalChannel.pair()


def test_limits_are_those_of_packets() -> None:
    assert MAX_QUEUED >= 2 * MAX_PACKET
    assert stream_channel.MAX_PACKET == MAX_PACKET
