"""Questions and answers with arrays, between processes of one job.

On one host a connection is a Unix socket in the abstract namespace: it leaves no file, and both ends check
that the other process belongs to the same user. The agent of this host accepts connections from other hosts,
and passes them on over such a socket, before encryption. A frame is the length of its header in 4 bytes, the
header, a message and the dtypes and shapes of the arrays, and the bytes of the arrays.
"""

import contextlib
import functools
import queue
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

# This import defines dtypes such as bfloat16.
import ml_dtypes  # noqa: F401
import msgspec
import numpy as np
import numpy.typing as npt

from lockstep.errors import NetworkError, PeerError, PeerLostError, PeerStuckError
from lockstep.protocol.parameter_server import Alive, Answer, Applied, Introduction, Question
from lockstep.system.notes import note
from lockstep.system.passed_descriptors import receive_descriptors
from lockstep.system.socket_owners import is_of_this_user

Array = npt.NDArray[Any]

_LENGTH = struct.Struct(">I")
_MAX_HEADER = 64 << 20
_SMALL = 64 << 10
_REPORT_AFTER = 10.0
_REPORT_AT_LEAST = 60.0
_LOOK_EVERY = 1.0
"""Seconds between two looks whether the other end is lost."""
_ALIVE_WITHIN = 30.0
"""Seconds in which a process answers that it runs."""
_PASSED_WITHIN = 30.0
"""Seconds in which the agent passes a connection."""
_BACKLOG = 1024
_Described = tuple[str, tuple[int, ...]]
_questions = msgspec.msgpack.Decoder(tuple[Question, list[_Described]])
_answers = msgspec.msgpack.Decoder(tuple[Answer, list[_Described]])


_dtype_name = functools.cache(str)


class _Ended(Exception):
    """The peer has closed the connection, or has sent data other than frames."""


def _send(write: Callable[[Any], object], message: msgspec.Struct, arrays: Sequence[Array]) -> None:
    """Send one frame.

    Args:
        write: sends bytes.
        message: the message of the frame.
        arrays: the arrays of the frame.

    Raises:
        OSError: the connection has ended, or the peer does not read.
    """
    whole = [np.ascontiguousarray(array) for array in arrays]
    header = msgspec.msgpack.encode((message, [(_dtype_name(a.dtype), a.shape) for a in arrays]))
    # Small arrays leave with one call.
    together = bytearray(_LENGTH.pack(len(header)) + header)
    for array in whole:
        if array.nbytes < _SMALL:
            together += array.tobytes()
        else:
            write(together)
            together = bytearray()
            write(array.reshape(-1).view(np.uint8).data.cast("B"))
    if together:
        write(together)


class _ConnectionReader:
    """Reads a connection through a buffer, so that a small frame takes one system call.

    Args:
        receive: receives some bytes into memory, and returns how many; raises `_Ended` if there are no more.
    """

    def __init__(self, receive: Callable[[memoryview], int]) -> None:
        self._receive = receive
        self._buffer = memoryview(bytearray(_SMALL))
        self._start = self._stop = 0

    @property
    def is_empty(self) -> bool:
        """Whether the buffer has no bytes that were received."""
        return self._start == self._stop

    def fill(self, view: memoryview) -> None:
        """Receive as many bytes as `view` has room for."""
        while view:
            if self.is_empty:
                if len(view) >= _SMALL:
                    view = view[self._receive(view) :]
                    continue
                self._start, self._stop = 0, self._receive(self._buffer)
            count = min(len(view), self._stop - self._start)
            view[:count] = self._buffer[self._start : self._start + count]
            self._start += count
            view = view[count:]

    def exactly(self, count: int) -> bytearray:
        """Receive exactly so many bytes."""
        data = bytearray(count)
        self.fill(memoryview(data))
        return data


def _receive(reader: _ConnectionReader, decoder: Any) -> tuple[Any, list[Array]]:
    """Receive one frame; its arrays have memory of their own.

    Args:
        reader: the reader of the connection.
        decoder: the decoder of the message and the descriptions of the arrays.

    Raises:
        _Ended: the connection has ended.
        OSError: likewise, or the peer does not send.
    """
    (length,) = _LENGTH.unpack(reader.exactly(_LENGTH.size))
    if length > _MAX_HEADER:
        raise _Ended
    try:
        message, described = decoder.decode(reader.exactly(length))
        dtypes = [np.dtype(dtype) for dtype, _ in described]
        if any(dtype.hasobject for dtype in dtypes):
            raise _Ended
        arrays = [np.empty(shape, dtype) for dtype, (_, shape) in zip(dtypes, described, strict=True)]
    except (msgspec.MsgspecError, MemoryError, TypeError, ValueError):
        raise _Ended from None
    for array in arrays:
        if array.nbytes:
            reader.fill(memoryview(array.reshape(-1).view(np.uint8).data))
    return message, arrays


