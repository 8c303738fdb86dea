"""Questions and answers with arrays: what arrives, who is lost or stuck, and what harms no other."""

import contextlib
import itertools
import queue
import secrets
import socket
import struct
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import NetworkError, PeerLostError, PeerStuckError
from lockstep.protocol.parameter_server import (
    Alive,
    Applied,
    Assigned,
    AtCall,
    Introduction,
    Passed,
    Pull,
    Push,
    ServedValues,
    WorkDone,
)
from lockstep.transport import array_channel
from lockstep.transport.array_channel import AnsweringEnd, AskingChannel, QuestionArrival

PATIENCE = 120.0
WORK_DONE = WorkDone(AtCall(1, 2), 3, (), ("loss", "accuracy"), 2, b"check")
SHORT = 0.05
THREADS = ("lockstep-accept", "lockstep-serve")
MANY = 3 << 20
"""Bytes that do not fit into the buffers of a socket."""

Array = npt.NDArray[Any]
Inbox = queue.SimpleQueue[QuestionArrival]
Connect = Callable[..., AskingChannel]


def own_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name in THREADS]


def join_threads() -> None:
    for thread in own_threads():
        thread.join(PATIENCE)
    assert not own_threads()


@pytest.fixture
def inbox() -> Inbox:
    return queue.SimpleQueue()


@pytest.fixture
def end(inbox: Inbox) -> Iterator[AnsweringEnd]:
    made = AnsweringEnd(inbox.put)
    yield made
    made.close()
    join_threads()


@pytest.fixture
def connect(end: AnsweringEnd) -> Iterator[Connect]:
    """Connects a process of this id to the answering end."""
    with contextlib.ExitStack() as stack:

        def connected(process: int = 1, timeout: float = PATIENCE) -> AskingChannel:
            channel = AskingChannel(end.address, process, "the chief", timeout)
            stack.callback(channel.close)
            return channel

        yield connected


@pytest.fixture
def stranger(end: AnsweringEnd) -> Iterator[socket.socket]:
    """A connection to the answering end on which a test may send anything."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
        made.settimeout(PATIENCE)
        made.connect(end.address)
        yield made


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Another end, which answers only what a test sends."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
        made.bind(b"\0lockstep-test-" + secrets.token_hex(16).encode())
        made.listen()
        yield made


def frame(message: msgspec.Struct, described: object = ()) -> bytes:
    header = msgspec.msgpack.encode((message, described))
    return struct.pack(">I", len(header)) + header


def is_closed(connection: socket.socket) -> bool:
    """Wait for the end of a connection; return whether nothing was sent before."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        # Closed before everything was read.
        return True


def echo(channel: AskingChannel, inbox: Inbox, arrays: list[Array]) -> list[Array]:
    """Send arrays with a question, and return those of an answer that has the same."""
    channel.send(Pull(7), arrays)
    arrival = inbox.get(timeout=PATIENCE)
    assert arrival.message == Pull(7)
    arrival.answer(ServedValues(((0, 1),)), arrival.arrays)
    answer, received = channel.receive(Pull(7))
    assert answer == ServedValues(((0, 1),))
    return received


def assert_equal(received: list[Array], sent: list[Array]) -> None:
    assert len(received) == len(sent)
    for one, other in zip(received, sent, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes()
        assert one.flags.writeable


@pytest.mark.parametrize(
    "dtype",
    [
        *("bool", "int8", "uint16", "int32", "int64", "uint64", "float16", "float32", "float64"),
        *("complex64", "complex128", ">f4", ">i8", "datetime64[ns]", "U3", "S5"),
        *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.int4),
    ],
    ids=str,
)
def test_arrays_of_every_dtype_arrive_equal(connect: Connect, inbox: Inbox, dtype: npt.DTypeLike) -> None:
    values = np.arange(24) % 7
    arrays: list[Array] = [values.astype(np.int8 if dtype == ml_dtypes.int4 else values.dtype).astype(dtype)]
    arrays += [arrays[0].reshape(2, 3, 4), arrays[0][3:4].reshape(()), arrays[0][:0].reshape(0, 5)]
    assert_equal(echo(connect(), inbox, arrays), arrays)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (2, 3, 4), (1, 1, 1, 1), (200, 300)], ids=str)
