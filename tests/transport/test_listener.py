"""The listener lets in the connections of its job, and refuses strangers with a bounded amount of work."""

import contextlib
import errno
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from lockstep.errors import ConfigError, NetworkError
from lockstep.protocol.credentials import Credentials
from lockstep.protocol.greeting import JOB, NONCE, SIZE, ConnectionKind, Greeting, encode_greeting
from lockstep.system.event_loop import EventLoop
from lockstep.transport.addresses import is_loopback, join_address, split_address
from lockstep.transport.dial import connect
from lockstep.transport.keys import JobKey
from lockstep.transport.listener import MOST_PENDING, PATIENCE, PER_TURN, QUIET, Listener
from virtual_clock import VirtualClock

LONG = 120.0
JOB_ID = b"j" * JOB
KEY = JobKey.generate()
CREDENTIALS = KEY.mint()
LANE = Greeting(ConnectionKind.LANE, JOB_ID, 1, 2, incarnation=9, host=3, lane=4, nonce=b"n" * NONCE)
CONTROL = Greeting(ConnectionKind.CONTROL, nonce=b"n" * NONCE)


class CountingSocket(socket.socket):
    """Counts how often connections are accepted and read; `failures` are raised instead of accepting."""

    work = 0
    failures: list[OSError]

    def accept(self) -> tuple[socket.socket, Any]:
        CountingSocket.work += 1
        if self.failures:
            raise self.failures.pop()
        descriptor, place = self._accept()  # type: ignore[attr-defined]
        connection = CountingSocket(self.family, self.type, self.proto, fileno=descriptor)
        return connection, place

    def recv(self, *arguments: Any) -> bytes:
        CountingSocket.work += 1
        return super().recv(*arguments)


class Gate:
    """A listener, what it admits and reports, and the loop and the clock that drive it."""

    def __init__(self, loop: EventLoop, credentials: Credentials | None, host: str = "127.0.0.1") -> None:
        self.loop = loop
        self.clock = VirtualClock(KEY.expires - 1000.0)
        self.admitted: list[tuple[Greeting, socket.socket, str]] = []
        self.lines: list[str] = []
        self.refusal: str | None = None
        self.opened: list[socket.socket] = []
        self.listening = CountingSocket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.listening.failures = []
        self.listening.bind((host, 0))
        self.listening.listen(1024)
        self.listening.setblocking(False)
        self.listener = Listener(self.listening, credentials, self.admit, self.lines.append, loop, self.clock)

    def admit(self, greeting: Greeting, connection: socket.socket, peer: str) -> str | None:
        if self.refusal is None:
            self.admitted.append((greeting, connection, peer))
        return self.refusal

    def open(self, source: str = "127.0.0.1") -> socket.socket:
        """Return a connection from an address of the loopback device."""
        connection = socket.create_connection(self.listening.getsockname()[:2], LONG, (source, 0))
        self.opened.append(connection)
        return connection

    def send(self, data: bytes, source: str = "127.0.0.1") -> socket.socket:
        connection = self.open(source)
        connection.sendall(data)
        return connection

    def greet(self, greeting: Greeting, source: str = "127.0.0.1", key: JobKey = KEY) -> socket.socket:
        return self.send(encode_greeting(greeting, key.mint().greeting_key), source)

    def turn_until(self, done: Callable[[], bool], seconds: float = LONG) -> int:
        """Turn the loop until a condition holds; return the most work of one turn."""
        most = 0
        deadline = time.monotonic() + LONG
        while not done():
            assert time.monotonic() < deadline
            CountingSocket.work = 0
            self.loop.turn(seconds)
            most = max(most, CountingSocket.work)
        return most

    def refused(self, connection: socket.socket) -> bool:
        """Whether the listener has closed a connection."""
        connection.setblocking(False)
        try:
            return connection.recv(1) == b""
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True

    def reason(self, connection: socket.socket) -> str:
        """Turn until a connection is refused; return the reported line without the address."""
        address = join_address(connection.getsockname())
        self.turn_until(lambda: self.refused(connection))
        self.clock.advance(QUIET)
        self.loop.turn(0)
        line = self.lines.pop()
        assert not self.admitted
        first = re.fullmatch(f"refused a connection from {re.escape(address)}: (.*)", line)
        later = re.fullmatch(
            rf"refused 1 more connection: 1 from {re.escape(address.rpartition(':')[0])} \((.*)\)",
            line,
        )
        found = first or later
        assert found
        return found[1]

    def close(self) -> None:
        self.listener.close()
        for connection in [*self.opened, *(connection for _, connection, _ in self.admitted)]:
            connection.close()


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    with EventLoop() as made:
        yield made