def _receive_some(connection: socket.socket, view: memoryview) -> int:
    received = connection.recv_into(view)
    if not received:
        raise _Ended
    return received


class AskingChannel:
    """The end of a connection at which this process asks.

    Args:
        address: the address of the other end, if it is on this host.
        process: the id of this process's task.
        peer: the name of the other end in messages.
        timeout: seconds after which an answer counts as missing.
        dial: connects to the other end, if that is on another host.
        server: the parameter server whose shards the questions are about; -1 for the chief.
        lost: returns whether the other end is lost, which the network may show only much later; None on the
            same host.
        worker: the worker id of this process; None if that is the id of its task.
        call: the number of the call in which it first asks; 0 outside of calls.

    Attributes:
        peer: the name of the other end in messages.
        call: the number of the present call; see `enter`.
        is_open: whether this end considers the connection open.

    Raises:
        PeerLostError: the other end has ended, or cannot be reached.
    """

    def __init__(
        self,
        address: bytes,
        process: int,
        peer: str,
        timeout: float,
        dial: Callable[[], socket.socket] | None = None,
        server: int = -1,
        lost: Callable[[], bool] | None = None,
        worker: int | None = None,
        call: int = 0,
    ) -> None:
        self._address, self.peer, self._dial = address, peer, dial
        self._lost = lost
        self._patient = False
        self._connection = self._connected(timeout)
        self._reader = _ConnectionReader(self._receive_some)
        self._limit(timeout)
        self.is_open = self._answered = True
        self._introduction = Introduction(process, server, process if worker is None else worker)
        self._introduce(call)

    def enter(self, call: int, timeout: float) -> None:
        """From now on, ask in another call.

        Args:
            call: its number.
            timeout: seconds after which an answer counts as missing.

        Raises:
            PeerLostError: the other end has ended, or the network has closed the connection meanwhile.
            PeerStuckError: the other end does not answer.
        """
        if not self._answered:
            self._raise_lost()
        self._limit(timeout)
        self.ask(Alive())
        self._introduce(call)

    def leave(self) -> None:
        """From now on, do not ask in a call; close the connection if a question has no answer."""
        if not self._answered:
            self.close()
        if not self.is_open or not self.call:
            return
        with contextlib.suppress(PeerError):
            self._introduce(0)

    def send(self, message: Question, arrays: Sequence[Array] = ()) -> None:
        """Ask a question. Every question except `Introduction` has one answer.

        Raises:
            PeerLostError: the other end has ended.
            PeerStuckError: the other end does not read.
        """
        self._answered = False
        try:
            _send(self._connection.sendall if self._lost is None else self._write, message, arrays)
        except TimeoutError:
            self._raise_stuck(message)
        except (_Ended, OSError):
            self._raise_lost()

    def receive(self, question: Question) -> tuple[Any, list[Array]]:
        """Wait for the answer to the first unanswered question.

        Args:
            question: the question, for messages.

        Raises:
            PeerLostError: the other end has ended.
            PeerStuckError: no answer has come in time.
        """
        try:
            if self._patient:
                self._wait_patiently(question)
            answer = _receive(self._reader, _answers)
        except TimeoutError:
            self._raise_stuck(question)
        except (_Ended, OSError):
            self._raise_lost()
        self._answered = True
        return answer

    def ask(self, message: Question, arrays: Sequence[Array] = ()) -> tuple[Any, list[Array]]:
        """Ask, and wait for the answer."""
        self.send(message, arrays)
        return self.receive(message)

    def be_patient(self) -> None:
        """Accept that answers take as long as they need.

        A note reports how long this process has waited. After the timeout, the other process must show that
        it is running.
        """
        self._patient = True

    def is_silent(self, within: float) -> bool:
        """Whether the other process is still connected, but does not answer within some seconds.

        A running process answers even while it waits for others. Do not ask a silent process any more
        questions.
        """
        timeout = self._timeout
        self._limit(within)
        try:
            self.ask(Alive())
        except PeerError as error:
            return isinstance(error, PeerStuckError)
        finally:
            self._limit(timeout)
        return False

    def close(self) -> None:
        """Close the connection."""
        self.is_open = False
        self._connection.close()

    def _introduce(self, call: int) -> None:
        """Tell the other end in which call this process asks; close a connection that has ended."""
        self.call = call
        try:
            self.send(msgspec.structs.replace(self._introduction, call=call))
        except PeerError:
            self.close()
            raise
        self._answered = True

    def _limit(self, timeout: float) -> None:
        """From now on, answers count as missing after some seconds."""
        self._timeout = timeout
        self._connection.settimeout(timeout if self._lost is None else min(_LOOK_EVERY, timeout))

    def _write(self, data: Any) -> None:
        """Send bytes, and meanwhile check whether the other end is lost."""
        view, begun = memoryview(data), time.monotonic()
        while view:
            try:
                view = view[self._connection.send(view) :]
                begun = time.monotonic()
            except TimeoutError:
                self._look(begun)

    def _receive_some(self, view: memoryview) -> int:
        """Receive some bytes; if there is a `lost`, meanwhile check whether the other end is lost."""
        begun = time.monotonic()
        while True:
            try:
                return _receive_some(self._connection, view)
            except TimeoutError:
                self._look(begun)

    def _look(self, begun: float) -> None:
        """Raise an error if the other end is lost, or has been idle for too long."""
        if self._lost is None or time.monotonic() - begun >= self._timeout:
            raise TimeoutError
        if self._lost():
            raise _Ended

    def _wait_patiently(self, question: Question) -> None:
        begun, interval = time.monotonic(), _REPORT_AFTER
        while self._reader.is_empty and not select.select([self._connection], [], [], interval)[0]:
            waited = time.monotonic() - begun
            kind = question.__struct_config__.tag
            note(f"this process has waited {waited:.0f} s for {self.peer}, which has not answered {kind!r}")
            if waited > self._timeout:
                self._check_alive()
            interval = min(2 * interval, _REPORT_AT_LEAST)

    def _check_alive(self) -> None:
        """Check over a separate connection that the other process runs."""
        with self._connected(min(self._timeout, _ALIVE_WITHIN)) as connection:
            _send(connection.sendall, Alive(), ())
            _receive(_ConnectionReader(functools.partial(_receive_some, connection)), _answers)

    def _connected(self, timeout: float) -> socket.socket:
        """Return a connection to the other end, whose operations end after a time."""
        if self._dial is not None:
            try:
                connection = self._dial()
            except NetworkError as error:
                raise PeerLostError(f"{self.peer} cannot be reached: {error}") from None
            connection.settimeout(timeout)
            return connection
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout)
        try:
            connection.connect(self._address)
            trusted = is_of_this_user(connection)
        except OSError:
            trusted = False
        if not trusted:
            connection.close()
            self._raise_lost()
        return connection

    def _raise_lost(self) -> NoReturn:
        self.is_open = False
        raise PeerLostError(f"{self.peer} has ended; its log says why") from None

    def _raise_stuck(self, message: Question) -> NoReturn:
        kind = message.__struct_config__.tag
        raise PeerStuckError(
            f"{self.peer} has not answered {kind!r} for {self._timeout:g} s: `w` in lockstep "
            "top shows what it does; --timeout sets the limit"
        ) from None


