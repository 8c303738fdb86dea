"""Where a running job takes the orders of its owner: a socket that has a name, but no file."""

import contextlib
import errno
import itertools
import os
import select
import socket
from collections.abc import Callable, Iterator

from lockstep.errors import UnfitError
from lockstep.protocol.admin import MAX_PACKET, Order, Refused, Reply, decode_order, encode
from lockstep.system.socket_owners import is_of_this_user

MOST_OPEN = 16
"""Clients that may be connected without having sent an order."""

_MOST_ADDRESS = 107
_MOST_NUMBER = 1000
_BACKLOG = 128
_ARRIVES = select.EPOLLIN | select.EPOLLET
_KEPT_END = 20
_OTHER_VERSION = "use the version of Lockstep that started the job"


def address(name: str) -> bytes:
    """Return the address of this user's job `name`."""
    return f"\0lockstep/{os.geteuid()}/{name}".encode()


def plain(name: str) -> str:
    """Return `name` with an underscore for whatever cannot be typed or shown as a part of one word."""
    return "".join(sign if sign.isprintable() and sign not in " /" else "_" for sign in name)


class AdminSocket:
    """Takes orders of this user's processes, one per connection.

    `fileno` is readable when there is something to `serve`. A client that sends nothing costs a descriptor;
    of more than `MOST_OPEN` such clients the one that came first is turned away.

    Attributes:
        name: under which the job is found.
    """

    def __init__(
        self,
        name: str,
        listener: socket.socket,
        arrivals: select.epoll,
        answer: Callable[[Order], Reply],
        trusts: Callable[[socket.socket], bool],
    ) -> None:
        self.name = name
        self._listener = listener
        self._arrivals = arrivals
        self._answer = answer
        self._trusts = trusts
        self._silent: list[socket.socket] = []

    @classmethod
    def open(
        cls,
        wanted: str,
        answer: Callable[[Order], Reply],
        trusts: Callable[[socket.socket], bool] = is_of_this_user,
    ) -> "AdminSocket":
        """Take the name `wanted`, changed where it is too long, cannot be typed or is taken.

        Args:
            wanted: name of the job.
            answer: says what becomes of an order; waits for nothing, and leaves the door open.
            trusts: whether to read what a client sends.

        Raises:
            UnfitError: there is no socket, or no name.
        """
        try:
            with contextlib.ExitStack() as undo:
                listener = undo.enter_context(
                    socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
                )
                name = _bind(listener, wanted)
                listener.listen(_BACKLOG)
                arrivals = undo.enter_context(select.epoll())
                # On the edge: who cannot be accepted, for want of descriptors, must not keep the agent busy.
                arrivals.register(listener, _ARRIVES)
                undo.pop_all()
        except OSError as error:
            raise UnfitError(f"cannot open the admin socket of job {wanted}: {error.strerror}") from None
        return cls(name, listener, arrivals, answer, trusts)

    def fileno(self) -> int:
        """Return the descriptor to watch for reading."""
        return self._arrivals.fileno()

    def serve(self) -> None:
        """Answer all orders that have come; never waits, and raises only what `answer` raises."""
        self._arrivals.poll(0)
        for connection in tuple(self._silent):
            self._hear(connection)
        for _ in range(MOST_OPEN):
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._admit(connection)
        # There may be more: `fileno` stays readable, and the agent can do other things first.
        self._arrivals.modify(self._listener, _ARRIVES)

    def close(self) -> None:
        """Give the name back, and leave all clients without an answer."""
        while self._silent:
            self._drop(self._silent[0])
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
        try:
            if packet:
                reply = self._reply(packet)
                with contextlib.suppress(OSError):
                    connection.send(reply)
        finally:
            self._drop(connection)

    def _reply(self, packet: bytes) -> bytes:
        try:
            order = decode_order(packet)
        except ValueError as error:
            return encode(Refused(f"unknown request ({error}); {_OTHER_VERSION}"))
        reply = self._answer(order)
        try:
            return encode(reply)
        except ValueError as error:
            return encode(Refused(f"cannot send the answer: {error}"))

    def _drop(self, connection: socket.socket) -> None:
        self._silent.remove(connection)
        # Closing does not do that while a worker that is being started still has a copy.
        self._arrivals.unregister(connection)
        connection.close()


def _bind(listener: socket.socket, wanted: str) -> str:
    for name in itertools.islice(_names(plain(wanted) or "job"), _MOST_NUMBER):
        try:
            listener.bind(address(name))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return name
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def _names(wanted: str) -> Iterator[str]:
    room = _MOST_ADDRESS - len(address(""))
    yield _cut(wanted, room)
    for number in itertools.count(2):
        suffix = f"-{number}"
        yield _cut(wanted, room - len(suffix)) + suffix


def _cut(name: str, room: int) -> str:
    # The end tells the runs of one script apart.
    encoded = name.encode()
    if len(encoded) <= room:
        return name
    start = encoded[: room - _KEPT_END - len("...")].decode(errors="ignore")
    return f"{start}...{encoded[-_KEPT_END:].decode(errors='ignore')}"