def test_arrays_of_every_shape_arrive_equal(connect: Connect, inbox: Inbox, shape: tuple[int, ...]) -> None:
    arrays: list[Array] = [np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)]
    assert_equal(echo(connect(), inbox, arrays), arrays)


@pytest.mark.parametrize("side", [8, 300], ids=["small", "large"])
def test_arrays_that_are_not_contiguous_arrive_equal(connect: Connect, inbox: Inbox, side: int) -> None:
    base: Array = np.arange(side * side, dtype=np.float64).reshape(side, side)
    arrays: list[Array] = [
        base.T,
        base[::2, 1::3],
        base[::-1],
        np.asfortranarray(base),
        np.broadcast_to(base[0], (3, side)),
        base.astype(ml_dtypes.bfloat16).T,
    ]
    assert_equal(echo(connect(), inbox, arrays), arrays)


def test_small_and_large_arrays_keep_their_order(connect: Connect, inbox: Inbox) -> None:
    sizes = (1, 100_000, 0, 2, 65_535, 65_536, 65_537, 3, 200_000)
    arrays: list[Array] = [np.full(size, index, np.uint8) for index, size in enumerate(sizes)]
    assert_equal(echo(connect(), inbox, arrays), arrays)


def test_special_values_keep_their_bits(connect: Connect, inbox: Inbox) -> None:
    bits = np.array([0x80000000, 0x7FC00001, 0xFF800000, 0x7F800001, 1], np.uint32)
    arrays: list[Array] = [bits.view(np.float32)]
    assert_equal(echo(connect(), inbox, arrays), arrays)


@settings(deadline=None)
@given(st.binary(max_size=100), st.lists(st.integers(1, 40)), st.lists(st.integers(0, 40)))
def test_bytes_that_arrive_in_any_pieces_are_read_in_any_pieces(
    data: bytes, arriving: list[int], wanted: list[int]
) -> None:
    rest, pieces = memoryview(data), itertools.chain(arriving, itertools.repeat(7))

    def receive(view: memoryview) -> int:
        nonlocal rest
        count = min(len(view), len(rest), next(pieces))
        if not count:
            raise array_channel._Ended
        view[:count], rest = rest[:count], rest[count:]
        return count

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(array_channel, "_SMALL", 16)
        reader, found = array_channel._ConnectionReader(receive), bytearray()
        for count in wanted:
            if len(found) + count > len(data):
                with pytest.raises(array_channel._Ended):
                    reader.exactly(count)
                break
            found += reader.exactly(count)
    assert data.startswith(bytes(found))


def test_a_message_without_arrays_arrives_equal(connect: Connect, inbox: Inbox) -> None:
    channel = connect()
    channel.send(WORK_DONE)
    arrival = inbox.get(timeout=PATIENCE)
    assert (arrival.process, arrival.message, arrival.arrays) == (1, WORK_DONE, [])
    arrival.answer(Assigned(5, (3, 4), ()))
    assert channel.receive(AtCall(1, 2)) == (Assigned(5, (3, 4), ()), [])


def test_asking_waits_for_the_answer() -> None:
    def put(arrival: QuestionArrival) -> None:
        if isinstance(arrival.message, Push):
            arrival.answer(Applied(arrival.message.step), [2 * array for array in arrival.arrays])

    end = AnsweringEnd(put)
    channel = AskingChannel(end.address, 1, "parameter server 0", PATIENCE)
    for step in range(20):
        answer, (doubled,) = channel.ask(Push(step, (0,)), [np.full(3, step)])
        assert answer == Applied(step)
        assert doubled.tolist() == [2 * step] * 3
    channel.close()
    end.close()
    join_threads()


