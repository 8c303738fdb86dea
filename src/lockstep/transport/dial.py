"""Connections between hosts as workers and agents open them: blocking, with a limit.

A worker that dials waits until the other worker accepts. So two workers that connect to each other dial and
accept at once, in two threads, or in an order that both know.
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

from lockstep.errors import NetworkError, UnreachableError
from lockstep.protocol.credentials import KEY_EXPIRED, Credentials
from lockstep.protocol.greeting import NONCE, Greeting, encode_greeting
from lockstep.transport.addresses import join_address, resolve_host, split_address
from lockstep.transport.tls import describe_tls_error, job_context

_ACCEPTED = b"\x06"
"""What the worker that accepts sends first, after it has checked the certificate of the other."""
REACH = 10.0
"""Seconds in which a host is reached, or is given up."""
_ATTEMPT = 3.0
"""Seconds of one attempt: the kernel alone would try again later and later."""
_IDLE, _INTERVAL = 4, 2
_SLICE = 0.2


def _never() -> None:
    """Allow a wait to continue."""


def connect(
    address: str,
    greeting: Greeting,
    credentials: Credentials | None,
    patience: float,
    check: Callable[[], None] = _never,
) -> socket.socket:
    """Connect to a listener, and greet it; return the connection, which is not encrypted yet.

    Args:
        address: the address of the listener.
        greeting: the greeting, with any nonce.
        credentials: the credentials that sign the greeting; None if the job has no key.
        patience: seconds until this gives up.
        check: called at least every 0.2 s, except while a name is resolved; an error that it raises ends the
            wait.

    Raises:
        ConfigError: the address is malformed.
        NetworkError: the host cannot be reached (the message says what firewalls must allow), or the key has
            expired.
    """
    until = time.monotonic() + patience
    host, port = split_address(address)
    key = b""
    if credentials is not None:
        key = credentials.greeting_key
        if time.time() >= credentials.expires:
            raise NetworkError(f"cannot connect to {address}: {KEY_EXPIRED}")
    family, socket_address = resolve_host(host, port, patience)
    firewall = f"; firewalls between the hosts must let TCP connections to port {port} through"
    with contextlib.ExitStack() as undo:
        try:
            connection = undo.enter_context(socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
            _prepare(connection)
            with contextlib.suppress(BlockingIOError):
                connection.connect(socket_address)
            late = f"{address} did not answer within {patience:.3g} s{firewall}"
            wait_for(connection, select.POLLOUT, until, check, late)
            if failure := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(failure, os.strerror(failure))
            greeting = msgspec.structs.replace(greeting, nonce=secrets.token_bytes(NONCE))
            # It fits into the buffer of a new connection.
            connection.send(encode_greeting(greeting, key))
        except ConnectionRefusedError:
            raise NetworkError(
                f"{address} refuses connections: nothing listens there, or a firewall rejects them{firewall}"
            ) from None
        except OSError as error:
            raise NetworkError(f"cannot connect to {address}: {error.strerror}{firewall}") from None
        connection.setblocking(True)
        undo.pop_all()
    return connection


def dial(
    address: str,
    greeting: Greeting,
    credentials: Credentials | None,
    patience: float,
    check: Callable[[], None] = _never,
    reach: float = REACH,
) -> socket.socket:
    """Return a connection to a worker of another host, once that worker has called `accept`.

    Args:
        address: the address of the listener of that host's agent, which answers at once.
        greeting: the greeting, with any nonce.
        credentials: the credentials of this worker; None if the job has no key.
        patience: seconds in which the worker accepts.
        check: as in `connect`.
        reach: seconds in which the listener answers; this tries again until then.

    Returns:
        A blocking socket without a timeout; an `ssl.SSLSocket` if the credentials encrypt.

    Raises:
        ConfigError: the address is malformed.
        UnreachableError: the listener cannot be reached, or the key has expired.
        NetworkError: the worker refuses the connection, or does not accept it in time.
    """
    greeted = _reach(address, greeting, credentials, check, reach)
    until = time.monotonic() + patience
    late = f"{address} is connected, but its worker did not accept the connection within {patience:g} s"
    with contextlib.closing(greeted):
        connection = _secure(
            connection=greeted,
            peer=address,
            credentials=credentials,
            accepted=False,
            until=until,
            check=check,
            late=late,
        )
    with contextlib.ExitStack() as undo:
        undo.enter_context(connection)
        while (answer := _received(connection, address)) is None:
            wait_for(connection, select.POLLIN, until, check, late)
        if answer != _ACCEPTED:
            raise NetworkError(explain_refusal(address))
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
        connection: the connection from the listener; this function closes it, or returns it.
        credentials: the credentials of this worker; None if the job has no key.
        patience: seconds until this gives up.
        check: as in `connect`.

    Returns:
        A blocking socket without a timeout; an `ssl.SSLSocket` if the credentials encrypt.

    Raises:
        NetworkError: the other worker closed the connection, does not belong to this job, or did not respond
            in time.
    """
    until = time.monotonic() + patience
    with contextlib.closing(connection):
        try:
            peer = join_address(connection.getpeername())
            _prepare(connection)
        except OSError:
            raise NetworkError("another worker closed its connection before it was accepted") from None
        late = f"{peer} did not complete the handshake of encryption within {patience:g} s"
        accepted = _secure(
            connection=connection,
            peer=peer,
            credentials=credentials,
            accepted=True,
            until=until,
            check=check,
            late=late,
        )
    try:
        accepted.send(_ACCEPTED)
    except OSError:
        accepted.close()
        raise NetworkError(f"{peer} closed the connection before it was accepted") from None
    accepted.setblocking(True)
    return accepted


