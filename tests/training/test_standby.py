"""A server that is lost at any point: what the others see, and the recorded order, do not show it."""

import random
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import PeerLostError
from lockstep.keras.parameter_server import server_shards
from lockstep.keras.parameter_server.server_process import ServerProcess
from lockstep.keras.parameter_server.server_shards import (
    KeptServer,
    ServerShards,
    StandbyLink,
    TakenOverError,
)
from lockstep.keras.parameter_server.servers import ServerChannel, Servers
from lockstep.parameter_server import order
from lockstep.parameter_server.order import OrderFile, OrderWriter, Record, RecordKind
from lockstep.parameter_server.tasks import Tasks
from lockstep.protocol.parameter_server import Applied, EndCall, Keep, Pull, Push, Question, Read, Write
from lockstep.transport.array_channel import QuestionArrival

WORKERS = 3
STEPS = 6


class Lost(BaseException):
    """Ends the simulated server."""


class Variables:
    """One number, whose value depends on all updates in their order, and the rows that were updated."""

    def __init__(self) -> None:
        self.value = np.ones(1, np.int64)
        self.changed: set[int] = set()
        self.reported: set[int] = set()
        self.slots = ()
        self.state_bytes = 8

    def values(self, rows: Mapping[int, Any]) -> list[Any]:
        return [self.value.copy()]

    def update(self, gradients: Mapping[int, Any], updates: Any, rows: Any) -> None:
        self.value = self.value * 31 + gradients[0]
        self.changed.add(int(gradients[0][0]) % 7)

    def write(self, shards: Mapping[int, Any], slots: Any) -> None:
        self.value = shards[0].copy()

    def changes(self, *, again: bool = False) -> tuple[list[Any], dict[int, Any]]:
        found = self.changed | (self.reported if again else set())
        self.reported, self.changed = found, set()
        return [self.value.copy()], {0: np.array(sorted(found))}

    def digests(self) -> dict[int, Any]:
        return {}

    def state(self) -> list[Any]:
        return [self.value.copy(), np.array(sorted(self.changed)), np.array(sorted(self.reported))]

    def restore(self, state: Sequence[Any]) -> None:
        self.value = state[0].copy()
        self.changed, self.reported = ({int(one) for one in rows} for rows in state[1:])