def test_questions_of_all_connections_arrive_in_one_queue(connect: Connect, inbox: Inbox) -> None:
    channels = {process: connect(process) for process in (3, 1, 2)}
    for process, channel in channels.items():
        channel.send(Pull(process), [np.array(process)])
    found = [inbox.get(timeout=PATIENCE) for _ in channels]
    assert {arrival.process: arrival.message for arrival in found} == {p: Pull(p) for p in channels}
    for arrival in found:
        assert arrival.arrays[0] == arrival.process
        arrival.answer(Applied(arrival.process))
    for process, channel in channels.items():
        assert channel.receive(Pull(process)) == (Applied(process), [])


def test_questions_of_one_connection_arrive_in_their_order_and_after_each_answer(
    connect: Connect, inbox: Inbox
) -> None:
    channel = connect()
    for step in range(5):
        channel.send(Pull(step))
    for step in range(5):
        arrival = inbox.get(timeout=PATIENCE)
        assert arrival.message == Pull(step)
        assert inbox.empty()
        arrival.answer(Applied(step))
    assert [channel.receive(Pull(step))[0].staleness for step in range(5)] == list(range(5))


def test_questions_may_be_answered_in_another_order(connect: Connect, inbox: Inbox) -> None:
    first, second = connect(1), connect(2)
    first.send(AtCall(1, 2))
    held = inbox.get(timeout=PATIENCE)
    second.send(AtCall(1, 2))
    inbox.get(timeout=PATIENCE).answer(Passed(1))
    assert second.receive(AtCall(1, 2)) == (Passed(1), [])
    held.answer(Applied())
    assert first.receive(AtCall(1, 2)) == (Applied(), [])


def test_two_large_questions_arrive_at_the_same_time(connect: Connect, inbox: Inbox) -> None:
    """Both are received before either is answered, and their answers are as large."""
    arrays: dict[int, list[Array]] = {
        process: [np.arange(MANY, dtype=np.uint8) * process] for process in (1, 2)
    }
    answers = dict[int, list[Array]]()

    def ask(process: int) -> None:
        _, answers[process] = connect(process).ask(Push(0, (0,)), arrays[process])

    threads = [threading.Thread(target=ask, args=(process,)) for process in arrays]
    for thread in threads:
        thread.start()
    for arrival in [inbox.get(timeout=PATIENCE) for _ in threads]:
        arrival.answer(ServedValues(), arrival.arrays)
    for thread in threads:
        thread.join(PATIENCE)
    for process in arrays:
        assert_equal(answers[process], arrays[process])


def test_a_process_that_stops_within_a_question_delays_no_other(
    connect: Connect, stranger: socket.socket, inbox: Inbox
) -> None:
    stranger.sendall(frame(Introduction(9)) + frame(Push(0, (0,)), [("uint8", (MANY,))]) + bytes(1000))
    arrays: list[Array] = [np.arange(MANY, dtype=np.uint8)]
    assert_equal(echo(connect(), inbox, arrays), arrays)


def test_a_process_that_does_not_read_its_answer_delays_no_other(
    connect: Connect, stranger: socket.socket, inbox: Inbox
) -> None:
    stranger.sendall(frame(Introduction(9)) + frame(Pull(0)))
    inbox.get(timeout=PATIENCE).answer(ServedValues(), [np.zeros(MANY, np.uint8)])
    arrays: list[Array] = [np.arange(MANY, dtype=np.uint8)]
    assert_equal(echo(connect(), inbox, arrays), arrays)


def test_the_end_of_a_connection_is_a_question_without_a_message(connect: Connect, inbox: Inbox) -> None:
    channel = connect(4)
    echo(channel, inbox, [])
    channel.close()
    arrival = inbox.get(timeout=PATIENCE)
    assert (arrival.process, arrival.message, arrival.arrays) == (4, None, [])
    assert inbox.empty()


