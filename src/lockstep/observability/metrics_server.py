"""Serves the metrics of a job at http://127.0.0.1:PORT/metrics, on a separate thread.

The thread serves all connections without blocking on any of them: their number, the size of a request and the
time of each are limited. The page's server has a thread for each connection instead, because an answer of the
page may take seconds. This process starts workers, so clients that do not send anything must not hold
threads.
"""

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial

from lockstep.observability.job_metrics import CONTENT_TYPE
from lockstep.system.event_loop import EventLoop

ADDRESS = "127.0.0.1"
_MOST = 32
"""Connections at a time; another one replaces the oldest."""
_LARGEST = 8192
"""Bytes of a request."""
_PATIENCE = 10.0
"""Seconds that a client has from the connection to the end of the response."""
_PAUSE = 1.0
_END = 5.0
_REQUEST = re.compile(rb"([A-Z]+) (\S+) HTTP/1\.[01]\r\n")
_HOST = re.compile(rb"\r\nhost:[ \t]*([^\r\n]*?)[ \t]*\r\n", re.IGNORECASE)
_LOCAL = re.compile(rb"(?:127\.0\.0\.1|localhost|\[::1\])(?::[0-9]+)?", re.IGNORECASE)


def listen(port: int) -> socket.socket:
    """Return a socket that listens at a port, only for this machine; 0 means any free port.

    Raises:
        OSError: the port cannot be used.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        # Otherwise, connections of a job that has just ended keep the port in use.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((ADDRESS, port))
        listener.listen(_MOST)
    except OSError:
        listener.close()
        raise
    return listener


def response(request: bytes, body: Callable[[], bytes]) -> bytes:
    """Return the response to a request; `body` returns the metrics."""
    line = _REQUEST.match(request)
    if line is None:
        return _encoded("400 Bad Request", "this is not a request of HTTP/1.1\n")
    method, path = line[1], line[2].partition(b"?")[0]
    host = _HOST.search(request)
    # A page of another site could use a host name that resolves to this address.
    if host is not None and not _LOCAL.fullmatch(host[1]):
        return _encoded("403 Forbidden", "ask for 127.0.0.1 or localhost\n")
    if path != b"/metrics":
        return _encoded("404 Not Found", "there is only /metrics\n")
    if method not in (b"GET", b"HEAD"):
        return _encoded("405 Method Not Allowed", "ask with GET\n", "Allow: GET, HEAD\r\n")
    content = body()
    head = _head("200 OK", CONTENT_TYPE, len(content))
    return head if method == b"HEAD" else head + content


def _encoded(status: str, text: str, fields: str = "") -> bytes:
    return _head(status, "text/plain; charset=utf-8", len(text), fields) + text.encode()


def _head(status: str, content: str, length: int, fields: str = "") -> bytes:
    return (
        f"HTTP/1.1 {status}\r\nContent-Type: {content}\r\nContent-Length: {length}\r\n{fields}"
        "Connection: close\r\n\r\n"
    ).encode()


@contextmanager
def served(listener: socket.socket, body: Callable[[], bytes]) -> Iterator[None]:
    """Serve the result of `body` during the block, from a thread; close the listener after it."""
    wake = os.eventfd(0, os.EFD_CLOEXEC)
    thread = threading.Thread(
        target=_serve, args=(listener, body, wake), name="lockstep metrics", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        os.eventfd_write(wake, 1)
        thread.join(_END)


def _serve(listener: socket.socket, body: Callable[[], bytes], wake: int) -> None:
    with closing(listener), EventLoop() as loop:
        server = _Server(listener, body, loop)
        ended: list[bool] = []
        loop.watch(wake, lambda: ended.append(True))
        while not ended:
            loop.turn(None)
        server.close()
    os.close(wake)


class _Server:
    """The connections of one listener."""

    def __init__(self, listener: socket.socket, body: Callable[[], bytes], loop: EventLoop) -> None:
        self._listener = listener
        self._body = body
        self._loop = loop
        # The connections are by descriptor, the oldest first.
        self._open: dict[int, _Connection] = {}
        self._paused_until = 0.0
        listener.setblocking(False)
        loop.before_each_wait(self._expire)

    def close(self) -> None:
        """Close all connections."""
        for connection in list(self._open.values()):
            self._drop(connection)

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError:
            # This process has too many descriptors.
            self._loop.unwatch(self._listener.fileno())
            self._paused_until = time.monotonic() + _PAUSE
            return
        if len(self._open) == _MOST:
            self._drop(next(iter(self._open.values())))
        accepted.setblocking(False)
        connection = _Connection(accepted, time.monotonic() + _PATIENCE)
        self._open[accepted.fileno()] = connection
        self._loop.watch(accepted.fileno(), partial(self._read, connection))

    def _expire(self) -> float | None:
        now = time.monotonic()
        if now >= self._paused_until:
            self._loop.watch(self._listener.fileno(), self._accept)
        while self._open and (first := next(iter(self._open.values()))).until <= now:
            self._drop(first)
        waits = [first.until - now] if self._open else []
        if now < self._paused_until:
            waits.append(self._paused_until - now)
        return min(waits, default=None)

    def _read(self, connection: "_Connection") -> None:
        with contextlib.suppress(BlockingIOError):
            try:
                piece = connection.socket.recv(_LARGEST + 1 - len(connection.data))
            except ConnectionError:
                piece = b""
            connection.data += piece
            if not piece:
                self._drop(connection)
            elif b"\r\n\r\n" in connection.data:
                self._answer(connection, response(connection.data, self._body))
            elif len(connection.data) > _LARGEST:
                large = _encoded("431 Request Header Fields Too Large", "the request is too large\n")
                self._answer(connection, large)

    def _answer(self, connection: "_Connection", data: bytes) -> None:
        connection.left = memoryview(data)
        self._loop.unwatch(connection.socket.fileno())
        self._loop.watch(connection.socket.fileno(), partial(self._write, connection), writes=True)

    def _write(self, connection: "_Connection") -> None:
        try:
            connection.left = connection.left[connection.socket.send(connection.left) :]
        except BlockingIOError:
            return
        except ConnectionError:
            connection.left = memoryview(b"")
        if not connection.left:
            self._drop(connection)

    def _drop(self, connection: "_Connection") -> None:
        self._loop.unwatch(connection.socket.fileno())
        del self._open[connection.socket.fileno()]
        connection.socket.close()


class _Connection:
    """A client: its deadline, its request so far, and the rest of the response."""

    def __init__(self, accepted: socket.socket, until: float) -> None:
        self.socket = accepted
        self.until = until
        self.data = b""
        self.left = memoryview(b"")
