"""The socket on which a running job receives requests from its owner. It has a name, but no file.

It is an abstract Unix socket, which disappears with its process. Both sides ask the kernel for the user of
the other process, and accept only the same user. Any user can take such a name. So connecting never blocks,
and the kernel's list of sockets names the owner of a socket that does not accept connections
(`system/socket_owners.py`).
"""

import contextlib
import errno
import itertools
import os
import select
import socket
from collections.abc import Callable, Iterator

from lockstep.errors import UnfitError
from lockstep.protocol.admin import MAX_PACKET, AdminRequest, Refused, Reply, decode_request, encode
from lockstep.system.event_loop import ARRIVES, arrived
from lockstep.system.socket_owners import is_of_this_user

MOST_OPEN = 16
"""The number of clients that may be connected without having sent a request, or that may wait for a reply."""

_MOST_ADDRESS = 107
_MOST_NUMBER = 1000
_BACKLOG = 128
_KEPT_END = 20
_OTHER_VERSION = "use the version of Lockstep that started the job"


def address(name: str) -> bytes:
    """Return the address of this user's job `name`."""
    return f"\0lockstep/{os.geteuid()}/{name}".encode()


def plain(name: str) -> str:
    """Return `name` with an underscore for each character that cannot be part of one typed word."""
    return "".join(sign if sign.isprintable() and sign not in " /" else "_" for sign in name)


class PendingReply:
    """A reply that follows later: it is sent by calling `send`, once."""

    def __init__(self) -> None:
        self.send: Callable[[Reply], None] = lambda reply: None


class AdminSocket:
    """Receives requests from this user's processes, one per connection.

    `fileno` is readable when there is something to `serve`. A client that sends nothing costs a descriptor;
    if there are more than `MOST_OPEN` such clients, the one that connected first is disconnected.

    Attributes:
        name: the job's name, by which clients find it.
        answer: see `over`; it may be replaced.
    """

    def __init__(
        self,
        name: str,
        listener: socket.socket,
        arrivals: select.epoll,
        answer: Callable[[AdminRequest], Reply | PendingReply],
        trusts: Callable[[socket.socket], bool],
    ) -> None:
        self.name = name
        self._listener = listener
        self._arrivals = arrivals
        self.answer = answer
        self._trusts = trusts
        self._silent: list[socket.socket] = []
        self._waiting: list[socket.socket] = []

    @classmethod
    def over(
        cls,
        listener: socket.socket,
        answer: Callable[[AdminRequest], Reply | PendingReply],
        trusts: Callable[[socket.socket], bool] = is_of_this_user,
    ) -> "AdminSocket":
        """Receive the requests to a job.

        Args:
            listener: a socket with the name of the job, see `take_name`; it belongs to the result.
            answer: carries out a request and returns the reply, or a reply that follows. It must not close
                this socket, or block, unless it calls `serve` meanwhile.
            trusts: returns whether to read from a client.

        Raises:
            UnfitError: this process has too many descriptors.
        """
        name = listener.getsockname().removeprefix(address("")).decode()
        try:
            arrivals = select.epoll()
        except OSError as error:
            listener.close()
            raise _unopened(name, error) from None
        arrivals.register(listener, ARRIVES)
        return cls(name, listener, arrivals, answer, trusts)

    def fileno(self) -> int:
        """Return the descriptor to watch for reading."""
        return self._arrivals.fileno()

    def serve(self) -> None:
        """Answer all pending requests; never blocks, and raises only exceptions of `answer`."""
        self._arrivals.poll(0)
        for connection in tuple(self._silent):
            # An answer may have served other clients.
            if connection in self._silent:
                self._hear(connection)
        for connection in arrived(self._listener, self._arrivals, MOST_OPEN):
            self._admit(connection)

    def close(self) -> None:
        """Stop receiving requests, and disconnect all clients without a reply."""
        while self._silent:
            self._drop(self._silent[0])
        while self._waiting:
            self._waiting.pop().close()
        # Another process may also have the listener. The clients need not wait until that process ends.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
            while True:
                self._listener.accept()[0].close()
        self._listener.close()
        self._arrivals.close()

    def _admit(self, connection: socket.socket) -> None:
        if not self._trusts(connection):
            connection.close()
            return
        connection.setblocking(False)
        self._silent.append(connection)
        self._arrivals.register(connection, select.EPOLLIN)
        self._hear(connection)
        if len(self._silent) > MOST_OPEN:
            self._drop(self._silent[0])

    def _hear(self, connection: socket.socket) -> None:
        try:
            packet = connection.recv(MAX_PACKET + 1)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        self._forget(connection)
        try:
            reply = self._reply(packet) if packet else None
        except BaseException:
            connection.close()
            raise
        if isinstance(reply, PendingReply):
            self._keep(connection, reply)
            return
        if reply is not None:
            _send(connection, reply)
        connection.close()

    def _reply(self, packet: bytes) -> Reply | PendingReply:
        try:
            request = decode_request(packet)
        except ValueError as error:
            return Refused(f"unknown request ({error}); {_OTHER_VERSION}")
        return self.answer(request)

    def _keep(self, connection: socket.socket, pending: PendingReply) -> None:
        """Keep a connection until its reply is known; if too many wait, the first one is disconnected."""

        def send(reply: Reply) -> None:
            if connection in self._waiting:
                self._waiting.remove(connection)
                _send(connection, reply)
                connection.close()

        pending.send = send
        self._waiting.append(connection)
        if len(self._waiting) > MOST_OPEN:
            self._waiting.pop(0).close()

    def _drop(self, connection: socket.socket) -> None:
        self._forget(connection)
        connection.close()

    def _forget(self, connection: socket.socket) -> None:
        self._silent.remove(connection)
        # `close` alone does not unregister it while a worker that is just starting has a copy.
        self._arrivals.unregister(connection)


def _send(connection: socket.socket, reply: Reply) -> None:
    try:
        packet = encode(reply)
    except ValueError as error:
        packet = encode(Refused(f"cannot send the reply: {error}"))
    with contextlib.suppress(OSError):
        connection.send(packet)


def take_name(wanted: str) -> socket.socket:
    """Take the name `wanted` for a job, or a similar one if it is too long, cannot be typed or is in use.

    Returns:
        A socket that has the name, and where clients can connect.

    Raises:
        UnfitError: no socket can be opened, or no name is free.
    """
    try:
        with contextlib.ExitStack() as undo:
            listener = undo.enter_context(
                socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
            )
            _bind(listener, wanted)
            listener.listen(_BACKLOG)
            undo.pop_all()
    except OSError as error:
        raise _unopened(wanted, error) from None
    return listener


def _unopened(wanted: str, error: OSError) -> UnfitError:
    return UnfitError(f"cannot open the admin socket of job {wanted}: {error.strerror}")


def _bind(listener: socket.socket, wanted: str) -> None:
    for name in itertools.islice(_names(plain(wanted) or "job"), _MOST_NUMBER):
        try:
            listener.bind(address(name))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def _names(wanted: str) -> Iterator[str]:
    room = _MOST_ADDRESS - len(address(""))
    yield _cut(wanted, room)
    for number in itertools.count(2):
        suffix = f"-{number}"
        yield _cut(wanted, room - len(suffix)) + suffix


def _cut(name: str, room: int) -> str:
    # The end distinguishes the runs of one script.
    encoded = name.encode()
    if len(encoded) <= room:
        return name
    start = encoded[: room - _KEPT_END - len("...")].decode(errors="ignore")
    return f"{start}...{encoded[-_KEPT_END:].decode(errors='ignore')}"