def test_an_end_that_closes_is_named_as_lost(closes_descriptors: None) -> None:
    inbox: Inbox = queue.SimpleQueue()
    end = AnsweringEnd(inbox.put)
    channel = AskingChannel(end.address, 1, "the chief", PATIENCE)
    channel.send(AtCall(1, 2))
    inbox.get(timeout=PATIENCE)
    end.close()
    for ask in (channel.receive, channel.ask):
        with pytest.raises(PeerLostError) as lost:
            ask(AtCall(1, 2))
        assert str(lost.value) == "the chief has ended; its log says why"
    channel.close()
    join_threads()


@pytest.mark.parametrize("part", [0, 3, 4, 10, -1])
def test_an_end_that_closes_within_an_answer_is_lost(listener: socket.socket, part: int) -> None:
    answer = frame(ServedValues(), [("float32", (2,))]) + bytes(8)
    channel = AskingChannel(listener.getsockname(), 1, "parameter server 1", PATIENCE)
    accepted, _ = listener.accept()
    with accepted, contextlib.closing(channel):
        accepted.sendall(answer[:part])
        accepted.shutdown(socket.SHUT_RDWR)
        with pytest.raises(PeerLostError, match="parameter server 1 has ended"):
            channel.receive(Pull(0))


@pytest.mark.parametrize(
    "answer",
    [
        b"\xff" * 8,
        struct.pack(">I", 3) + b"\xc1\xc1\xc1",
        frame(AtCall(1, 2)),
        frame(Applied(), [("float33", (2,))]),
    ],
    ids=["too long", "not msgpack", "question", "dtype"],
)
def test_an_end_that_answers_something_else_is_lost(listener: socket.socket, answer: bytes) -> None:
    channel = AskingChannel(listener.getsockname(), 1, "parameter server 1", PATIENCE)
    accepted, _ = listener.accept()
    with accepted, contextlib.closing(channel):
        accepted.sendall(answer)
        with pytest.raises(PeerLostError, match="parameter server 1 has ended"):
            channel.receive(Pull(0))


def test_an_end_that_does_not_answer_is_named_as_stuck(connect: Connect, inbox: Inbox) -> None:
    channel = connect(timeout=SHORT)
    with pytest.raises(PeerStuckError) as stuck:
        channel.ask(AtCall(1, 2))
    assert str(stuck.value) == (
        "the chief has not answered 'call' for 0.05 s: `w` in lockstep top shows what it does; "
        "--timeout sets the limit"
    )
    channel.close()
    # The answer to a process that has given up harms nobody.
    inbox.get(timeout=PATIENCE).answer(ServedValues(), [np.zeros(MANY, np.uint8)])
    assert inbox.get(timeout=PATIENCE).message is None


def test_an_end_that_does_not_read_is_named_as_stuck(listener: socket.socket) -> None:
    channel = AskingChannel(listener.getsockname(), 1, "parameter server 0", SHORT)
    accepted, _ = listener.accept()
    stuck = pytest.raises(PeerStuckError, match=r"^parameter server 0 has not answered 'push' for 0\.05 s")
    with accepted, contextlib.closing(channel), stuck:
        channel.send(Push(0, (0,)), [np.zeros(MANY, np.uint8)])


def test_an_end_that_waits_for_others_is_not_silent(connect: Connect, inbox: Inbox) -> None:
    waiting, asking = connect(), connect(2)
    waiting.send(AtCall(1, 2))
    held = inbox.get(timeout=PATIENCE)
    assert not asking.is_silent(PATIENCE / 2)
    held.answer(Passed(1))
    assert waiting.receive(AtCall(1, 2)) == (Passed(1), [])
    assert inbox.empty()
    assert asking._connection.gettimeout() == PATIENCE