@pytest.fixture
def gate(loop: EventLoop) -> Iterator[Gate]:
    with contextlib.closing(Gate(loop, CREDENTIALS)) as made:
        yield made


def test_a_member_of_the_job_is_admitted(gate: Gate) -> None:
    connection = gate.greet(LANE, "127.0.0.9")
    connection.sendall(b"what follows")
    gate.turn_until(lambda: bool(gate.admitted))
    ((greeting, admitted, peer),) = gate.admitted
    assert greeting == LANE
    assert peer == join_address(connection.getsockname())
    assert not admitted.getblocking()
    admitted.settimeout(LONG)
    # What follows the greeting is for the worker.
    assert admitted.recv(100) == b"what follows"
    assert gate.lines == []


def test_a_greeting_may_arrive_in_pieces(gate: Gate) -> None:
    data = encode_greeting(CONTROL, CREDENTIALS.greeting_key)
    connection = gate.open()
    for byte in data:
        assert not gate.admitted
        connection.sendall(bytes([byte]))
        gate.loop.turn(LONG)
    gate.turn_until(lambda: bool(gate.admitted))


NOT_OURS = "it is not a process of Lockstep"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", NOT_OURS),
        (b"\x16\x03\x01\x02\x00", NOT_OURS),
        (b"\0", NOT_OURS),
        (b"LOCKSTEQ", NOT_OURS),
        (random.Random(0).randbytes(4 * SIZE).replace(b"L", b""), NOT_OURS),
        (b"LOCKSTEP".ljust(4 * SIZE, b"\xff"), "greets in format 65535, this one in format 1"),
        (b"LOCKSTEP\0\1".ljust(SIZE, b"\xff"), "its key is not the key of this job"),
    ],
)
def test_garbage_is_refused(gate: Gate, data: bytes, why: str) -> None:
    assert why in gate.reason(gate.send(data))


def test_a_wrong_key_is_refused(gate: Gate) -> None:
    wrong = gate.greet(LANE, key=JobKey.generate())
    assert gate.reason(wrong) == "its key is not the key of this job"
    later = gate.greet(LANE, key=JobKey(KEY.secret, KEY.expires + 1000))
    assert gate.reason(later) == "its key is not the key of this job"


def test_an_expired_key_is_refused(gate: Gate) -> None:
    gate.clock.advance(1000.0)
    assert "the key of the job has expired: make another" in gate.reason(gate.greet(LANE))


def test_a_replay_is_refused(gate: Gate) -> None:
    for greeting in (LANE, CONTROL):
        gate.greet(greeting)
        gate.turn_until(lambda: bool(gate.admitted))
        gate.admitted.pop()[1].close()
        assert "its greeting is a copy of an earlier one" in gate.reason(gate.greet(greeting))


def test_a_lane_is_connected_once_a_view(gate: Gate) -> None:
    """Another nonce makes no difference, another view, host, incarnation, lane or receiver does."""
    changes = [{"view": 3}, {"term": 2}, {"host": 4}, {"incarnation": 8}, {"lane": 5}, {"receiver": 1}]
    for change in [{}, *changes]:
        gate.greet(msgspec.structs.replace(LANE, **change))
    gate.turn_until(lambda: len(gate.admitted) == 1 + len(changes))
    for _, connection, _ in gate.admitted:
        connection.close()
    gate.admitted.clear()
    again = gate.greet(msgspec.structs.replace(LANE, nonce=b"m" * NONCE))
    assert "that of a second connection of a lane" in gate.reason(again)


