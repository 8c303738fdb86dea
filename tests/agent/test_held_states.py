"""How the agents of two hosts exchange the states that joiners need."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import xxhash

from lockstep.agent import held_states
from lockstep.agent.held_states import HeldStates
from lockstep.agent.lane_connections import HostNetwork, LaneConnections
from lockstep.protocol.channel import Attachment
from lockstep.protocol.credentials import Credentials
from lockstep.protocol.greeting import JOB, ConnectionKind, Greeting
from lockstep.protocol.worker import StateSource
from lockstep.system.clock import SystemClock
from lockstep.system.event_loop import EventLoop
from lockstep.transport import state_stream
from lockstep.transport.addresses import split_address
from lockstep.transport.dial import connect
from lockstep.transport.keys import JobKey
from lockstep.transport.listener import Listener

LONG = 120.0
DATA = os.urandom(3 * state_stream.PIECE + 5)
CREDENTIALS = JobKey.generate().mint()
JOB_ID = b"j" * JOB


@dataclass
class Host:
    """The agent of one host, as far as states concern it."""

    number: int
    loop: EventLoop
    credentials: Credentials
    refused: list[str] = field(default_factory=list)
    found: list[bytes | str] = field(default_factory=list)
    admitted: int = 0

    def __post_init__(self) -> None:
        self.connections = LaneConnections()
        self.listener = Listener.open(
            "127.0.0.1:0",
            self.credentials,
            self._admit,
            self.refused.append,
            loop=self.loop,
            clock=SystemClock(),
        )
        network = HostNetwork(JOB_ID, self.credentials, self.connections, self.listener.enter)
        self.moved: list[tuple[StateSource, int]] = []
        self.states = HeldStates(
            self.number, network, self.loop, lambda source, received, _: self.moved.append((source, received))
        )

    def _admit(self, greeting: Greeting, connection: socket.socket, peer: str) -> str | None:
        self.admitted += 1
        return self.connections.admit(greeting, connection, peer)

    def begin(self, view: int) -> None:
        self.listener.enter(
            JOB_ID, 1, view, lambda address, late: self.refused.append(f"late for view {late}")
        )
        self.states.begin_view(1, view)

    def give(self, data: bytes = DATA) -> StateSource:
        state = Attachment(os.memfd_create("test", os.MFD_CLOEXEC))
        with os.fdopen(os.dup(state.descriptor), "wb") as file:
            file.write(data)
        number = self.states.hold(state)
        return StateSource(2, number, len(data), self.number, *split_address(self.listener.address))

    def take(self, found: Attachment | str) -> None:
        data = found if isinstance(found, str) else os.pread(found.descriptor, 1 << 30, 0)
        self.found.append(data)

    def close(self) -> None:
        self.states.close()
        self.listener.close()


@dataclass
class Hosts:
    giver: Host
    receiver: Host
    loop: EventLoop

    def until(self, holds: Callable[[], object]) -> None:
        deadline = time.monotonic() + LONG
        while not holds():
            assert time.monotonic() < deadline
            self.loop.turn(0.01)

    def begin(self, view: int) -> None:
        self.giver.begin(view)
        self.receiver.begin(view)


@pytest.fixture(params=["plain", "encrypted"])
def hosts(request: pytest.FixtureRequest, closes_descriptors: None) -> Iterator[Hosts]:
    """Two hosts in view 2; afterwards, no thread and no descriptor is left."""
    credentials = CREDENTIALS if request.param == "encrypted" else JobKey.generate().mint(encrypted=False)
    with EventLoop() as loop:
        made = Hosts(Host(0, loop, credentials), Host(1, loop, credentials), loop)
        made.begin(2)
        yield made
        made.giver.close()
        made.receiver.close()
    made.until(lambda: {thread.name for thread in threading.enumerate()}.isdisjoint({"state", "release"}))


def test_a_state_arrives_once_for_all_joiners_of_a_host(hosts: Hosts) -> None:
    giver, receiver = hosts.giver, hosts.receiver
    first, source = giver.give(b"the position"), giver.give()
    assert (first.number, source.number) == (1, 2)
    for _ in range(3):
        receiver.states.fetch(source, receiver.take)
    hosts.until(lambda: receiver.found)
    assert receiver.found == [DATA] * 3
    held = receiver.states.find(2)
    assert held is not None
    assert receiver.states.find(1) is None
    receiver.states.fetch(source, receiver.take)
    receiver.states.fetch(first, receiver.take)
    hosts.until(lambda: len(receiver.found) == 5)
    assert receiver.found[3:] == [DATA, b"the position"]
    assert giver.admitted == 2


def test_a_state_that_takes_long_is_reported(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    giver, receiver = hosts.giver, hosts.receiver
    monkeypatch.setattr(held_states, "_TELL_EVERY", 0.0)
    goes_on = threading.Event()

    def send(connection: socket.socket, *_: object) -> None:
        connection.setblocking(True)
        connection.sendall(DATA[: state_stream.PIECE])
        goes_on.wait(LONG)
        connection.sendall(DATA[state_stream.PIECE :] + xxhash.xxh3_128(DATA).digest())

    monkeypatch.setattr(state_stream, "send_state", send)
    source = giver.give()
    receiver.states.fetch(source, receiver.take)
    hosts.until(lambda: (source, state_stream.PIECE) in receiver.moved)
    assert receiver.found == []
    goes_on.set()
    hosts.until(lambda: receiver.found)
    assert receiver.found == [DATA]
    assert giver.moved == []


def test_the_host_of_the_giver_needs_no_stream(hosts: Hosts) -> None:
    giver = hosts.giver
    source = giver.give()
    giver.states.fetch(source, giver.take)
    assert giver.found == [DATA]
    giver.begin(3)
    assert giver.states.find(1) is None
    giver.states.fetch(source, giver.take)
    assert giver.found[1:] == ["view 2 has ended"]
    assert giver.admitted == 0


def test_only_positions_are_needed_after_the_view(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    giver, receiver = hosts.giver, hosts.receiver
    goes_on = threading.Event()
    send = state_stream.send_state
    monkeypatch.setattr(state_stream, "send_state", lambda *args: (goes_on.wait(LONG), send(*args)))
    both, whole = giver.give(), giver.give(b"the whole state")
    late: list[object] = []
    receiver.states.fetch(both, late.append)
    receiver.states.fetch(both, receiver.take, lasts=True)
    receiver.states.fetch(whole, late.append)
    hosts.until(lambda: giver.admitted == 2)
    hosts.begin(3)
    goes_on.set()
    hosts.until(lambda: receiver.found)
    assert receiver.found == [DATA]
    assert receiver.states.find(1) is None
    assert late == []


def test_a_state_of_an_ended_view_is_refused(hosts: Hosts) -> None:
    giver, receiver = hosts.giver, hosts.receiver
    source = giver.give()
    giver.begin(3)
    receiver.states.fetch(source, receiver.take)
    hosts.until(lambda: receiver.found)
    assert "closed the connection after the greeting" in str(receiver.found[0])
    assert giver.refused == ["late for view 2"]


def test_a_giver_that_dies_is_named(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_states, "_PATIENCE", 0.3)
    receiver = hosts.receiver
    source = hosts.giver.give()
    hosts.giver.listener.close()
    receiver.states.fetch(source, receiver.take)
    hosts.until(lambda: receiver.found)
    assert str(receiver.found[0]).startswith(f"127.0.0.1:{source.port} refuses connections")
    # Another attempt is possible.
    receiver.states.fetch(source, receiver.take)
    hosts.until(lambda: len(receiver.found) == 2)


@pytest.mark.parametrize("end", ["giver", "receiver"])
def test_a_stream_ends_with_either_end(hosts: Hosts, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    monkeypatch.setattr(
        state_stream, "send_state", lambda connection, state, check: [check() for _ in iter(int, 1)]
    )
    giver, receiver = hosts.giver, hosts.receiver
    receiver.states.fetch(giver.give(), receiver.take)
    hosts.until(lambda: giver.admitted)
    if end == "receiver":
        receiver.close()
        giver.close()
        assert receiver.found == []
    else:
        giver.close()
        hosts.until(lambda: receiver.found)
        assert "has closed it" in str(receiver.found[0]) or "closed the connection" in str(receiver.found[0])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"receiver": 5}, "a copy of one for another host"),
        ({"lane": 7}, "is not held"),
        ({"view": 9}, "is not held"),
    ],
)
def test_requests_for_other_states_are_refused(hosts: Hosts, change: dict[str, int], why: str) -> None:
    giver = hosts.giver
    giver.give()
    fields = {"term": 1, "view": 2, "host": 1, "lane": 1, "receiver": 0, **change}
    greeting = Greeting(ConnectionKind.STATE, JOB_ID, **fields)
    with connect(giver.listener.address, greeting, giver.credentials, LONG) as connection:
        hosts.until(lambda: giver.refused)
        assert connection.recv(1) == b""
    assert why in giver.refused[0]


def test_no_view_has_begun(hosts: Hosts) -> None:
    greeting = Greeting(ConnectionKind.STATE, JOB_ID)
    one, other = socket.socketpair()
    with one, other:
        assert LaneConnections().admit(greeting, one, "") == "no view has begun on this host"