@pytest.mark.parametrize("lost", [None, lambda: False], ids=["one host", "several hosts"])
def test_an_end_that_does_not_answer_is_silent(listener: socket.socket, lost: Any) -> None:
    channel = AskingChannel(listener.getsockname(), 1, "parameter server 0", PATIENCE, lost=lost)
    with contextlib.closing(channel):
        assert channel.is_silent(SHORT)


def test_an_end_that_has_ended_is_not_silent(listener: socket.socket) -> None:
    channel = AskingChannel(listener.getsockname(), 1, "parameter server 0", PATIENCE)
    accepted, _ = listener.accept()
    accepted.close()
    with contextlib.closing(channel):
        assert not channel.is_silent(PATIENCE)


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The notes of a patient channel, for which 1000 s pass whenever it looks at the clock."""
    found = list[str]()
    clock = types.SimpleNamespace(monotonic=itertools.count(0.0, 1000.0).__next__)
    monkeypatch.setattr(array_channel, "time", clock)
    monkeypatch.setattr(array_channel, "note", found.append)
    for name in ("_REPORT_AFTER", "_REPORT_AT_LEAST"):
        monkeypatch.setattr(array_channel, name, 0.001)
    return found


def test_a_patient_process_waits_for_one_that_runs(
    end: AnsweringEnd, connect: Connect, inbox: Inbox, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = connect()
    channel.be_patient()
    channel.send(AtCall(0, 0))
    held = inbox.get(timeout=PATIENCE)

    def noted(text: str) -> None:
        notes.append(text)
        if len(notes) == 3:
            held.answer(Passed(1))

    monkeypatch.setattr(array_channel, "note", noted)
    assert channel.receive(AtCall(0, 0)) == (Passed(1), [])
    waited = "this process has waited {} s for the chief, which has not answered 'call'"
    assert notes[:3] == [waited.format(seconds) for seconds in (1000, 2000, 3000)]
    assert inbox.empty()


def test_a_patient_process_finds_one_that_does_not_run_stuck(
    listener: socket.socket, notes: list[str]
) -> None:
    channel = AskingChannel(listener.getsockname(), 1, "the chief", SHORT)
    channel.be_patient()
    with (
        contextlib.closing(channel),
        pytest.raises(PeerStuckError, match="the chief has not answered 'call'"),
    ):
        channel.ask(AtCall(0, 0))
    assert len(notes) == 1


def test_a_patient_process_notices_the_end_of_the_other(listener: socket.socket) -> None:
    channel = AskingChannel(listener.getsockname(), 1, "the chief", PATIENCE)
    channel.be_patient()
    accepted, _ = listener.accept()
    accepted.close()
    with contextlib.closing(channel), pytest.raises(PeerLostError, match="the chief has ended"):
        channel.receive(AtCall(0, 0))


def test_a_process_that_runs_says_so_without_a_question(stranger: socket.socket, inbox: Inbox) -> None:
    stranger.sendall(frame(Alive()))
    expected = frame(Applied(), [])
    assert stranger.recv(len(expected), socket.MSG_WAITALL) == expected
    assert is_closed(stranger)
    assert inbox.empty()


GARBAGE = {
    "too long": b"\xff\xff\xff\xff" + bytes(100),
    "just too long": struct.pack(">I", (64 << 20) + 1),
    "not msgpack": struct.pack(">I", 4) + b"\xc1\xc1\xc1\xc1",
    "no message": struct.pack(">I", 1) + b"\x90",
    "empty": struct.pack(">I", 0),
    "an answer": frame(Applied()),
    "web browser": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "dtype": frame(Pull(0), [("float33", (2,))]),
    "negative shape": frame(Pull(0), [("float32", (-2,))]),
}


@pytest.mark.parametrize("greeted", [False, True], ids=["stranger", "greeted"])
@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE)
def test_a_connection_that_sends_garbage_is_closed_and_harms_no_other(
    connect: Connect, stranger: socket.socket, inbox: Inbox, data: bytes, greeted: bool
) -> None:
    channel = connect(1)
    channel.send(AtCall(1, 2))
    held = inbox.get(timeout=PATIENCE)
    # One that greets is known, and its end is told.
    stranger.sendall(frame(Introduction(9)) * greeted + data)
    assert is_closed(stranger)
    if greeted:
        told = inbox.get(timeout=PATIENCE)
        assert (told.process, told.message) == (9, None)
    assert inbox.empty()
    held.answer(Passed(1))
    assert channel.receive(AtCall(1, 2)) == (Passed(1), [])
    assert_equal(echo(connect(2), inbox, [np.arange(3)]), [np.arange(3)])


@pytest.mark.parametrize("sent", [b"", b"\0\0", struct.pack(">I", 100) + b"part"])
def test_a_connection_that_ends_before_it_greets_is_no_process(
    connect: Connect, stranger: socket.socket, inbox: Inbox, sent: bytes
) -> None:
    stranger.sendall(sent)
    stranger.shutdown(socket.SHUT_WR)
    assert is_closed(stranger)
    assert inbox.empty()
    assert echo(connect(), inbox, []) == []


def test_a_question_before_the_greeting_is_refused(stranger: socket.socket, inbox: Inbox) -> None:
    stranger.sendall(frame(AtCall(1, 2)))
    assert is_closed(stranger)
    assert inbox.empty()


def test_closing_ends_all_threads_and_descriptors(closes_descriptors: None) -> None:
    """Some connections wait for an answer, some have one, one has not sent its question to the end."""
    inbox: Inbox = queue.SimpleQueue()
    end = AnsweringEnd(inbox.put)
    channels = [AskingChannel(end.address, process, "the chief", PATIENCE) for process in range(4)]
    for channel in channels:
        echo(channel, inbox, [])
    for channel in channels[:2]:
        channel.send(AtCall(1, 2))
        inbox.get(timeout=PATIENCE)
    channels[3]._connection.sendall(frame(Push(0, (0,)), [("uint8", (MANY,))]))
    end.close()
    for channel in channels:
        assert is_closed(channel._connection)
        channel.close()
    join_threads()
    told = [inbox.get_nowait() for _ in channels]
    assert inbox.empty()
    assert {arrival.process for arrival in told} == {0, 1, 2, 3}
    assert {arrival.message for arrival in told} == {None}


def test_every_end_has_an_address_of_its_own_without_a_file(closes_descriptors: None) -> None:
    ends = [AnsweringEnd(lambda arrival: None) for _ in range(3)]
    addresses = {end.address for end in ends}
    assert len(addresses) == 3
    assert all(address.startswith(b"\0lockstep-") for address in addresses)
    for end in ends:
        end.close()
    join_threads()


@pytest.fixture
def remote(inbox: Inbox) -> Iterator[tuple[AnsweringEnd, Callable[[], socket.socket]]]:
    """An end with an entrance, and what connects over TCP as an agent passes such connections on."""
    with contextlib.ExitStack() as stack:
        end = AnsweringEnd(inbox.put, lambda connection: connection)
        stack.callback(join_threads)
        stack.callback(end.close)
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def dial() -> socket.socket:
            connection = socket.create_connection(listener.getsockname())
            accepted, _ = listener.accept()
            with accepted, socket.socket(socket.AF_UNIX) as passing:
                passing.connect(end.entrance)
                socket.send_fds(passing, [b"\0"], [accepted.fileno()])
            return connection

        yield end, dial


def test_a_connection_from_another_host_is_passed_on(
    inbox: Inbox, remote: tuple[AnsweringEnd, Callable[[], socket.socket]]
) -> None:
    end, dial = remote
    with contextlib.closing(AskingChannel(b"", 3, "the chief", PATIENCE, dial)) as channel:
        sent = np.arange(MANY, dtype=np.uint8)
        channel.send(Push(1, (0,)), [sent])
        arrival = inbox.get(timeout=PATIENCE)
        assert (arrival.process, arrival.message) == (3, Push(1, (0,)))
        np.testing.assert_array_equal(arrival.arrays[0], sent)
        arrival.answer(Applied(2), [sent])
        answer, (received,) = channel.receive(Push(1, (0,)))
        assert answer == Applied(2)
        np.testing.assert_array_equal(received, sent)
        # The host of the process is lost: the network does not tell.
        end.drop(2)
        end.drop(3)
        assert inbox.get(timeout=PATIENCE).message is None


def test_nothing_but_a_connection_is_passed_on(remote: tuple[AnsweringEnd, Any], inbox: Inbox) -> None:
    end, _ = remote
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(end.entrance)
        stranger.sendall(b"\0")
        stranger.settimeout(PATIENCE)
        assert stranger.recv(1) == b""
    assert inbox.empty()


def test_a_connection_that_cannot_be_completed_is_told(
    monkeypatch: pytest.MonkeyPatch, remote: tuple[AnsweringEnd, Callable[[], socket.socket]]
) -> None:
    end, dial = remote
    told = queue.Queue[str]()
    monkeypatch.setattr(array_channel, "note", told.put)

    def refuse(connection: socket.socket) -> socket.socket:
        connection.close()
        raise NetworkError("it is not of this job")

    end._complete = refuse
    with (
        contextlib.closing(AskingChannel(b"", 3, "the chief", PATIENCE, dial)) as channel,
        pytest.raises(PeerLostError, match="the chief has ended"),
    ):
        channel.ask(AtCall(0, 0))
    # Another thread tells it, after the connection is closed.
    said = "a process of another host could not connect to ask this one: it is not of this job"
    assert told.get(timeout=PATIENCE) == said


def test_another_host_that_cannot_be_reached_is_named() -> None:
    def dial() -> socket.socket:
        raise NetworkError("10.0.0.2:5000 did not answer within 3 s")

    with pytest.raises(
        PeerLostError, match=r"parameter server 1 cannot be reached: 10\.0\.0\.2:5000 did not"
    ):
        AskingChannel(b"", 1, "parameter server 1", PATIENCE, dial)


@pytest.mark.parametrize("size", [1, MANY])
def test_a_lost_end_is_noticed_before_the_network_tells(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Also while a large question is sent, which the other end does not read."""
    monkeypatch.setattr(array_channel, "_LOOK_EVERY", 0.01)
    looks: list[None] = []

    def lost() -> bool:
        looks.append(None)
        return len(looks) == 3

    channel = AskingChannel(listener.getsockname(), 5, "parameter server 1", PATIENCE, None, 1, lost)
    with pytest.raises(PeerLostError, match="parameter server 1 has ended"):
        channel.ask(Push(0, (0,)), [np.zeros(size, np.uint8)])
    assert len(looks) == 3
    channel.close()


def test_an_end_that_is_slow_is_not_lost(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_channel, "_LOOK_EVERY", 0.01)
    looked = threading.Event()

    def lost() -> bool:
        looked.set()
        return False

    def serve() -> None:
        """Read after the first look, and answer after the next one."""
        connection, _ = listener.accept()
        with connection:
            looked.wait(PATIENCE)
            left = len(frame(Introduction(5, 1)) + frame(Push(0, (0,)), [("uint8", (MANY,))])) + MANY
            while left:
                left -= len(connection.recv(min(left, 1 << 16)))
            looked.clear()
            looked.wait(PATIENCE)
            connection.sendall(frame(Applied(4)))

    thread = threading.Thread(target=serve)
    thread.start()
    channel = AskingChannel(listener.getsockname(), 5, "parameter server 1", PATIENCE, None, 1, lost)
    assert channel.ask(Push(0, (0,)), [np.zeros(MANY, np.uint8)])[0] == Applied(4)
    thread.join(PATIENCE)
    channel.close()
