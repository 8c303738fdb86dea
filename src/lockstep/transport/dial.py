"""Connections between hosts as workers and agents open them: blocking, with a limit.

A worker that dials waits until the other worker accepts. So two workers that connect in both directions do
both at once, in two threads, or in an order that both know.
"""

import contextlib
import os
import secrets
import select
import socket
import ssl
import time
from collections.abc import Callable

import msgspec

from lockstep.errors import NetworkError
from lockstep.protocol.credentials import Credentials, describe_tls_error
from lockstep.protocol.greeting import NONCE, Greeting, encode_greeting
from lockstep.transport.addresses import join_address, resolve_host, split_address

_ACCEPTED = b"\x06"
"""Sent by the worker that accepts, when it has checked the certificate of the other."""
_SLICE = 0.2


def _never() -> None:
    """Let a wait continue."""


def connect(
    address: str,
    greeting: Greeting,
    credentials: Credentials | None,
    patience: float,
    check: Callable[[], None] = _never,
) -> socket.socket:
    """Connect to a listener, and greet it; return the connection, which is not encrypted yet.

    Args:
        address: of the listener.
        greeting: its nonce does not matter.
        credentials: sign the greeting; None if the job has no key.
        patience: seconds until this gives up.
        check: called at least every 0.2 s; what it raises ends the wait.

    Raises:
        ConfigError: the address is malformed.
        NetworkError: the host cannot be reached; the message says what a firewall must allow.
    """
    until = time.monotonic() + patience
    host, port = split_address(address)
    family, place = resolve_host(host, port, patience)
    with contextlib.ExitStack() as undo:
        try:
            connection = undo.enter_context(socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(BlockingIOError):
                connection.connect(place)
            _wait(connection, select.POLLOUT, until, check, f"{address} does not answer{_firewall(port)}")
            if failure := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(failure, "")
            key = credentials.greeting_key if credentials is not None else b""
            greeting = msgspec.structs.replace(greeting, nonce=secrets.token_bytes(NONCE))
            connection.send(encode_greeting(greeting, key))
        except ConnectionRefusedError:
            raise NetworkError(
                f"{address} refuses the connection: nothing listens there, or a firewall rejects it"
                f"{_firewall(port)}"
            ) from None
        except OSError as error:
            raise NetworkError(f"cannot connect to {address}: {_text(error)}{_firewall(port)}") from None
        connection.setblocking(True)
        undo.pop_all()
    return connection


def dial(
    address: str,
    greeting: Greeting,
    credentials: Credentials | None,
    patience: float,
    check: Callable[[], None] = _never,
) -> socket.socket:
    """Return a connection to a worker of another host, once that worker has called `accept`.

    Args:
        address: of the listener of that host's agent.
        greeting: its nonce does not matter.
        credentials: of this worker; None if the job has no key.
        patience: seconds until this gives up.
        check: called at least every 0.2 s; what it raises ends the wait.

    Returns:
        A blocking socket without a timeout; an `ssl.SSLSocket` if the credentials encrypt.

    Raises:
        ConfigError: the address is malformed.
        NetworkError: the host cannot be reached, or its worker refuses the connection or does not accept it
            in time.
    """
    until = time.monotonic() + patience
    connection = connect(address, greeting, credentials, patience, check)
    with contextlib.ExitStack() as undo:
        undo.callback(lambda: connection.close())
        connection.setblocking(False)
        late = f"{address} is connected, but its worker did not accept the connection within {patience:g} s"
        if credentials is not None and credentials.encrypted:
            connection = credentials.client_context().wrap_socket(connection, do_handshake_on_connect=False)
            _shake_hands(connection, address, until, check, late)
        while (answer := _received(connection, address)) is None:
            _wait(connection, select.POLLIN, until, check, late)
        if answer != _ACCEPTED:
            raise NetworkError(_closed(address))
        connection.setblocking(True)
        undo.pop_all()
    return connection


def accept(
    connection: socket.socket,
    credentials: Credentials | None,
    patience: float,
    check: Callable[[], None] = _never,
) -> socket.socket:
    """Complete a connection that a listener admitted; the other worker has called `dial`.

    Args:
        connection: from the listener; it now belongs to this function.
        credentials: of this worker; None if the job has no key.
        patience: seconds until this gives up.
        check: called at least every 0.2 s; what it raises ends the wait.

    Returns:
        A blocking socket without a timeout; an `ssl.SSLSocket` if the credentials encrypt.

    Raises:
        NetworkError: the other worker closed the connection, is not of this job, or did not respond in time.
    """
    until = time.monotonic() + patience
    with contextlib.ExitStack() as undo:
        undo.callback(lambda: connection.close())
        try:
            peer = join_address(connection.getpeername())
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if credentials is not None and credentials.encrypted:
                context = credentials.server_context()
                connection = context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
                late = f"{peer} did not complete the handshake of encryption within {patience:g} s"
                _shake_hands(connection, peer, until, check, late)
            connection.send(_ACCEPTED)
        except OSError as error:
            raise NetworkError(f"the connection from another worker broke: {_text(error)}") from None
        connection.setblocking(True)
        undo.pop_all()
    return connection


def _shake_hands(
    connection: socket.socket, peer: str, until: float, check: Callable[[], None], late: str
) -> None:
    assert isinstance(connection, ssl.SSLSocket)
    while True:
        try:
            connection.do_handshake()
        except ssl.SSLWantReadError:
            _wait(connection, select.POLLIN, until, check, late)
        except ssl.SSLWantWriteError:
            _wait(connection, select.POLLOUT, until, check, late)
        except ssl.SSLEOFError:
            raise NetworkError(_closed(peer)) from None
        except ssl.SSLError as error:
            raise NetworkError(f"{peer} is refused: {describe_tls_error(error)}") from None
        except OSError:
            raise NetworkError(_closed(peer)) from None
        else:
            return


def _received(connection: socket.socket, peer: str) -> bytes | None:
    """Return the byte that has arrived; none at the end of the stream, None if nothing has arrived."""
    try:
        return connection.recv(1)
    except (BlockingIOError, ssl.SSLWantReadError):
        return None
    except ssl.SSLEOFError:
        return b""
    except ssl.SSLError as error:
        raise NetworkError(f"{peer} refuses the connection: {describe_tls_error(error)}") from None
    except OSError:
        return b""


def _wait(connection: socket.socket, event: int, until: float, check: Callable[[], None], late: str) -> None:
    poll = select.poll()
    poll.register(connection, event)
    while True:
        check()
        left = until - time.monotonic()
        if poll.poll(1000 * max(0.0, min(left, _SLICE))):
            return
        if left <= 0:
            raise NetworkError(late)


def _closed(peer: str) -> str:
    return (
        f"{peer} closed the connection after the greeting: its job, its key or its version of Lockstep is "
        "another one, or its view has ended; the log of its host says why"
    )


def _firewall(port: int) -> str:
    return f"; a firewall between the hosts must let TCP connections to port {port} through"


def _text(error: OSError) -> str:
    return error.strerror or (os.strerror(error.errno) if error.errno else str(error))