class Client:
    """A worker, or the chief, which asks one question after another: the next one depends on the answers."""

    def __init__(self, process: int) -> None:
        self.process = process
        self.answers: list[int] = []
        self.rows: list[set[int]] = []
        self.arrival: QuestionArrival | None = None

    def ask(self) -> QuestionArrival:
        """Return the next question, or the same again if the server was lost before it has answered."""
        number = len(self.answers)
        question: Question
        seen = np.array([sum(self.answers[-2:]) % 1000], np.int64)
        if self.process == 0:
            question = Read(number) if number % 3 else Write(number, (0,), ())
        else:
            question = Push(number // 2 * WORKERS + self.process, (0,)) if number % 2 else Pull(number // 2)
        arrays = [] if isinstance(question, Pull | Read) else [seen]
        self.arrival = QuestionArrival(self.process, question, arrays)
        return self.arrival

    def receive(self) -> None:
        """Take the answer."""
        assert self.arrival is not None
        answer = self.arrival._answer.get_nowait()
        assert answer is not None
        _, arrays = answer
        self.answers.append(int(arrays[0][0]) if arrays else 0)
        self.rows.append({int(one) for one in arrays[1]} if len(arrays) > 1 else set())


class Link:
    """What `StandbyLink` sends through."""

    def __init__(self, kept: KeptServer, lose: Callable[[str], None]) -> None:
        self.kept, self.lose = kept, lose

    def send(self, message: Question, arrays: Sequence[Any] = ()) -> None:
        self.lose("unsent")
        self.answer = QuestionArrival(9, message, [array.copy() for array in arrays])
        self.kept.receive(self.answer)
        self.lose("sent")

    def receive(self, question: Question) -> tuple[Any, list[Any]]:
        self.lose("received")
        answer, _ = self.answer._answer.get_nowait() or (None, [])
        return answer, []

    def close(self) -> None:
        """Close nothing."""


def fail(error: Exception) -> None:
    raise error


def linked(
    channel: Link, confirm: Callable[[PeerLostError], object] = fail, *, repeats: bool = False
) -> StandbyLink:
    """Return the connection to a standby."""
    return StandbyLink(channel, "parameter server 1", confirm, repeats=repeats)  # type: ignore[arg-type]


def run(
    path: Any, seed: int, lose_at: int | None, *, repeats: bool = False
) -> tuple[list[Client], list[Record], Variables, bool]:
    """Serve clients in a random order; the server is lost at a point.

    Args:
        path: of the order.
        seed: of the order of arrivals.
        lose_at: the number of the point; None for no loss.
        repeats: whether the standby repeats messages before it takes over, some later than others.

    Returns:
        The clients, the recorded order, the variables, and whether the server was lost.
    """
    drawn, points = random.Random(seed), 0

    def lose(_: str) -> None:
        nonlocal points
        points += 1
        if points == lose_at:
            raise Lost

    kept = KeptServer()
    writer = OrderWriter(OrderFile(path).write)
    writer.add(RecordKind.CALL, 0, 1)
    variables, twin = Variables(), Variables()
    link = linked(Link(kept, lose), repeats=repeats)
    shards = ServerShards(variables, writer, None, link)  # type: ignore[arg-type]
    standby = ServerShards(twin, OrderWriter(None), None, None)  # type: ignore[arg-type]
    behind = random.Random(seed)
    clients = [Client(process) for process in range(WORKERS + 1)]
    lost = False
    while waiting := [client for client in clients if len(client.answers) < 2 * STEPS]:
        client = drawn.choice(waiting)
        try:
            shards.arrive(client.ask())
            lose("answered")
        except Lost:
            lost = True
            drawn = random.Random(seed)
            kept.take_over()
            writer = OrderWriter(OrderFile(path).write)
            writer.add(RecordKind.CALL, 0, 1)
            variables = twin
            shards = ServerShards(variables, writer, None, None)  # type: ignore[arg-type]
            shards.resume(kept)
            continue
        client.receive()
        while repeats and not lost and kept.messages and behind.random() < 0.6:
            standby.repeat(kept)
    writer.end()
    writer.close()
    return clients, order.read_order(path, 1), variables, lost


def replay(records: Sequence[Record]) -> tuple[list[Client], Variables]:
    """Ask in a recorded order."""
    variables = Variables()
    shards = ServerShards(variables, OrderWriter(None), None, None)  # type: ignore[arg-type]
    clients = [Client(process) for process in range(WORKERS + 1)]
    for record in records:
        client = clients[record.worker]
        shards.arrive(client.ask())
        client.receive()
    return clients, variables


@settings(deadline=None, max_examples=200)
@given(
    seed=st.integers(0, 10_000),
    lose_at=st.integers(1, 220),
    kind=st.sampled_from(["keeps few", "keeps many", "repeats"]),
)
def test_a_run_that_lost_a_server_is_a_function_of_its_order(
    tmp_path_factory: pytest.TempPathFactory, seed: int, lose_at: int, kind: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_shards, "KEPT_BYTES", 1 << 20 if kind == "keeps many" else 0)
        path = tmp_path_factory.mktemp("order") / "ps-0"
        clients, records, variables, _ = run(path, seed, lose_at, repeats=kind == "repeats")
    twins, twin = replay(records)
    assert [client.answers for client in twins] == [client.answers for client in clients]
    # The rows of an answer that did not arrive are given again, perhaps with some that did.
    for client, other in zip(clients, twins, strict=True):
        assert all(mine >= needed for mine, needed in zip(client.rows, other.rows, strict=True))
    assert twin.value.tobytes() == variables.value.tobytes()
    assert len(records) == 2 * STEPS * (WORKERS + 1)


def test_every_point_is_reached(tmp_path: Any) -> None:
    assert run(tmp_path / "ps-0", 1, 180)[3]
    assert not run(tmp_path / "ps-1", 1, None)[3]


def test_a_server_whose_shards_were_taken_over_answers_and_writes_nothing() -> None:
    kept = KeptServer()
    written: list[bytes] = []
    shards = ServerShards(
        Variables(),  # type: ignore[arg-type]
        OrderWriter(written.append),
        None,
        linked(Link(kept, lambda _: None)),
    )
    kept.take_over()
    arrival = QuestionArrival(1, Pull(0))
    with pytest.raises(TakenOverError, match="parameter server 1 has taken over the shards of this server"):
        shards.arrive(arrival)
    shards.close()
    assert arrival._answer.empty()
    assert list(kept.records) == []
    assert written == []


class Broken(Link):
    """A connection that has ended."""

    def send(self, message: Question, arrays: Sequence[Any] = ()) -> None:
        raise PeerLostError("parameter server 1 has ended")


def test_a_server_continues_without_its_standby() -> None:
    confirmed: list[PeerLostError] = []
    link = linked(Broken(KeptServer(), lambda _: None), confirmed.append)
    shards = ServerShards(Variables(), OrderWriter(None), None, link)  # type: ignore[arg-type]
    for step in range(2):
        arrival = QuestionArrival(1, Pull(step))
        shards.arrive(arrival)
        assert arrival._answer.get_nowait() is not None
    assert [str(error) for error in confirmed] == ["parameter server 1 has ended"]


def test_a_server_answers_nothing_without_a_standby_that_may_take_over() -> None:
    link = linked(Broken(KeptServer(), lambda _: None), fail)
    shards = ServerShards(Variables(), OrderWriter(None), None, link)  # type: ignore[arg-type]
    arrival = QuestionArrival(1, Pull(0))
    with pytest.raises(PeerLostError, match="parameter server 1 has ended"):
        shards.arrive(arrival)
    assert arrival._answer.empty()


def opening(connect: Callable[..., Any], *lost: frozenset[int], timeout: float = 0.0) -> Any:
    """Return a server that connects to its standby, process 3.

    Args:
        connect: to it.
        lost: the processes that are lost, as the server learns it in turn.
        timeout: of the server.
    """
    server: Any = object.__new__(ServerProcess)
    told = iter(lost)
    server.tasks, server.timeout = Tasks(4, 2), timeout
    server.mesh = SimpleNamespace(channel=connect, lost=lambda: next(told))
    return server


def test_a_server_whose_standby_is_lost_before_it_connects_has_none(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def unreachable(*_: object) -> None:
        raise PeerLostError("parameter server 1 has ended")

    for server in (
        opening(unreachable, frozenset({3})),
        opening(unreachable, frozenset(), frozenset({3}), timeout=60.0),
    ):
        assert server._link(3, 0) is None
        assert "which has none until the next call" in capfd.readouterr().err
    with pytest.raises(PeerLostError, match="parameter server 1 has ended"):
        opening(unreachable, frozenset(), frozenset())._link(3, 0)


def test_a_server_that_fails_writes_its_order_before_its_standby_continues_it() -> None:
    server = opening(lambda *_: None)
    closed: list[str] = []
    server._served = {0: SimpleNamespace(close=lambda: closed.append("order"))}
    server.mesh.leave = lambda call: closed.append(call)
    server.call, server.writer = SimpleNamespace(number="connections"), OrderWriter(None)
    server.close()
    assert closed == ["order", "connections"]


def test_a_server_waits_until_the_loss_of_its_standby_is_announced(
    capfd: pytest.CaptureFixture[str],
) -> None:
    connection = Broken(KeptServer(), lambda _: None)
    server = opening(lambda *_: connection, frozenset(), frozenset({3}), timeout=60.0)
    server._link(3, 0).lose(PeerLostError("parameter server 1 has ended"))
    assert capfd.readouterr().err.count("it was the standby of this server") == 1


class Channel:
    """An `AskingChannel` whose other end is lost after some operations."""

    def __init__(self, left: int, peer: str = "parameter server 0") -> None:
        self.left, self.peer, self.silent = left, peer, True
        self.sent: list[Question] = []

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise PeerLostError("parameter server 0 has ended")

    def send(self, message: Question, arrays: Sequence[Any] = ()) -> None:
        self._count()
        self.sent.append(message)

    def receive(self, question: Question) -> tuple[Any, list[Any]]:
        self._count()
        assert self.sent[-1] == question
        return Applied(7), []

    def is_silent(self, within: float) -> bool:
        return self.silent

    def close(self) -> None:
        """Close nothing."""


@pytest.mark.parametrize("left", [0, 1, 2, 3])
def test_a_question_without_an_answer_is_asked_again(left: int) -> None:
    first, second = Channel(left), Channel(100)
    channel = ServerChannel([lambda: first, lambda: second])  # type: ignore[list-item, return-value]
    for step in range(2):
        assert channel.ask(Pull(step))[0] == Applied(7)
    assert [*first.sent[: left // 2], *second.sent] == [Pull(0), Pull(1)]


def test_each_silent_server_is_named_once() -> None:
    channels = [Channel(1, peer) for peer in ("server 1", "server 0", "server 1")]
    channels[1].silent = False
    connected = [ServerChannel([lambda one=one: one]) for one in channels]  # type: ignore[misc]
    for channel in connected:
        channel.connect()
    servers = Servers(connected, ())
    assert servers.silent(5.0) == ["server 1"]


def test_a_server_that_cannot_be_reached_at_the_beginning_is_lost() -> None:
    def unreachable() -> Any:
        raise PeerLostError("parameter server 0 has ended")

    second = Channel(100)
    channel = ServerChannel([unreachable, lambda: second])  # type: ignore[list-item, return-value]
    assert channel.ask(EndCall())[0] == Applied(7)


def test_a_standby_that_was_lost_before_its_server_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    def unreachable() -> Any:
        raise PeerLostError("parameter server 1 has ended")

    channel = ServerChannel([lambda: Channel(0), unreachable])  # type: ignore[list-item, return-value]
    with pytest.raises(PeerLostError, match=r"server 0 has ended; no standby has its weights: .* server 1"):
        channel.ask(Pull(0))
    assert "continues" not in capfd.readouterr().err
    assert channel.silent(5.0) == ""


def test_the_loss_of_a_standby_too_is_named() -> None:
    channel = ServerChannel([lambda: Channel(0), lambda: Channel(1)])  # type: ignore[list-item, return-value]
    with pytest.raises(PeerLostError, match="has ended; no standby has its weights"):
        channel.ask(Pull(0))


def test_a_standby_repeats_few_small_updates() -> None:
    kept = KeptServer()
    link = linked(Link(kept, lambda _: None))
    sent = 0
    while not link.is_due(state_bytes=8):
        link.send(1, Pull(sent), [])
        link.confirm()
        link.send(1, Push(sent, (0,)), [np.zeros(2, np.float32)])
        link.confirm()
        sent += 1
    assert len(kept.messages) == sent == server_shards.KEPT_BYTES // server_shards.LEAST_BYTES + 1


def test_what_was_kept_before_a_state_is_dropped() -> None:
    kept = KeptServer()
    link = linked(Link(kept, lambda _: None))
    gradient = np.zeros(3, np.float32)
    for step in range(2):
        link.send(1, Push(step, (0,)), [gradient])
        link.confirm()
    assert [message for _, message, _ in kept.messages] == [Push(0, (0,)), Push(1, (0,))]
    link.send_state([gradient])
    assert not kept.messages
    assert kept.state is not None
    link.send(1, Pull(2), [gradient])
    link.confirm()
    assert not kept.messages
    assert list(kept.records) == [
        Record(RecordKind.PUSH, 1, 0),
        Record(RecordKind.PUSH, 1, 1),
        Record(RecordKind.PULL, 1, 2),
    ]
    assert isinstance(link._question, Keep)
