"""The server of metrics: what it answers, and clients that are slow, many or malicious."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest

from lockstep.observability import metrics_server
from lockstep.observability.metrics_server import listen, response, served

PATIENCE = 300.0
BODY = b"figures\n# EOF\n"

Port = Callable[..., int]


@contextmanager
def serving(body: Callable[[], bytes] = lambda: BODY) -> Iterator[int]:
    """Serve, and return the port."""
    listener = listen(0)
    port: int = listener.getsockname()[1]
    with served(listener, body):
        yield port


def ask(port: int, request: bytes) -> bytes:
    """Return all that the server answers to a request."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as client:
        client.sendall(request)
        return b"".join(iter(lambda: client.recv(65536), b""))


GET = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:9000\r\n\r\n"
OK = (
    b"HTTP/1.1 200 OK\r\n"
    b"Content-Type: application/openmetrics-text; version=1.0.0; charset=utf-8\r\n"
    b"Content-Length: 14\r\n"
    b"Connection: close\r\n\r\n"
)


def test_figures_are_those_of_the_moment(closes_descriptors: None) -> None:
    numbers = iter(range(10, 20))
    with serving(lambda: b"%d\n" % next(numbers)) as port:
        assert ask(port, GET).endswith(b"\r\n\r\n10\n")
        assert ask(port, b"GET /metrics?x=1 HTTP/1.0\r\n\r\n").endswith(b"\r\n\r\n11\n")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"404 Not Found"),
        (b"GET /metrics/../etc/passwd HTTP/1.1\r\n\r\n", b"404 Not Found"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405 Method Not Allowed"),
        (b"GET /metrics HTTP/1.1\r\nHost: evil.example:9000\r\n\r\n", b"403 Forbidden"),
        (b"GET /metrics HTTP/1.1\r\nhost:  localhost.evil.example \r\n\r\n", b"403 Forbidden"),
        (b"GET /metrics HTTP/2\r\n\r\n", b"400 Bad Request"),
        (b"\x16\x03\x01\r\n\r\n", b"400 Bad Request"),
    ],
)
def test_other_requests_are_refused(request_: bytes, status: bytes) -> None:
    def never() -> bytes:
        raise AssertionError

    assert response(request_, never).startswith(b"HTTP/1.1 " + status + b"\r\n")


def test_hosts_of_this_machine_and_heads_are_answered() -> None:
    for host in (b"localhost", b"LOCALHOST:1", b"127.0.0.1"):
        asked = b"GET /metrics HTTP/1.1\r\nAccept: */*\r\nHost: " + host + b"\r\n\r\n"
        assert response(asked, lambda: BODY) == OK + BODY
    assert response(b"HEAD /metrics HTTP/1.1\r\n\r\n", lambda: BODY) == OK


def test_a_request_may_arrive_in_pieces_and_has_a_limit() -> None:
    with serving() as port:
        with closing(socket.create_connection(("127.0.0.1", port), PATIENCE)) as slow:
            for byte in GET:
                slow.sendall(bytes([byte]))
            assert slow.recv(65536) == OK + BODY
        assert ask(port, b"GET /" + b"x" * 8188).startswith(b"HTTP/1.1 431 ")


def test_clients_that_do_nothing_hinder_no_other(closes_descriptors: None) -> None:
    """More of them than there may be connections, half of which do not read a large response."""
    large = b"x" * 10_000_000
    with serving(lambda: large) as port:
        idle = [socket.create_connection(("127.0.0.1", port), PATIENCE) for _ in range(40)]
        for client in idle[::2]:
            client.sendall(GET)
        assert len(ask(port, GET).partition(b"\r\n\r\n")[2]) == len(large)
    for client in idle:
        client.close()


def test_a_client_that_is_slow_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "_PATIENCE", 0.05)
    with serving() as port, socket.create_connection(("127.0.0.1", port), PATIENCE) as idle:
        assert idle.recv(1) == b""


def test_a_process_without_descriptors_serves_when_it_has_some_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics_server, "_PAUSE", 0.01)
    failed = threading.Event()

    class Exhausted(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            if not failed.is_set():
                failed.set()
                raise OSError(24, "Too many open files")
            return super().accept()

    listener = Exhausted(fileno=listen(0).detach())
    port = listener.getsockname()[1]
    with served(listener, lambda: BODY):
        assert ask(port, GET) == OK + BODY
    assert failed.is_set()


def test_it_listens_on_this_machine_alone_and_ends_with_the_block(closes_descriptors: None) -> None:
    before = threading.active_count()
    with serving() as port:
        listener = socket.socket()
        with listener, pytest.raises(OSError, match="Address already in use"):
            listen(port)
        assert ask(port, GET) == OK + BODY
    assert threading.active_count() == before
    # At once, although connections of the first server are not forgotten yet.
    with closing(listen(port)) as again:
        assert again.getsockname() == ("127.0.0.1", port)
