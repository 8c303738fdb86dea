"""A job's door: orders are answered, and nobody at the door can harm the job."""

import itertools
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.control.door import MOST_OPEN, Door, address
from lockstep.control.orders import (
    MAX_PACKET,
    MAX_TEXT,
    Ask,
    End,
    Order,
    Refused,
    Reply,
    Scale,
    Status,
    decode_order,
    decode_reply,
    encode,
)
from lockstep.errors import UnfitError

STATUS = Status("job", "a.py", 1, "/runs/job", 5.0, 4, (0, 2), (3,), 3, "fit 1")
GARBAGE = {
    "text": b"hello",
    "no text": b"\xff\x00",
    "unknown": b'{"type": "dance"}',
    "incomplete": b'{"type": "scale"}',
    "too few": b'{"type": "scale", "workers": 0}',
    "too many": b'{"type": "scale", "workers": ' + b"9" * 5000 + b"}",
    "deep": b'{"type": "ask", "x": ' + b"[" * 50_000,
    "too long": b'"' + b"x" * MAX_PACKET + b'"',
}
OPENS_AND_STAYS = """
import signal, sys
from lockstep.control.door import Door
door = Door.open(sys.argv[1], print)
print(door.name, flush=True)
signal.pause()
"""
CALLS_AS_SOMEBODY_ELSE = """
import os, socket, sys
os.setuid(65534)
client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
client.connect(bytes.fromhex(sys.argv[1]))
client.send(bytes.fromhex(sys.argv[2]))
print("called", flush=True)
try:
    print(client.recv(100))
except ConnectionError:
    print(b"")
"""
numbers = itertools.count()
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=50)
counts = st.integers(1, 10**6)
ids = st.lists(st.integers(0, 99)).map(tuple)


class Doors:
    """Opens doors that note their orders."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.orders: list[Order] = []
        self.opened: list[Door] = []
        self.clients: list[socket.socket] = []

    def answer(self, order: Order) -> Reply:
        self.orders.append(order)
        return STATUS

    def open(
        self, name: str | None = None, answer: Callable[[Order], Reply] | None = None, **options: Any
    ) -> Door:
        self.opened.append(Door.open(self.name if name is None else name, answer or self.answer, **options))
        return self.opened[-1]

    def connect(self, door: Door, *packets: bytes) -> socket.socket:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.clients.append(client)
        client.settimeout(10)
        client.connect(address(door.name))
        for packet in packets:
            client.send(packet)
        return client

    def close(self) -> None:
        for opened in (*self.clients, *self.opened):
            opened.close()


@pytest.fixture
def doors() -> Iterator[Doors]:
    made = Doors(f"door-{os.getpid()}-{next(numbers)}")
    yield made
    made.close()


def is_readable(door: Door) -> bool:
    poll = select.poll()
    poll.register(door, select.POLLIN)
    return bool(poll.poll(0))


def names() -> list[str]:
    """All names of this user's jobs that the system knows, of sockets of every kind."""
    start = "@" + address("")[1:].decode()
    lines = Path("/proc/net/unix").read_text(errors="replace").split("\n")
    return [line.partition(start)[2] for line in lines if start in line]


def descriptors() -> set[int]:
    # The folder's own is listed too, and closed by now.
    return {int(path.name) for path in list(Path("/proc/self/fd").iterdir()) if path.exists()}


@given(
    st.builds(Ask)
    | st.builds(End)
    | st.builds(Scale, st.integers(1, 2**31 - 1))
    | st.builds(Refused, texts)
    | st.builds(Status, texts, texts, counts, texts, st.floats(0, 1e10), counts, ids, ids, counts, texts)
)
def test_decode_inverts_encode(message: Order | Reply) -> None:
    decode: Callable[[bytes], object] = decode_order if isinstance(message, Order) else decode_reply
    assert decode(encode(message)) == message