def test_workers_of_earlier_views_and_of_other_jobs_are_refused(gate: Gate) -> None:
    """Those of earlier views of this job are no strangers: only a copy of their greeting is reported."""
    late = list[tuple[str, int]]()
    gate.listener.enter(JOB_ID, 2, 5, lambda address, view: late.append((address, view)))
    other = msgspec.structs.replace(LANE, term=2, view=5, job=b"o" * JOB)
    assert gate.reason(gate.greet(other)) == "it belongs to another job with the same key"
    found = []
    for term, view in ((2, 4), (1, 9)):
        greeting = msgspec.structs.replace(LANE, term=term, view=view, nonce=bytes([view]) * NONCE)
        connection = gate.greet(greeting)
        found.append((join_address(connection.getsockname()), view))
        gate.turn_until(lambda connection=connection: gate.refused(connection))  # type: ignore[misc]
    assert late == found
    assert gate.lines == []
    assert gate.reason(gate.greet(greeting)) == "its greeting is a copy of an earlier one"
    assert late == found
    # The coordinator may have told the sender of a later view first. An agent that joins knows neither.
    greetings = [
        msgspec.structs.replace(LANE, term=2, view=5),
        msgspec.structs.replace(LANE, term=2, view=6),
        msgspec.structs.replace(LANE, term=3, view=1),
        CONTROL,
    ]
    for greeting in greetings:
        gate.greet(greeting)
    gate.turn_until(lambda: len(gate.admitted) == len(greetings))


def test_greetings_of_ended_views_are_forgotten(gate: Gate) -> None:
    for view in range(50):
        gate.listener.enter(JOB_ID, 1, view, lambda address, view: None)
        gate.greet(msgspec.structs.replace(LANE, view=view))
        gate.turn_until(lambda view=view: len(gate.admitted) == view + 1)  # type: ignore[misc]
    assert gate.listener._lanes.keys() == {(1, 49)}


def test_a_connection_that_is_not_wanted_is_refused_with_the_reason(gate: Gate) -> None:
    gate.refusal = "host 3 is not in this view"
    assert gate.reason(gate.greet(LANE)) == "host 3 is not in this view"


def test_a_port_scan_is_reported_once(gate: Gate) -> None:
    for number in range(1, 41):
        gate.open(f"127.0.1.{number}").close()
    good = gate.greet(LANE)
    gate.turn_until(lambda: bool(gate.admitted) and not gate.listener._pending)
    assert not gate.refused(good)
    assert len(gate.lines) == 1
    assert re.fullmatch(
        r"refused a connection from 127\.0\.1\.\d+:\d+: it closed the connection without a greeting",
        gate.lines[0],
    )
    gate.clock.advance(QUIET)
    gate.loop.turn(0)
    assert len(gate.lines) == 2
    closed = r"\(it closed the connection without a greeting\)"
    assert re.fullmatch(
        rf"refused 39 more connections: (1 from 127\.0\.1\.\d+ {closed}, ){{8}}"
        rf"31 from other hosts {closed}",
        gate.lines[1],
    )
    gate.clock.advance(10 * QUIET)
    gate.loop.turn(0)
    assert len(gate.lines) == 2


def test_a_peer_that_sends_a_byte_a_second_is_refused(gate: Gate) -> None:
    slow = gate.open("127.0.0.2")
    data = encode_greeting(LANE, CREDENTIALS.greeting_key)
    for number, byte in enumerate(data):
        if gate.refused(slow):
            break
        slow.setblocking(True)
        slow.sendall(bytes([byte]))
        # Others are let in meanwhile.
        gate.greet(msgspec.structs.replace(LANE, lane=number))
        gate.turn_until(lambda number=number: len(gate.admitted) == number + 1)  # type: ignore[misc]
        gate.clock.advance(1.0)
        gate.loop.turn(0)
    assert number == PATIENCE
    (line,) = gate.lines
    assert re.fullmatch(
        r"refused a connection from 127\.0\.0\.2:\d+: it did not send a greeting within 5 s", line
    )


def test_the_loop_wakes_for_the_next_deadline(gate: Gate) -> None:
    assert gate.listener._tend() is None
    gate.open()
    gate.turn_until(lambda: bool(gate.listener._pending))
    gate.clock.advance(2.0)
    assert gate.listener._tend() == PATIENCE - 2.0
    gate.clock.advance(PATIENCE - 2.0)
    assert gate.listener._tend() == QUIET
    gate.clock.advance(QUIET)
    assert gate.listener._tend() is None
    assert len(gate.lines) == 1