@dataclass(eq=False)
class QuestionArrival:
    """A question that has arrived, or the end of the questions of a process.

    Attributes:
        process: the id of the task of the process that asks.
        message: the question; None if the process has left the call, or closed its connection.
        arrays: the arrays of the question.
        server: the parameter server to which the question is addressed; -1 for the chief.
        worker: the worker id of the process, which changes when a worker is replaced.
        call: the number of the call in which the process asks; 0 outside of calls.
    """

    process: int
    message: Question | None
    arrays: list[Array] = field(default_factory=list)
    server: int = -1
    worker: int = -1
    call: int = 0
    _answer: "queue.SimpleQueue[tuple[Answer, Sequence[Array]] | None]" = field(
        default_factory=queue.SimpleQueue
    )

    def answer(self, message: Answer, arrays: Sequence[Array] = ()) -> None:
        """Give the answer, which a thread sends. The arrays must not change afterwards."""
        self._answer.put((message, arrays))

    def answered(self) -> tuple[Answer, Sequence[Array]] | None:
        """Wait for the answer, and remove it. Return None if there is none."""
        return self._answer.get()

    def abandon(self) -> None:
        """Let the thread that waits for the answer end."""
        self._answer.put(None)


class AnsweringEnd:
    """Accepts connections, and puts the questions of all of them into one queue, in their order of arrival.

    Each connection has a thread, so that a process that stops while it sends or receives does not delay
    others.

    Args:
        put: receives each arrival, in the thread of its connection.
        accept: completes a connection from another host; None in a job on one host.

    Attributes:
        address: the address at which it listens.
        entrance: the address to which the agent passes connections from other hosts; empty in a job on one
            host.
    """

    def __init__(
        self,
        put: Callable[[QuestionArrival], object],
        accept: Callable[[socket.socket], socket.socket] | None = None,
    ) -> None:
        self._put, self._complete = put, accept
        self._open: set[socket.socket] = set()
        self._introductions: dict[socket.socket, Introduction] = {}
        self._unanswered: set[QuestionArrival] = set()
        self._closed = False
        self._lock = threading.Lock()
        self._listeners: list[socket.socket] = []
        self.address = self._listen(self._serve)
        self.entrance = self._listen(self._serve_passed) if accept is not None else b""

    def close(self) -> None:
        """Close all connections; their threads end."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            # This wakes the threads, which close their ends.
            for listener in self._listeners:
                listener.shutdown(socket.SHUT_RDWR)
                listener.close()
            for connection in self._open:
                _end(connection)
            for arrival in self._unanswered:
                arrival.abandon()

    def drop(self, worker: int) -> None:
        """End the connections of a lost worker, by its id: the network may show the loss only much later."""
        with self._lock:
            for connection, introduction in self._introductions.items():
                if introduction.worker == worker:
                    _end(connection)

    def end_call(self, call: int) -> None:
        """End the connections that wait for an answer in a call that has ended."""
        with self._lock:
            for arrival in self._unanswered:
                if arrival.call == call:
                    arrival.abandon()

    def _listen(self, serve: Callable[[socket.socket], None]) -> bytes:
        """Serve connections in threads; return where they are accepted."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        address = b"\0lockstep-" + secrets.token_hex(16).encode()
        listener.bind(address)
        listener.listen(_BACKLOG)
        self._listeners.append(listener)
        threading.Thread(
            target=self._accept, args=(listener, serve), name="lockstep-accept", daemon=True
        ).start()
        return address

    def _accept(self, listener: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._open.add(connection)
            threading.Thread(target=serve, args=(connection,), name="lockstep-serve", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Serve a connection of this host."""
        if is_of_this_user(connection):
            self._answer_all(connection)
        else:
            self._forget(connection)

    def _serve_passed(self, passing: socket.socket) -> None:
        """Serve a connection from another host, which the agent passes on."""
        assert self._complete is not None
        descriptors: list[int] = []
        try:
            passing.settimeout(_PASSED_WITHIN)
            if is_of_this_user(passing):
                _, descriptors = receive_descriptors(passing, 1, 1)
        except OSError:
            pass
        finally:
            self._forget(passing)
        if not descriptors:
            return
        try:
            connection = self._complete(socket.socket(fileno=descriptors[0]))
        except (NetworkError, OSError) as error:
            note(f"a process of another host could not connect to ask this one: {error}")
            return
        with self._lock:
            closed = self._closed
            if not closed:
                self._open.add(connection)
        if closed:
            connection.close()
        else:
            self._answer_all(connection)

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.discard(connection)
            self._introductions.pop(connection, None)
            connection.close()

    def _answer_all(self, connection: socket.socket) -> None:
        """Answer the questions of a connection until it ends."""
        asks: Introduction | None = None
        try:
            reader = _ConnectionReader(functools.partial(_receive_some, connection))
            while True:
                message, arrays = _receive(reader, _questions)
                if isinstance(message, Alive):
                    _send(connection.sendall, Applied(), ())
                    if asks is None:
                        return
                    continue
                if isinstance(message, Introduction):
                    self._leave(asks)
                    asks = message
                    with self._lock:
                        self._introductions[connection] = asks
                    continue
                if asks is None:
                    return
                arrival = QuestionArrival(asks.process, message, arrays, asks.server, asks.worker, asks.call)
                with self._lock:
                    if self._closed:
                        return
                    self._unanswered.add(arrival)
                self._put(arrival)
                answer = arrival.answered()
                with self._lock:
                    self._unanswered.discard(arrival)
                if answer is None:
                    return
                _send(connection.sendall, *answer)
        except (_Ended, OSError):
            pass
        finally:
            self._forget(connection)
            self._leave(asks)

    def _leave(self, asks: Introduction | None) -> None:
        """Note that a process no longer asks in the call of its introduction."""
        if asks is not None:
            self._put(
                QuestionArrival(asks.process, None, server=asks.server, worker=asks.worker, call=asks.call)
            )


def _end(connection: socket.socket) -> None:
    """End a connection that a thread uses, which then closes it."""
    with contextlib.suppress(OSError):
        # The method of an encrypted connection would change state that its thread uses.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
