"""Processes whose tasks share an address meet."""

import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from lockstep.errors import ConfigError
from lockstep.protocol.rendezvous import Admitted, KeepWaiting, encode
from lockstep.rendezvous.addresses import check_free, claim, connect, holder, resolve
from lockstep.rendezvous.waiting import RendezvousWait
from lockstep.system import socket_owners

SQUATS = """
import contextlib, os, select, socket, sys
os.setuid(65534)
def taken(name):
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.bind(bytes.fromhex(name))
    return made
full, bound, accepts, garbage, closes = [taken(name) for name in sys.argv[1:]]
full.listen(0)
waiting = []
try:
    while True:
        waiting.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK))
        waiting[-1].connect(bytes.fromhex(sys.argv[1]))
except BlockingIOError:
    pass
for listener in (accepts, garbage, closes):
    listener.listen()
print("squats", flush=True)
while True:
    for listener in select.select([accepts, garbage, closes], [], [])[0]:
        waiting.append(listener.accept()[0])
        if listener is garbage:
            with contextlib.suppress(OSError):
                waiting[-1].send(b"x" * 100_000)
        elif listener is closes:
            waiting.pop().close()
"""
KINDS = ("full", "bound", "accepts", "garbage", "closes")


def places(*numbers: int) -> list[str]:
    return [f"127.0.0.1:{os.getpid()}{number}" for number in numbers]


def close(claimed: list[socket.socket] | str) -> None:
    assert isinstance(claimed, list)
    for each in claimed:
        each.close()


def test_the_first_claim_holds_all_addresses() -> None:
    first = claim(places(2, 1))
    assert claim(places(1, 2)) == places(1)[0]
    assert claim(places(2, 3)) == places(2)[0]
    connection = connect(places(2)[0])
    assert connection is not None
    connection.close()
    # A claim that failed holds no names.
    close(claim(places(3)))
    close(first)
    close(claim(places(1, 2)))


def test_connect_without_a_listener_is_none() -> None:
    assert connect(places(1)[0]) is None
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as silent:
        silent.bind(f"\0lockstep/{os.geteuid()}/at/{places(1)[0]}".encode())
        assert connect(places(1)[0]) is None


def test_names_of_one_host_resolve_to_one_address() -> None:
    assert resolve("localhost:07", "worker 0") == resolve("127.0.0.1:7", "worker 0") == "127.0.0.1:7"


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
def test_an_address_may_be_ipv6() -> None:
    try:
        place = resolve("[::1]:7", "worker 0")
    except ConfigError:
        pytest.skip("this machine has no IPv6 address")
    assert place == "[::1]:7"
    check_free(place, "worker 0")


def test_a_port_with_closed_connections_only_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        accepted.close()
        client.close()
        with pytest.raises(ConfigError, match=rf"worker 1's address 127.0.0.1:{port} is in use by "):
            check_free(f"127.0.0.1:{port}", "worker 1")
    check_free(f"127.0.0.1:{port}", "worker 1")


@pytest.fixture(scope="module")
def squatter() -> Iterator[int]:
    """The process id of another user, which holds a name for each kind of misbehaviour."""
    if os.geteuid():
        pytest.skip("another user's process needs root")
    names = [f"\0lockstep/0/at/{place}".encode().hex() for place in places(*range(10, 15))]
    with subprocess.Popen(
        [sys.executable, "-c", SQUATS, *names], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "squats\n"
        yield process.pid
        process.kill()


@pytest.mark.parametrize(("kind", "number"), [*zip(KINDS, range(10, 15), strict=True)])
def test_a_squatter_of_another_user_is_named(squatter: int, kind: str, number: int) -> None:
    place = places(number)[0]
    assert claim([place]) == place
    expected = f"process {squatter} of user 65534 (nobody)"
    with pytest.raises(ConfigError, match=re.escape(f"{expected} holds the name that represents {place}")):
        connect(place)
    assert holder(place) == expected


def test_the_holder_of_a_name_is_found_without_socket_diagnostics(monkeypatch: pytest.MonkeyPatch) -> None:
    (place,) = places(9)
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as full:
        full.bind(f"\0lockstep/{os.geteuid()}/at/{place}".encode())
        full.listen(0)
        first = connect(place)
        assert first is not None
        # Its backlog is full; no process waits for it.
        assert connect(place) is None
        assert holder(place).startswith(f"process {os.getpid()} of user {os.geteuid()}")
        monkeypatch.setattr(socket_owners, "_SOCK_DIAG", 99)
        assert connect(place) is None
        assert holder(place) == f"process {os.getpid()}"
        assert socket_owners.describe(None) == "a process that this user cannot see"
        first.close()


ADMITTED = Admitted(0, False, 0, 1, "/r", 7, 1)


@pytest.mark.parametrize("packet", [b"x" * 100_000, b"{}", b"[" * 50_000], ids=["x", "empty", "deep"])
def test_an_unknown_answer_is_an_error_that_names_the_process(packet: bytes) -> None:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with mine, theirs:
        theirs.send(packet)
        with pytest.raises(ConfigError, match=f"^worker 0 cannot read the answer of process {os.getpid()}"):
            RendezvousWait("worker 0").answer(mine)
        theirs.close()
        assert RendezvousWait("worker 0").answer(mine) is None


def test_an_admitted_process_leaves_later_packets_to_the_worker() -> None:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with mine, theirs:
        for packet in (encode(KeepWaiting("worker 1")), encode(ADMITTED), b"welcome"):
            theirs.send(packet)
        assert RendezvousWait("worker 0").answer(mine) == ADMITTED
        assert mine.recv(100) == b"welcome"