def _prepare(connection: socket.socket) -> None:
    """Send small messages at once, and notice within `REACH` that the other host is cut off.

    The kernel probes the other end only while it has nothing to send itself. So the receiving end of each
    connection notices. A limit for the sending end would also end connections with a slow receiver.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _INTERVAL)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, (int(REACH) - _IDLE) // _INTERVAL)


def _reach(
    address: str,
    greeting: Greeting,
    credentials: Credentials | None,
    check: Callable[[], None],
    reach: float,
) -> socket.socket:
    """Return a connection to a listener, in spite of short interruptions of the network."""
    until, left = time.monotonic() + reach, reach
    while True:
        try:
            return connect(address, greeting, credentials, min(_ATTEMPT, left), check)
        except NetworkError as error:
            failure = str(error)
        time.sleep(_SLICE)
        # An attempt without time would only fail with a worse reason.
        if (left := until - time.monotonic()) <= _SLICE:
            raise UnreachableError(f"{failure}; tried again for {reach:g} s")


def _secure(
    connection: socket.socket,
    peer: str,
    credentials: Credentials | None,
    accepted: bool,
    until: float,
    check: Callable[[], None],
    late: str,
) -> socket.socket:
    """Return a non-blocking socket in place of `connection`, encrypted if the credentials say so."""
    connection.setblocking(False)
    if credentials is None or not credentials.encrypted:
        return socket.socket(fileno=connection.detach())
    context = job_context(credentials, accepted=accepted)
    with contextlib.ExitStack() as undo:
        try:
            # `wrap_socket` does not close the connection if the peer has reset it.
            connection.getpeername()
            secured = context.wrap_socket(connection, server_side=accepted, do_handshake_on_connect=False)
            undo.enter_context(secured)
            while True:
                try:
                    secured.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    wait_for(secured, select.POLLIN, until, check, late)
                except ssl.SSLWantWriteError:
                    wait_for(secured, select.POLLOUT, until, check, late)
        except ssl.SSLEOFError:
            raise NetworkError(explain_refusal(peer)) from None
        except ssl.SSLError as error:
            raise NetworkError(f"{peer} is refused: {describe_tls_error(error)}") from None
        except OSError:
            raise NetworkError(explain_refusal(peer)) from None
        undo.pop_all()
    return secured


def _received(connection: socket.socket, peer: str) -> bytes | None:
    """Return the byte that has arrived, no bytes at the end of the stream, or None if nothing has arrived."""
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


def wait_for(
    connection: socket.socket, event: int, until: float, check: Callable[[], None], late: str
) -> None:
    """Wait for an event of `select.poll` on a connection.

    Args:
        connection: the connection, which does not block.
        event: the event to wait for.
        until: the time, by `time.monotonic`, at which this gives up.
        check: as in `connect`.
        late: the message of the error after that time.

    Raises:
        NetworkError: the event did not happen in time.
    """
    poll = select.poll()
    poll.register(connection, event)
    while True:
        check()
        left = until - time.monotonic()
        if poll.poll(1000 * max(0.0, min(left, _SLICE))):
            return
        if left <= 0:
            raise NetworkError(late)


def explain_refusal(peer: str) -> str:
    """Explain why the listener at the address `peer` may have closed a connection after the greeting."""
    return (
        f"{peer} closed the connection after the greeting: it has another job, key or version of Lockstep, "
        "or its view has ended; the log of its host says why"
    )
