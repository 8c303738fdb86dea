"""Blocking connections between hosts: both directions, and every way in which one fails."""

import contextlib
import re
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from lockstep.errors import ConfigError, NetworkError, UnreachableError
from lockstep.protocol.credentials import Credentials
from lockstep.protocol.greeting import SIZE, ConnectionKind, Greeting, decode_greeting
from lockstep.transport import dial as dial_module
from lockstep.transport.addresses import join_address, resolve_host
from lockstep.transport.dial import accept, connect, dial
from lockstep.transport.keys import JobKey

LONG = 120.0
SHORT = 0.05
LANE = Greeting(ConnectionKind.LANE, view=2, lane=1)
KEY = JobKey.generate()
CREDENTIALS = KEY.mint()
KINDS = {"loopback": None, "plain": KEY.mint(encrypted=False), "encrypted": CREDENTIALS}


@pytest.fixture(params=["127.0.0.1", "::1"])
def listening(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with socket.create_server((request.param, 0), family=family) as made:
        made.settimeout(LONG)
        yield made


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.settimeout(LONG)
        yield made


def address(server: socket.socket) -> str:
    return join_address(server.getsockname())


def greeted(server: socket.socket, key: bytes) -> tuple[Greeting, socket.socket]:
    """Return the next connection as a listener admits it: the greeting is read, and it does not block."""
    connection, _ = server.accept()
    connection.settimeout(LONG)
    data = connection.recv(SIZE, socket.MSG_WAITALL)
    connection.setblocking(False)
    return decode_greeting(data, key), connection


class Side(threading.Thread):
    """Runs a call in a thread; `outcome` returns its result, or the NetworkError that it raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self._outcome: Any = None
        self.start()

    def run(self) -> None:
        try:
            self._outcome = self._call()
        except NetworkError as error:
            self._outcome = error

    def outcome(self) -> Any:
        self.join(LONG)
        assert not self.is_alive()
        return self._outcome


@pytest.mark.parametrize("kind", KINDS)
def test_workers_connect(listening: socket.socket, kind: str) -> None:
    credentials = KINDS[kind]
    dialing = Side(lambda: dial(address(listening), LANE, credentials, LONG))
    greeting, connection = greeted(listening, credentials.greeting_key if credentials else b"")
    assert msgspec.structs.replace(greeting, nonce=LANE.nonce) == LANE
    assert greeting.nonce != LANE.nonce
    # A worker gets the connection as a descriptor.
    connection = socket.socket(fileno=connection.detach())
    with accept(connection, credentials, LONG) as there, dialing.outcome() as here:
        for end in (here, there):
            assert isinstance(end, ssl.SSLSocket) == (kind == "encrypted")
            assert end.getblocking()
            assert end.gettimeout() is None
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        here.sendall(b"there")
        there.sendall(b"here")
        assert there.recv(10) == b"there"
        assert here.recv(10) == b"here"
        if isinstance(here, ssl.SSLSocket):
            assert here.version() == "TLSv1.3"


def test_a_one_way_connection_loses_nothing_at_its_end(server: socket.socket) -> None:
    """The end that only sends has received nothing that it did not read, so closing it resets nothing."""
    for _ in range(20):
        dialing = Side(lambda: dial(address(server), LANE, CREDENTIALS, LONG))
        _, connection = greeted(server, CREDENTIALS.greeting_key)
        with accept(connection, CREDENTIALS, LONG) as there:
            here = dialing.outcome()
            here.sendall(b"x" * 50_000)
            here.close()
            received = b""
            while data := there.recv(65536):
                received += data
            assert len(received) == 50_000


@pytest.mark.usefixtures("closes_descriptors")
def test_a_host_where_nothing_listens_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        where = address(closed)
    port = where.rpartition(":")[2]
    with pytest.raises(UnreachableError) as raised:
        dial(where, LANE, CREDENTIALS, LONG, reach=SHORT)
    assert str(raised.value) == (
        f"{where} refuses connections: nothing listens there, or a firewall rejects them; firewalls between "
        f"the hosts must let TCP connections to port {port} through; tried again for {SHORT} s"
    )


def test_a_host_that_is_reached_later_is_no_failure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        where = address(closed)
    dialing = Side(lambda: dial(where, LANE, None, LONG, reach=LONG))
    dialing.join(SHORT)
    with socket.create_server(("127.0.0.1", int(where.rpartition(":")[2]))) as later:
        later.settimeout(LONG)
        _, connection = greeted(later, b"")
        with accept(connection, None, LONG), dialing.outcome():
            pass


def test_no_attempt_begins_without_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now, attempts = 0.0, list[float]()

    def oversleep(seconds: float) -> None:
        nonlocal now
        now += 20.0

    def refused(address: str, greeting: Greeting, credentials: None, patience: float, check: Any) -> None:
        attempts.append(patience)
        raise NetworkError(f"{address} refuses connections")

    monkeypatch.setattr(dial_module, "time", SimpleNamespace(monotonic=lambda: now, sleep=oversleep))
    monkeypatch.setattr(dial_module, "connect", refused)
    with pytest.raises(UnreachableError, match="node1:7 refuses connections; tried again for 30 s"):
        dial("node1:7", LANE, None, LONG, reach=30.0)
    assert attempts == [3.0, 3.0]


def test_an_address_needs_no_name_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    assert resolve_host("127.0.0.1", 7, patience=0.0) == (socket.AF_INET, ("127.0.0.1", 7))
    assert resolve_host("::1", 7, patience=0.0)[0] == socket.AF_INET6


@pytest.mark.usefixtures("closes_descriptors")
def test_a_host_that_drops_packets_is_named() -> None:
    # The kernel drops the packets of connections that its full queue has no room for.
    with socket.socket() as full, contextlib.ExitStack() as queued:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(3):
            connection = queued.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex(full.getsockname())
        why = rf"{address(full)} did not answer within 0\.05 s; firewalls between the hosts must let TCP"
        with pytest.raises(UnreachableError, match=why):
            dial(address(full), LANE, CREDENTIALS, LONG, reach=SHORT)


@pytest.mark.usefixtures("closes_descriptors")
def test_an_unreachable_or_unknown_host_is_named() -> None:
    with pytest.raises(NetworkError, match=r"cannot connect to 255\.255\.255\.255:9: .*; firewalls between"):
        connect("255.255.255.255:9", LANE, None, LONG)
    with pytest.raises(NetworkError, match=r"the host 'a\.\.b' cannot be resolved"):
        connect("a..b:9", LANE, None, LONG)
    with pytest.raises(ConfigError, match="is not an address"):
        connect("127.0.0.1", LANE, None, LONG)


@pytest.mark.usefixtures("closes_descriptors")
@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_does_not_accept_is_named(server: socket.socket, kind: str) -> None:
    why = rf"{address(server)} is connected, but its worker did not accept the connection within 0\.05 s"
    with pytest.raises(NetworkError, match=why):
        dial(address(server), LANE, KINDS[kind], SHORT)


@pytest.mark.usefixtures("closes_descriptors")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_listener_that_closes_the_connection_is_named(server: socket.socket, kind: str) -> None:
    credentials = KINDS[kind]
    for reads in (True, False):
        dialing = Side(lambda: dial(address(server), LANE, credentials, LONG))
        if reads:
            greeted(server, credentials.greeting_key if credentials else b"")[1].close()
        else:
            # With unread data, the kernel resets the connection.
            connection, _ = server.accept()
            assert select.select([connection], [], [], LONG)[0]
            connection.close()
        assert re.match(
            f"{address(server)} closed the connection after the greeting: it has another job, key or version",
            str(dialing.outcome()),
        )


@pytest.mark.usefixtures("closes_descriptors")
def test_an_expired_key_is_named_before_anything_is_sent(server: socket.socket) -> None:
    for encrypted in (True, False):
        expired = JobKey(KEY.secret, int(time.time()) - 10).mint(encrypted=encrypted)
        with pytest.raises(NetworkError, match="the key of the job has expired: make another"):
            dial(address(server), LANE, expired, LONG, reach=SHORT)
    server.setblocking(False)
    with pytest.raises(BlockingIOError):
        server.accept()


@pytest.mark.usefixtures("closes_descriptors")
def test_a_wait_ends_when_its_check_raises(server: socket.socket) -> None:
    """The wait for the other worker is checked in short intervals, so a view change ends it."""

    class ViewChange(Exception):
        pass

    for credentials in KINDS.values():
        calls = 0

        def check() -> None:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise ViewChange

        with pytest.raises(ViewChange):
            dial(address(server), LANE, credentials, LONG, check)
        assert calls == 2
        server.accept()[0].close()
    calls = 0
    dialing = Side(lambda: connect(address(server), LANE, CREDENTIALS, LONG))
    _, connection = greeted(server, CREDENTIALS.greeting_key)
    with dialing.outcome(), pytest.raises(ViewChange):
        accept(connection, CREDENTIALS, LONG, check)


# The other worker of an encrypted connection is not of this job.


def both(server: socket.socket, one: Credentials, other: Credentials) -> tuple[str, str]:
    """Return the errors of a worker that dials with `one`, and of one that accepts with `other`."""
    greeter = msgspec.structs.replace(one, greeting_key=b"")
    dialing = Side(lambda: dial(address(server), LANE, greeter, LONG))
    _, connection = greeted(server, b"")
    accepting = Side(lambda: accept(connection, other, LONG))
    found = dialing.outcome(), accepting.outcome()
    assert all(isinstance(error, NetworkError) for error in found), found
    return str(found[0]), str(found[1])


@pytest.mark.usefixtures("closes_descriptors")
def test_strangers_are_refused_by_both_workers(server: socket.socket) -> None:
    stranger = JobKey.generate().mint()
    careless = msgspec.structs.replace(stranger, authority=CREDENTIALS.authority)
    for one, other in ((stranger, CREDENTIALS), (CREDENTIALS, stranger), (careless, CREDENTIALS)):
        for error in both(server, one, other):
            assert re.fullmatch(
                r"127\.0\.0\.1:\d+ (is refused|refuses the connection): its key is not the key of this job",
                error,
            )


@pytest.mark.usefixtures("closes_descriptors")
def test_an_expired_certificate_is_refused_by_both_workers(server: socket.socket) -> None:
    expired = JobKey(KEY.secret, int(time.time()) - 10).mint()
    shown = msgspec.structs.replace(expired, expires=KEY.expires)
    for error in both(server, shown, expired):
        assert "the key of the job has expired" in error


@pytest.mark.usefixtures("closes_descriptors")
def test_a_worker_that_accepts_names_what_is_wrong(server: socket.socket) -> None:
    def accepted(data: bytes, ends: bool, patience: float) -> str:
        with connect(address(server), LANE, None, LONG) as here:
            _, connection = greeted(server, b"")
            here.sendall(data)
            if ends:
                here.shutdown(socket.SHUT_WR)
            with pytest.raises(NetworkError) as raised:
                accept(connection, CREDENTIALS, patience)
            return str(raised.value)

    assert "closed the connection after the greeting" in accepted(b"", True, LONG)
    assert "did not complete the handshake of encryption within 0.05 s" in accepted(b"", False, SHORT)
    assert "did not complete the handshake of encryption within 0.05 s" in accepted(
        b"\x16\x03\x01", False, SHORT
    )
    assert "it does not encrypt the connection as this version of Lockstep does" in accepted(
        b"x" * 99, True, LONG
    )


@pytest.mark.usefixtures("closes_descriptors")
def test_a_worker_that_ended_before_its_connection_was_accepted_is_named(server: socket.socket) -> None:
    for credentials in (None, CREDENTIALS):
        with connect(address(server), LANE, None, LONG) as here:
            _, connection = greeted(server, b"")
            here.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        assert select.select([connection], [], [], LONG)[0]
        with pytest.raises(NetworkError, match="closed"):
            accept(connection, credentials, LONG)
