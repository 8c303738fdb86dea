"""The contract `Channel`, tested for every implementation."""

import contextlib
import gc
import os
import select
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from lockstep.observability.events import ScriptEnded, ScriptFailed, WaitReported, WorkerReady
from lockstep.protocol.channel import Attachment, Channel, PeerGone, Unreadable
from lockstep.protocol.worker import EventReport, FailureReport, Position, StateGiven
from lockstep.transport.keys import JobKey
from lockstep.transport.local_channel import LocalChannel
from lockstep.transport.packet_channel import PacketChannel
from lockstep.transport.stream_channel import StreamChannel

Ends = tuple[Channel[Any, Any], Channel[Any, Any]]
MESSAGES = EventReport | FailureReport | StateGiven
READY = EventReport(WorkerReady(0))


def ended(status: int) -> EventReport:
    return EventReport(ScriptEnded(0, status))


def packet_pair() -> Ends:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return PacketChannel(one, MESSAGES), PacketChannel(other, MESSAGES)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return one, other


def socket_pair() -> Ends:
    one, other = tcp_pair()
    return (
        StreamChannel.over(one, MESSAGES, None, accepted=False),
        StreamChannel.over(other, MESSAGES, None, accepted=True),
    )


def pipe_pair() -> Ends:
    (there, to), (back, here) = os.pipe(), os.pipe()
    return StreamChannel(MESSAGES, back, to), StreamChannel(MESSAGES, there, here)


def encrypted_pair() -> Ends:
    one, other = tcp_pair()
    key = JobKey.generate()
    pair = (
        StreamChannel[Any, Any].over(one, MESSAGES, key.mint(), accepted=False),
        StreamChannel[Any, Any].over(other, MESSAGES, key.mint(), accepted=True),
    )
    while not all(end.established for end in pair):
        assert [end.receive() for end in pair] == [None, None]
    return pair


STREAMS = {"socket": socket_pair, "pipes": pipe_pair, "encrypted": encrypted_pair}
ALL = {"local": LocalChannel.pair, "packets": packet_pair} | STREAMS


@contextlib.contextmanager
def closing(pair: Ends) -> Iterator[Ends]:
    yield pair
    for end in pair:
        end.close()


@pytest.fixture(params=ALL)
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    with closing(ALL[request.param]()) as pair:
        yield pair


@pytest.fixture(params=["local", "packets"])
def local_ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    """Ends within one host, over which attachments travel."""
    with closing(ALL[request.param]()) as pair:
        yield pair


@pytest.fixture(params=STREAMS)
def streams(request: pytest.FixtureRequest) -> Iterator[Ends]:
    with closing(STREAMS[request.param]()) as pair:
        yield pair


@pytest.fixture(params=["packets", *STREAMS])
def bounded(request: pytest.FixtureRequest) -> Iterator[Ends]:
    """Ends whose queue has a limit."""
    with closing(ALL[request.param]()) as pair:
        yield pair


@pytest.fixture
def packets() -> Iterator[Ends]:
    pair = packet_pair()
    yield pair
    for end in pair:
        end.close()


def is_readable(channel: Channel[Any, Any]) -> bool:
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def memory(text: bytes) -> Attachment:
    descriptor = os.memfd_create("test")
    os.write(descriptor, text)
    return Attachment(descriptor)


def test_messages_arrive_in_order_in_both_directions(ends: Ends) -> None:
    one, other = ends
    for number in range(3):
        assert one.send(ended(number))
    assert other.send(ended(3))
    assert [other.receive() for _ in range(4)] == [
        *(ended(number) for number in range(3)),
        None,
    ]
    assert [one.receive(), one.receive()] == [ended(3), None]


def test_a_channel_is_readable_when_there_is_something_to_receive(ends: Ends) -> None:
    one, other = ends
    assert not is_readable(other)
    one.send(READY)
    one.send(ended(0))
    assert is_readable(other)
    other.receive()
    assert is_readable(other)
    other.receive()
    assert not is_readable(other)
    one.close()
    assert is_readable(other)
    assert other.receive() == PeerGone()
    assert is_readable(other)


def test_peer_gone_follows_the_last_message_and_repeats(ends: Ends) -> None:
    one, other = ends
    # If an end closes with unread messages, the kernel reports that in another way.
    other.send(READY)
    one.send(READY)
    one.send(ended(1))
    one.close()
    one.close()
    assert [other.receive() for _ in range(4)] == [READY, ended(1), PeerGone(), PeerGone()]


def test_send_to_a_closed_peer_returns_false(ends: Ends) -> None:
    one, other = ends
    one.close()
    assert not other.send(READY)
    assert not other.send(READY, patience=1.0)
    assert not one.send(READY)


@pytest.mark.usefixtures("closes_descriptors")
def test_the_receiver_owns_its_descriptor_of_an_attachment(local_ends: Ends) -> None:
    one, other = local_ends
    sent = memory(b"state")
    assert one.send(StateGiven(1, True, state=sent))
    received = other.receive()
    assert isinstance(received, StateGiven)
    assert received.state is not None
    del sent
    gc.collect()
    descriptor = received.state.take()
    assert received.state.is_missing
    assert os.pread(descriptor, 10, 0) == b"state"
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)
    del received


@pytest.mark.usefixtures("closes_descriptors")
def test_unreferenced_attachments_are_closed(local_ends: Ends) -> None:
    one, other = local_ends
    for _ in range(5):
        one.send(StateGiven(1, True, state=memory(b"")))
    for _ in range(5):
        other.receive()


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, Channel[Any, Any]]]:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with mine, theirs:
        yield mine, PacketChannel(theirs, MESSAGES)


@pytest.mark.parametrize("packet", [b"{", b"[]", b'{"type":"nix"}', b'{"type":"position","state":0}'])
def test_an_invalid_packet_is_unreadable(raw: tuple[socket.socket, Channel[Any, Any]], packet: bytes) -> None:
    mine, channel = raw
    mine.send(packet)
    mine.send(b'{"type":"report","event":{"event":"ready","worker":0}}')
    assert isinstance(channel.receive(), Unreadable)
    assert channel.receive() == READY


def test_an_attachment_that_did_not_arrive_is_missing(raw: tuple[socket.socket, Channel[Any, Any]]) -> None:
    mine, channel = raw
    mine.send(b'{"type":"given","view":1,"whole":true,"state":0}')
    reply = channel.receive()
    assert isinstance(reply, StateGiven)
    assert reply.state is not None
    assert reply.state.is_missing


def test_send_does_not_block_if_the_peer_does_not_receive(bounded: Ends) -> None:
    one, _ = bounded
    message = FailureReport(ScriptFailed(0, "x", "a" * 60_000), 1, False)
    sent = 0
    while one.send(message):
        sent += 1
    assert sent > 0
    assert not one.send(message)


def test_send_refuses_a_message_that_is_too_large(bounded: Ends) -> None:
    one, other = bounded
    assert not one.send(EventReport(WaitReported(0, "x", tuple(range(200_000)), 0.0)))
    assert other.receive() is None


def test_a_message_of_another_type_is_unreadable(packets: Ends) -> None:
    one, other = packets
    one.send(Position(memory(b"")))
    assert isinstance(other.receive(), Unreadable)