@given(st.binary())
def test_no_order_is_a_value_error(packet: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_order(packet)
    with pytest.raises(ValueError, match=r"."):
        decode_reply(packet)


def test_texts_are_sent_within_bounds() -> None:
    assert decode_reply(encode(Refused("\udc80"))) == Refused("\\udc80")
    sent = decode_reply(encode(Refused("a" + "ä" * MAX_TEXT)))
    assert sent == Refused("a" + "ä" * (MAX_TEXT // 2 - 1))


@pytest.mark.parametrize("order", [Ask(), Scale(3), End()])
def test_an_order_is_answered(doors: Doors, order: Order) -> None:
    door = doors.open()
    assert not is_readable(door)
    client = doors.connect(door, encode(order))
    assert is_readable(door)
    door.serve()
    assert decode_reply(client.recv(MAX_PACKET)) == STATUS
    assert client.recv(1) == b""
    assert doors.orders == [order]
    assert not is_readable(door)


def test_whoever_is_slow_is_heard_later_and_keeps_nobody_waiting(doors: Doors) -> None:
    door = doors.open()
    slow = doors.connect(door)
    door.serve()
    assert not is_readable(door)
    quick = doors.connect(door, encode(Ask()))
    door.serve()
    assert decode_reply(quick.recv(MAX_PACKET)) == STATUS
    slow.send(encode(Scale(2)))
    assert is_readable(door)
    door.serve()
    assert decode_reply(slow.recv(MAX_PACKET)) == STATUS
    assert doors.orders == [Ask(), Scale(2)]


@pytest.mark.parametrize("packet", GARBAGE.values(), ids=GARBAGE)
def test_what_is_no_order_is_refused(doors: Doors, packet: bytes) -> None:
    door = doors.open()
    client = doors.connect(door, packet)
    door.serve()
    reply = decode_reply(client.recv(MAX_PACKET))
    assert isinstance(reply, Refused)
    assert reply.reason.startswith("unknown request (")
    assert not doors.orders
    assert not is_readable(door)


def test_whoever_vanishes_leaves_nothing(doors: Doors) -> None:
    door = doors.open()
    before = descriptors()
    doors.connect(door).close()
    doors.connect(door, b"").close()
    doors.connect(door, encode(Ask())).close()
    doors.connect(door, encode(Ask()), b"more").close()
    late = doors.connect(door)
    door.serve()
    late.close()
    assert is_readable(door)
    door.serve()
    assert not is_readable(door)
    assert descriptors() == before
    assert doors.orders == [Ask(), Ask()]


def test_of_too_many_silent_ones_the_first_is_turned_away(doors: Doors) -> None:
    door = doors.open()
    before = descriptors()
    clients = [doors.connect(door) for _ in range(3 * MOST_OPEN)]
    while is_readable(door):
        door.serve()
    assert len(descriptors() - before) == len(clients) + MOST_OPEN
    assert [client.recv(1) for client in clients[:-MOST_OPEN]] == [b""] * 2 * MOST_OPEN
    for client in clients[-MOST_OPEN:]:
        client.send(encode(Ask()))
    door.serve()
    assert [decode_reply(client.recv(MAX_PACKET)) for client in clients[-MOST_OPEN:]] == [STATUS] * MOST_OPEN
    assert not is_readable(door)


def test_many_are_answered(doors: Doors) -> None:
    door = doors.open()
    clients = [doors.connect(door, encode(Ask())) for _ in range(3 * MOST_OPEN)]
    while is_readable(door):
        door.serve()
    assert [decode_reply(client.recv(MAX_PACKET)) for client in clients] == [STATUS] * 3 * MOST_OPEN


def test_a_want_of_descriptors_keeps_nobody_busy(doors: Doors) -> None:
    door = doors.open()
    clients = [doors.connect(door, encode(Ask()))]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        door.serve()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not is_readable(door)
    clients.append(doors.connect(door, encode(Ask())))
    assert is_readable(door)
    door.serve()
    assert [decode_reply(client.recv(MAX_PACKET)) for client in clients] == [STATUS] * 2


def test_a_stranger_is_not_read(doors: Doors) -> None:
    door = doors.open(trusts=lambda connection: False)
    client = doors.connect(door, encode(End()))
    door.serve()
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    assert not doors.orders
    assert not is_readable(door)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_is_a_stranger(doors: Doors) -> None:
    door = doors.open()
    call = [sys.executable, "-c", CALLS_AS_SOMEBODY_ELSE, address(door.name).hex(), encode(End()).hex()]
    with subprocess.Popen(call, stdout=subprocess.PIPE, text=True) as stranger:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "called\n"
        door.serve()
        assert stranger.stdout.readline() == "b''\n"
    assert not doors.orders


def test_what_the_answer_raises_is_raised_and_the_client_let_go(doors: Doors) -> None:
    def fail(order: Order) -> Reply:
        raise OSError("the agent's own")

    door = doors.open(answer=fail)
    client = doors.connect(door, encode(Ask()))
    with pytest.raises(OSError, match="the agent's own"):
        door.serve()
    assert client.recv(1) == b""
    assert not is_readable(door)


def test_a_state_that_is_too_large_to_be_told_says_so(doors: Doors) -> None:
    many = tuple(range(MAX_PACKET))
    door = doors.open(answer=lambda order: Status("job", "a", 1, "r", 0.0, 1, many, (), 1, ""))
    client = doors.connect(door, encode(Ask()))
    door.serve()
    reply = decode_reply(client.recv(MAX_PACKET))
    assert isinstance(reply, Refused)
    assert reply.reason.startswith("cannot send the answer: a message of ")


def test_a_name_that_is_taken_gets_a_number(doors: Doors) -> None:
    taken = [doors.open().name for _ in range(3)]
    assert taken == [doors.name, f"{doors.name}-2", f"{doors.name}-3"]
    doors.opened[1].close()
    assert doors.open().name == f"{doors.name}-2"


def test_a_name_that_is_too_long_keeps_its_ends(doors: Doors) -> None:
    wanted = f"{doors.name}-{'ä' * 100}-20260102-030405"
    taken = [doors.open(wanted).name for _ in range(2)]
    for name, number in zip(taken, ("", "-2"), strict=True):
        assert name.startswith(f"{doors.name}-ää")
        assert name.endswith(f"ä-20260102-030405{number}")
        assert len(address(name)) in (106, 107)
        assert name in names()


@pytest.mark.parametrize(
    ("odd", "name"), [("a b/c\n\x1b\0", "a_b_c___"), ("\udc80", "_"), ("größe@1", "größe@1"), ("", "job")]
)
def test_a_name_can_be_typed(doors: Doors, odd: str, name: str) -> None:
    door = doors.open(odd and doors.name + odd)
    assert door.name.removeprefix(doors.name).startswith(name)
    assert door.name in names()


def test_without_a_socket_there_is_no_door(monkeypatch: pytest.MonkeyPatch) -> None:
    before = descriptors()
    monkeypatch.setattr("lockstep.control.door._MOST_NUMBER", 0)
    with pytest.raises(UnfitError, match="cannot open the admin socket of job a: Address already in use"):
        Door.open("a", lambda order: STATUS)
    assert descriptors() == before


def test_nothing_is_left_of_a_closed_door(doors: Doors) -> None:
    before = descriptors()
    door = doors.open()
    assert names().count(door.name) == 1
    silent, unseen = doors.connect(door), doors.connect(door, encode(End()))
    door.serve()
    silent.send(encode(End()))
    door.close()
    door.close()
    assert door.name not in names()
    for client in (silent, unseen):
        client.close()
    assert descriptors() == before


def test_workers_inherit_nothing(doors: Doors) -> None:
    before = descriptors()
    door = doors.open()
    doors.connect(door)
    door.serve()
    opened = descriptors() - before
    assert len(opened) == 4
    assert not any(os.get_inheritable(descriptor) for descriptor in opened)


def test_nothing_is_left_of_a_killed_job(doors: Doors) -> None:
    start = [sys.executable, "-c", OPENS_AND_STAYS, doors.name]
    with subprocess.Popen(start, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == f"{doors.name}\n"
        assert doors.name in names()
        job.send_signal(signal.SIGKILL)
    assert doors.name not in names()
    assert doors.open().name == doors.name