def test_500_connections_at_once_delay_no_member(gate: Gate) -> None:
    """A host that floods the listener displaces its own connections, and not those of others."""
    early = gate.open("127.0.0.3")
    data = encode_greeting(LANE, CREDENTIALS.greeting_key)
    early.sendall(data[: SIZE // 2])
    gate.turn_until(lambda: len(gate.listener._pending) == 1)
    flood = [gate.open("127.0.0.2") for _ in range(500)]
    late = gate.greet(msgspec.structs.replace(LANE, lane=7), "127.0.0.4")
    most = gate.turn_until(lambda: len(gate.admitted) == 1)
    assert most <= 3 * PER_TURN
    assert len(gate.listener._pending) == MOST_PENDING
    assert sum(gate.refused(connection) for connection in flood) == 501 - MOST_PENDING
    assert not gate.refused(early)
    assert not gate.refused(late)
    # Its greeting is read in one turn, although others wait to be accepted.
    flood += [gate.open("127.0.0.2") for _ in range(100)]
    early.setblocking(True)
    early.sendall(data[SIZE // 2 :])
    CountingSocket.work = 0
    gate.loop.turn(LONG)
    assert len(gate.admitted) == 2
    assert CountingSocket.work <= 3 * PER_TURN
    gate.turn_until(lambda: sum(map(gate.refused, flood)) == 600 - MOST_PENDING)
    gate.clock.advance(PATIENCE)
    gate.turn_until(lambda: all(map(gate.refused, flood)), 0)
    assert not gate.listener._pending
    gate.clock.advance(QUIET)
    gate.loop.turn(0)
    assert gate.lines[0].endswith("too many connections are open without a greeting")
    assert " from 127.0.0.2 (" in gate.lines[1]
    counts = [int(match) for line in gate.lines[1:] for match in re.findall(r"refused (\d+) more", line)]
    assert 1 + sum(counts) == 600
    assert len(gate.lines) <= 4


def test_500_strangers_with_garbage_delay_no_member(gate: Gate) -> None:
    strangers = [gate.send(b"\0" * 1000, f"127.0.2.{number % 250}") for number in range(500)]
    gate.greet(LANE)
    assert gate.turn_until(lambda: bool(gate.admitted)) <= 3 * PER_TURN
    gate.turn_until(lambda: all(map(gate.refused, strangers)))
    assert len(gate.admitted) == 1
    assert len(gate.lines) == 1


def test_without_descriptors_the_listener_pauses(gate: Gate) -> None:
    gate.listening.failures = [OSError(errno.EMFILE, os.strerror(errno.EMFILE))]
    waiting = gate.greet(LANE)
    assert gate.turn_until(lambda: bool(gate.lines)) == 1
    CountingSocket.work = 0
    for _ in range(3):
        gate.loop.turn(0)
    assert CountingSocket.work == 0
    gate.clock.advance(0.5)
    gate.turn_until(lambda: bool(gate.admitted))
    assert not gate.refused(waiting)
    assert gate.lines == [
        "refused a connection from an unknown address: this process cannot open more connections "
        "(Too many open files)"
    ]


def test_a_connection_for_which_no_descriptors_are_left_is_refused(gate: Gate) -> None:
    admit = gate.listener._admit

    def fails(*arguments: Any) -> None:
        gate.listener._admit = admit
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    gate.listener._admit = fails
    refused = gate.greet(LANE)
    gate.turn_until(lambda: gate.refused(refused))
    assert gate.lines[0].endswith(": this process cannot open more connections (Too many open files)")
    gate.greet(CONTROL)
    gate.turn_until(lambda: bool(gate.admitted))


def test_without_descriptors_a_silent_connection_makes_room(gate: Gate) -> None:
    silent = gate.open()
    gate.turn_until(lambda: bool(gate.listener._pending))
    gate.listening.failures = [OSError(errno.EMFILE, os.strerror(errno.EMFILE))]
    gate.greet(LANE)
    gate.turn_until(lambda: gate.refused(silent))
    assert "this process cannot open more connections" in gate.lines[0]
    gate.clock.advance(0.5)
    gate.turn_until(lambda: bool(gate.admitted))


def test_a_peer_that_resets_its_connection_harms_no_other(gate: Gate) -> None:
    gate.listening.failures = [OSError(errno.ECONNABORTED, os.strerror(errno.ECONNABORTED))]
    reset = gate.open()
    reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    reset.close()
    gate.greet(LANE)
    gate.turn_until(lambda: bool(gate.admitted))


def test_a_closed_listener_does_nothing(gate: Gate) -> None:
    pending = gate.open()
    gate.turn_until(lambda: bool(gate.listener._pending))
    gate.listener.close()
    gate.listener.close()
    assert gate.refused(pending)
    gate.loop.turn(0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(split_address(gate.listener.address), LONG)


@pytest.mark.usefixtures("closes_descriptors")
def test_descriptors_are_closed(loop: EventLoop) -> None:
    with contextlib.closing(Gate(loop, CREDENTIALS)) as gate:
        for number in range(5):
            gate.open()
            gate.send(b"\0")
            gate.greet(msgspec.structs.replace(LANE, lane=number))
        gate.turn_until(lambda: len(gate.admitted) == 5)


# Where it listens.


def opened(address: str, credentials: Credentials | None, loop: EventLoop, admit: Any = None) -> Listener:
    return Listener.open(address, credentials, admit, print, loop=loop, clock=VirtualClock())


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:0", "localhost:0", "127.0.0.77:0"])
def test_loopback_needs_no_key(loop: EventLoop, address: str) -> None:
    admitted: list[Any] = []
    with contextlib.closing(opened(address, None, loop, lambda *given: admitted.append(given))) as listener:
        host, port = split_address(listener.address)
        assert port > 0
        assert host == address.removesuffix(":0").strip("[]") or address == "localhost:0"
        with contextlib.closing(connect(listener.address, LANE, None, LONG)):
            while not admitted:
                loop.turn(LONG)
            admitted[0][1].close()


def test_an_ipv4_address_in_ipv6_form_is_what_it_is_in_ipv4_form() -> None:
    assert is_loopback("::ffff:127.0.0.1")
    assert not is_loopback("::ffff:10.1.2.3")


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "10.1.2.3:0", "[::ffff:10.1.2.3]:0"])
def test_other_addresses_need_a_key(loop: EventLoop, address: str) -> None:
    why = (
        "can be reached from other hosts, so the job needs a key: make one with lockstep key FILE, .*KEY_FILE"
    )
    with pytest.raises(ConfigError, match=f"{re.escape(address)} {why}"):
        opened(address, None, loop)


def test_with_a_key_any_address_of_the_host_works(loop: EventLoop) -> None:
    for address in ("0.0.0.0:0", "[::]:0"):
        opened(address, CREDENTIALS, loop).close()
    with pytest.raises(ConfigError, match=r"203\.0\.113\.1:0 is not an address of this host"):
        opened("203.0.113.1:0", CREDENTIALS, loop)


def test_a_port_is_taken_once(loop: EventLoop) -> None:
    with contextlib.closing(opened("127.0.0.1:0", None, loop)) as listener:
        with pytest.raises(ConfigError, match=f"{listener.address} is in use by another program"):
            opened(listener.address, None, loop)
        # A connection of the past does not hold the port.
        address = listener.address
        with contextlib.closing(socket.create_connection(split_address(address), LONG)):
            listener.close()
        opened(address, None, loop).close()


@pytest.mark.parametrize(
    "address", ["", "127.0.0.1", ":1", "::1:1", "[::1]", "[10.0.0.1]:5x", "a:", "a:-1", "a:\u0661", "[]:1"]
)
def test_a_malformed_address_is_named(loop: EventLoop, address: str) -> None:
    with pytest.raises(ConfigError, match=r"is not an address; expected HOST:PORT, such as 10.0.0.1:12345"):
        opened(address, None, loop)


def test_an_impossible_port_and_an_unknown_host_are_named(loop: EventLoop) -> None:
    with pytest.raises(ConfigError, match=r"the port of 127.0.0.1:65536 is more than 65535"):
        opened("127.0.0.1:65536", None, loop)
    with pytest.raises(NetworkError, match=r"the host .a\.\.b. cannot be resolved"):
        opened("a..b:1", None, loop)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_without_a_key_other_users_of_the_host_are_refused(loop: EventLoop, host: str) -> None:
    script = (
        "import encodings.idna, os, socket, sys; os.setuid(12345)\n"
        "sending = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
        "sending.sendall(bytes.fromhex(sys.argv[3])); assert not sending.recv(1)"
    )
    with contextlib.closing(Gate(loop, None, host)) as gate:
        data = encode_greeting(LANE, b"").hex()
        port = str(gate.listening.getsockname()[1])
        command = [sys.executable, "-c", script, host, port, data]
        with subprocess.Popen(command) as other:
            gate.turn_until(lambda: bool(gate.lines))
            assert other.wait(LONG) == 0
        assert "it is a process of user 12345, and a job without a key accepts only" in gate.lines[0]
        gate.send(bytes.fromhex(data), host)
        gate.turn_until(lambda: bool(gate.admitted))
