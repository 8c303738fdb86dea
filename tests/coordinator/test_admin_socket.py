"""A job's admin socket answers requests, and no client can harm the job."""

import contextlib
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

from lockstep.coordinator.admin_socket import MOST_OPEN, AdminSocket, PendingReply, address, take_name
from lockstep.errors import UnfitError
from lockstep.protocol.admin import (
    MAX_PACKET,
    MAX_TEXT,
    AdminRequest,
    Refused,
    Reply,
    ScaleRequest,
    StackReply,
    StackRequest,
    Status,
    StatusRequest,
    StopRequest,
    decode_reply,
    decode_request,
    encode,
)

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
from lockstep.coordinator.admin_socket import AdminSocket, take_name
admin = AdminSocket.over(take_name(sys.argv[1]), print)
print(admin.name, flush=True)
signal.pause()
"""
CALLS_AS_ANOTHER_USER = """
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


class AdminSockets:
    """Opens sockets that record their requests."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.requests: list[AdminRequest] = []
        self.opened: list[AdminSocket] = []
        self.clients: list[socket.socket] = []

    def answer(self, request: AdminRequest) -> Reply:
        self.requests.append(request)
        return STATUS

    def open(
        self,
        name: str | None = None,
        answer: Callable[[AdminRequest], Reply | PendingReply] | None = None,
        **options: Any,
    ) -> AdminSocket:
        self.opened.append(
            AdminSocket.over(take_name(self.name if name is None else name), answer or self.answer, **options)
        )
        return self.opened[-1]

    def connect(self, admin: AdminSocket, *packets: bytes) -> socket.socket:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.clients.append(client)
        client.settimeout(300)
        client.connect(address(admin.name))
        for packet in packets:
            client.send(packet)
        return client

    def close(self) -> None:
        for opened in (*self.clients, *self.opened):
            opened.close()


@pytest.fixture
def sockets() -> Iterator[AdminSockets]:
    made = AdminSockets(f"admin-{os.getpid()}-{next(numbers)}")
    yield made
    made.close()


def is_readable(admin: AdminSocket) -> bool:
    poll = select.poll()
    poll.register(admin, select.POLLIN)
    return bool(poll.poll(0))


def names() -> list[str]:
    """Return the names of this user's jobs in the system's list of sockets."""
    start = "@" + address("")[1:].decode()
    lines = Path("/proc/net/unix").read_text(errors="replace").split("\n")
    return [line.partition(start)[2] for line in lines if start in line]


def descriptors() -> set[int]:
    # The list includes the descriptor of the folder, which is closed again.
    return {int(path.name) for path in list(Path("/proc/self/fd").iterdir()) if path.exists()}


@given(
    st.builds(StatusRequest)
    | st.builds(StopRequest)
    | st.builds(ScaleRequest, st.integers(1, 2**31 - 1))
    | st.builds(StackRequest, counts)
    | st.builds(StackReply, counts, st.lists(texts).map(tuple), texts)
    | st.builds(Refused, texts)
    | st.builds(Status, texts, texts, counts, texts, st.floats(0, 1e10), counts, ids, ids, counts, texts)
)
def test_decode_inverts_encode(message: AdminRequest | Reply) -> None:
    decode: Callable[[bytes], object] = decode_request if isinstance(message, AdminRequest) else decode_reply
    assert decode(encode(message)) == message


@given(st.binary())
def test_an_invalid_request_is_a_value_error(packet: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_request(packet)
    with pytest.raises(ValueError, match=r"."):
        decode_reply(packet)


def test_texts_are_cut_to_a_maximum() -> None:
    assert decode_reply(encode(Refused("\udc80"))) == Refused("\\udc80")
    sent = decode_reply(encode(Refused("a" + "ä" * MAX_TEXT)))
    assert sent == Refused("a" + "ä" * (MAX_TEXT // 2 - 1))


@pytest.mark.parametrize("message", [StatusRequest(), ScaleRequest(3), StopRequest()])
def test_a_request_is_answered(sockets: AdminSockets, message: AdminRequest) -> None:
    admin = sockets.open()
    assert not is_readable(admin)
    client = sockets.connect(admin, encode(message))
    assert is_readable(admin)
    admin.serve()
    assert decode_reply(client.recv(MAX_PACKET)) == STATUS
    assert client.recv(1) == b""
    assert sockets.requests == [message]
    assert not is_readable(admin)


def test_a_slow_client_does_not_delay_others(sockets: AdminSockets) -> None:
    admin = sockets.open()
    slow = sockets.connect(admin)
    admin.serve()
    assert not is_readable(admin)
    quick = sockets.connect(admin, encode(StatusRequest()))
    admin.serve()
    assert decode_reply(quick.recv(MAX_PACKET)) == STATUS
    slow.send(encode(ScaleRequest(2)))
    assert is_readable(admin)
    admin.serve()
    assert decode_reply(slow.recv(MAX_PACKET)) == STATUS
    assert sockets.requests == [StatusRequest(), ScaleRequest(2)]


@pytest.mark.parametrize("packet", GARBAGE.values(), ids=GARBAGE)
def test_an_invalid_request_is_refused(sockets: AdminSockets, packet: bytes) -> None:
    admin = sockets.open()
    client = sockets.connect(admin, packet)
    admin.serve()
    reply = decode_reply(client.recv(MAX_PACKET))
    assert isinstance(reply, Refused)
    assert reply.reason.startswith("unknown request (")
    assert not sockets.requests
    assert not is_readable(admin)


def test_clients_that_disconnect_leave_no_descriptors(sockets: AdminSockets) -> None:
    admin = sockets.open()
    before = descriptors()
    sockets.connect(admin).close()
    sockets.connect(admin, b"").close()
    sockets.connect(admin, encode(StatusRequest())).close()
    sockets.connect(admin, encode(StatusRequest()), b"more").close()
    late = sockets.connect(admin)
    admin.serve()
    late.close()
    assert is_readable(admin)
    admin.serve()
    assert not is_readable(admin)
    assert not descriptors() - before
    assert sockets.requests == [StatusRequest(), StatusRequest()]


def test_the_oldest_of_too_many_silent_clients_is_rejected(sockets: AdminSockets) -> None:
    admin = sockets.open()
    before = descriptors()
    clients = [sockets.connect(admin) for _ in range(3 * MOST_OPEN)]
    while is_readable(admin):
        admin.serve()
    assert len(descriptors() - before) == len(clients) + MOST_OPEN
    assert [client.recv(1) for client in clients[:-MOST_OPEN]] == [b""] * 2 * MOST_OPEN
    for client in clients[-MOST_OPEN:]:
        client.send(encode(StatusRequest()))
    admin.serve()
    assert [decode_reply(client.recv(MAX_PACKET)) for client in clients[-MOST_OPEN:]] == [STATUS] * MOST_OPEN
    assert not is_readable(admin)


def test_many_clients_are_answered(sockets: AdminSockets) -> None:
    admin = sockets.open()
    clients = [sockets.connect(admin, encode(StatusRequest())) for _ in range(3 * MOST_OPEN)]
    while is_readable(admin):
        admin.serve()
    assert [decode_reply(client.recv(MAX_PACKET)) for client in clients] == [STATUS] * 3 * MOST_OPEN


def test_a_lack_of_descriptors_delays_a_client_without_a_busy_loop(sockets: AdminSockets) -> None:
    admin = sockets.open()
    clients = [sockets.connect(admin, encode(StatusRequest()))]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        admin.serve()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not is_readable(admin)
    clients.append(sockets.connect(admin, encode(StatusRequest())))
    assert is_readable(admin)
    admin.serve()
    assert [decode_reply(client.recv(MAX_PACKET)) for client in clients] == [STATUS] * 2


def test_requests_of_untrusted_clients_are_not_read(sockets: AdminSockets) -> None:
    admin = sockets.open(trusts=lambda connection: False)
    client = sockets.connect(admin, encode(StopRequest()))
    admin.serve()
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    assert not sockets.requests
    assert not is_readable(admin)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_is_untrusted(sockets: AdminSockets) -> None:
    admin = sockets.open()
    call = [
        sys.executable,
        "-c",
        CALLS_AS_ANOTHER_USER,
        address(admin.name).hex(),
        encode(StopRequest()).hex(),
    ]
    with subprocess.Popen(call, stdout=subprocess.PIPE, text=True) as stranger:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "called\n"
        admin.serve()
        assert stranger.stdout.readline() == "b''\n"
    assert not sockets.requests


def test_a_reply_may_follow_later(sockets: AdminSockets) -> None:
    pending: list[PendingReply] = []

    def answer(request: AdminRequest) -> Reply | PendingReply:
        if not isinstance(request, StackRequest):
            return STATUS
        pending.append(PendingReply())
        return pending[-1]

    admin = sockets.open(answer=answer)
    clients = [sockets.connect(admin, encode(StackRequest(worker))) for worker in range(2)]
    gone = sockets.connect(admin, encode(StackRequest(2)))
    admin.serve()
    gone.close()
    # Neither those that wait nor those that have left cause work, or delay others.
    assert not is_readable(admin)
    other = sockets.connect(admin, encode(StatusRequest()))
    admin.serve()
    assert decode_reply(other.recv(MAX_PACKET)) == STATUS
    for worker in (1, 0, 2):
        pending[worker].send(StackReply(worker, ("f",)))
    assert [decode_reply(client.recv(MAX_PACKET)) for client in clients] == [
        StackReply(0, ("f",)),
        StackReply(1, ("f",)),
    ]
    pending[0].send(STATUS)
    assert clients[0].recv(MAX_PACKET) == b""


def test_the_oldest_of_too_many_clients_that_wait_is_rejected(sockets: AdminSockets) -> None:
    pending: list[PendingReply] = []

    def answer(request: AdminRequest) -> PendingReply:
        pending.append(PendingReply())
        return pending[-1]

    admin = sockets.open(answer=answer)
    clients = [sockets.connect(admin, encode(StackRequest(0))) for _ in range(MOST_OPEN + 1)]
    while is_readable(admin):
        admin.serve()
    assert clients[0].recv(MAX_PACKET) == b""
    for one in pending:
        one.send(STATUS)
    assert all(decode_reply(client.recv(MAX_PACKET)) == STATUS for client in clients[1:])


def test_an_error_of_the_answer_is_raised_and_the_client_disconnected(sockets: AdminSockets) -> None:
    def fail(request: AdminRequest) -> Reply:
        raise OSError("the agent's own")

    admin = sockets.open(answer=fail)
    client = sockets.connect(admin, encode(StatusRequest()))
    with pytest.raises(OSError, match="the agent's own"):
        admin.serve()
    assert client.recv(1) == b""
    assert not is_readable(admin)


def test_a_reply_that_is_too_large_becomes_a_refusal(sockets: AdminSockets) -> None:
    many = tuple(range(MAX_PACKET))
    admin = sockets.open(answer=lambda request: Status("job", "a", 1, "r", 0.0, 1, many, (), 1, ""))
    client = sockets.connect(admin, encode(StatusRequest()))
    admin.serve()
    reply = decode_reply(client.recv(MAX_PACKET))
    assert isinstance(reply, Refused)
    assert reply.reason.startswith("cannot send the reply: a message of ")


def test_a_name_that_is_taken_gets_a_number(sockets: AdminSockets) -> None:
    taken = [sockets.open().name for _ in range(3)]
    assert taken == [sockets.name, f"{sockets.name}-2", f"{sockets.name}-3"]
    sockets.opened[1].close()
    assert sockets.open().name == f"{sockets.name}-2"


def test_a_long_name_loses_its_middle(sockets: AdminSockets) -> None:
    wanted = f"{sockets.name}-{'ä' * 100}-20260102-030405"
    taken = [sockets.open(wanted).name for _ in range(2)]
    for name, number in zip(taken, ("", "-2"), strict=True):
        assert name.startswith(f"{sockets.name}-ää")
        assert name.endswith(f"ä-20260102-030405{number}")
        assert len(address(name)) in (106, 107)
        assert name in names()


@pytest.mark.parametrize(
    ("odd", "name"), [("a b/c\n\x1b\0", "a_b_c___"), ("\udc80", "_"), ("größe@1", "größe@1"), ("", "job")]
)
def test_a_name_has_only_characters_that_can_be_typed(sockets: AdminSockets, odd: str, name: str) -> None:
    admin = sockets.open(odd and sockets.name + odd)
    assert admin.name.removeprefix(sockets.name).startswith(name)
    assert admin.name in names()


def test_a_job_without_a_free_name_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    before = descriptors()
    monkeypatch.setattr("lockstep.coordinator.admin_socket._MOST_NUMBER", 0)
    with pytest.raises(UnfitError, match="cannot open the admin socket of job a: Address already in use"):
        take_name("a")
    assert not descriptors() - before


def test_a_closed_socket_leaves_no_name_and_no_descriptors(sockets: AdminSockets) -> None:
    before = descriptors()
    admin = sockets.open()
    assert names().count(admin.name) == 1
    silent, unseen = sockets.connect(admin), sockets.connect(admin, encode(StopRequest()))
    admin.serve()
    silent.send(encode(StopRequest()))
    admin.close()
    admin.close()
    assert admin.name not in names()
    for client in (silent, unseen):
        client.close()
    assert not descriptors() - before


@pytest.mark.usefixtures("closes_descriptors")
def test_clients_wait_for_the_next_process_that_takes_requests() -> None:
    with contextlib.ExitStack() as ends:
        listener = ends.enter_context(take_name(f"lasting-{os.getpid()}"))
        clients = [ends.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) for _ in range(3)]
        killed = AdminSocket.over(listener.dup(), pytest.fail)
        clients[0].connect(address(killed.name))
        clients[0].send(encode(StatusRequest()))
        # As the kernel does it.
        killed._listener.close()
        killed._arrivals.close()
        following = AdminSocket.over(listener.dup(), lambda request: STATUS)
        following.serve()
        assert decode_reply(clients[0].recv(MAX_PACKET)) == STATUS
        clients[1].connect(address(following.name))
        following.close()
        # Though this process has the listener.
        assert clients[1].recv(1) == b""
        with pytest.raises(ConnectionRefusedError):
            clients[2].connect(address(following.name))


def test_workers_inherit_no_descriptors(sockets: AdminSockets) -> None:
    before = descriptors()
    admin = sockets.open()
    sockets.connect(admin)
    admin.serve()
    opened = descriptors() - before
    assert len(opened) == 4
    assert not any(os.get_inheritable(descriptor) for descriptor in opened)


def test_a_killed_job_leaves_no_name(sockets: AdminSockets) -> None:
    start = [sys.executable, "-c", OPENS_AND_STAYS, sockets.name]
    with subprocess.Popen(start, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == f"{sockets.name}\n"
        assert sockets.name in names()
        job.send_signal(signal.SIGKILL)
    assert sockets.name not in names()
    assert sockets.open().name == sockets.name
