"""The addresses of tasks, and the names with which the processes of one host find each other.

Each address on this host represents the name of an abstract Unix socket, which has no file, and which the
kernel frees when the last process that has the socket ends. If all tasks are on one host, nothing listens at
the addresses themselves.
"""

import contextlib
import errno
import os
import socket
from collections.abc import Sequence

from lockstep.errors import ConfigError, UnfitError
from lockstep.system.socket_owners import describe, is_of_another_user, peer, process_of, user_of
from lockstep.transport.addresses import is_here, join_address, look_up, split_address

_BACKLOG = 128


def resolve(address: str, task: str) -> str:
    """Return the place of an address: the address with the host's IP address in place of its name.

    Raises:
        ConfigError: the name cannot be resolved.
    """
    host, port = split_address(address)
    resolved = look_up(host, port)
    if isinstance(resolved, str):
        raise ConfigError(
            f"the host {host!r} of {task}'s address {address} cannot be resolved ({resolved}); correct it in "
            "TF_CONFIG, or give its IP address"
        )
    return join_address(resolved[1])


def has_place(place: str, task: str) -> bool:
    """Whether a place is on this host.

    Raises:
        UnfitError: the address cannot be used.
    """
    number, port = split_address(place)
    try:
        return is_here(_family(number), (number, port))
    except OSError as error:
        raise UnfitError(f"{task}'s address {place} cannot be used: {error.strerror}") from None


def check_free(place: str, task: str) -> None:
    """Check that no other program listens at a place.

    Raises:
        ConfigError: another program listens there.
    """
    number, port = split_address(place)
    with contextlib.closing(socket.socket(_family(number))) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((number, port))
        except OSError as error:
            # Lockstep does not listen there, so only an error that shows another program matters.
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"{task}'s address {place} is in use by {_user_of(port)}: stop it, or give another port "
                    "to this task in every TF_CONFIG"
                ) from None


def claim(places: Sequence[str]) -> "list[socket.socket] | str":
    """Take the names of all places and listen there; take no name if one is in use.

    Returns:
        The listening sockets, or the place whose name is in use.

    Raises:
        UnfitError: no socket can be opened.
    """
    with contextlib.ExitStack() as undo:
        listeners = []
        # All processes use the same order, so that one of several concurrent processes gets all names.
        for place in sorted(places):
            try:
                listener = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                listener.bind(_name(place))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return place
                raise UnfitError(f"the job cannot open a socket: {error.strerror}") from None
            listeners.append(listener)
        for listener in listeners:
            listener.listen(_BACKLOG)
        undo.pop_all()
    return listeners


def connect(place: str) -> socket.socket | None:
    """Return a connection to the process that has the name of a place; never blocks.

    Returns:
        None if no process listens there, or if its queue of connections is full.

    Raises:
        ConfigError: a process of another user has the name.
    """
    with contextlib.ExitStack() as undo:
        connection = undo.enter_context(
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        )
        try:
            connection.connect(_name(place))
        except (ConnectionRefusedError, BlockingIOError, PermissionError):
            if is_of_another_user(_name(place)):
                raise _squatted(place, user_of(_name(place)), process_of(_name(place))) from None
            return None
        pid, user = peer(connection)
        if user != os.geteuid():
            raise _squatted(place, user, pid)
        connection.setblocking(True)
        undo.pop_all()
    return connection


def holder(place: str) -> str:
    """Describe the process that has the name of a place, if this user can see it."""
    return describe(user_of(_name(place)), process_of(_name(place)))


def _squatted(place: str, user: int | None, pid: int | None) -> ConfigError:
    return ConfigError(
        f"{describe(user, pid)} holds the name that represents {place} on this host, so the tasks "
        "cannot connect; set other ports in TF_CONFIG, the same for all tasks, or stop that process"
    )


def _name(place: str) -> bytes:
    return f"\0lockstep/{os.geteuid()}/at/{place}".encode()


def _family(number: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in number else socket.AF_INET


def _user_of(port: int) -> str:
    # This is imported only after a failure, which is rare.
    import psutil

    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            listens = (
                connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
            )
            if listens and connection.pid:
                return f"{psutil.Process(connection.pid).name()} (process {connection.pid})"
    return "another program"
