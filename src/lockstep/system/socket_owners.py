"""The owner of a socket: of the other end of a connection on this host, or of an abstract name."""

import contextlib
import os
import pwd
import socket
import struct
from pathlib import Path
from typing import Any

_SOCK_DIAG = 4
"""The netlink family that lists sockets."""
_BY_FAMILY = 20
_DUMP = 0x301
"""The flags of a netlink message that requests all entries."""
_DONE, _ERROR = 3, 2
_SHOW_NAME, _SHOW_USER = 0x01, 0x40
_NAME, _USER = 0, 7
_ALL_STATES = 0xFFFFFFFF
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBHIIIII")
_SOCKET = struct.Struct("=BBBBIII")
_ATTRIBUTE = struct.Struct("=HH")
_BUFFER = 256 * 1024
_CREDENTIALS = struct.Struct("iII")
_PATIENCE = 2.0


def peer(connection: socket.socket) -> tuple[int, int]:
    """Return the ids of the process and of the user at the other end."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(packed)
    return pid, uid


def is_of_this_user(connection: socket.socket) -> bool:
    """Whether the process at the other end has the same user. Root is not an exception."""
    return peer(connection)[1] == os.geteuid()


def user_of_connection(connection: socket.socket) -> int | None:
    """Return the id of the user at the other end of a TCP connection within this host, or None if unknown."""
    with contextlib.suppress(OSError):
        local, remote = _listed(connection.getsockname()), _listed(connection.getpeername())
        table = "tcp" if connection.family == socket.AF_INET else "tcp6"
        with Path(f"/proc/net/{table}").open() as sockets:
            for line in sockets:
                fields = line.split()
                if fields[1:3] == [remote, local]:
                    return int(fields[7])
    return None


def _listed(address: tuple[Any, ...]) -> str:
    """Return an address in the kernel's notation: 32-bit words in this machine's byte order."""
    host = str(address[0]).partition("%")[0]
    packed = socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    return "".join(f"{word:08X}" for (word,) in struct.iter_unpack("=I", packed)) + f":{address[1]:04X}"


def user_of(name: bytes) -> int | None:
    """Return the id of the user whose SOCK_SEQPACKET socket has `name`, or None if it is unknown."""
    with contextlib.suppress(OSError, struct.error):
        return _users().get(name)
    return None


def is_of_another_user(name: bytes) -> bool:
    """Whether a process of another user is known to use `name`."""
    return user_of(name) not in (None, os.geteuid())


def describe(user: int | None, pid: int | None = None) -> str:
    """Name a process and its user in a message, if they are known."""
    process = f"process {pid}" if pid else "a process"
    if user is None:
        return process if pid else "a process that this user cannot see"
    with contextlib.suppress(KeyError):
        return f"{process} of user {user} ({pwd.getpwuid(user).pw_name})"
    return f"{process} of user {user}"


def process_of(name: bytes) -> int | None:
    """Return the id of a process that uses `name`, or None if this user may not see it."""
    # Imported only after a failure, which is rare.
    import psutil

    shown = "@" + name[1:].decode(errors="replace")
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("unix"):
            if connection.laddr == shown and connection.pid:
                return int(connection.pid)
    return None


def _users() -> dict[bytes, int]:
    """Return the users of all named SOCK_SEQPACKET sockets, by name."""
    request = _REQUEST.pack(socket.AF_UNIX, 0, 0, _ALL_STATES, 0, _SHOW_NAME | _SHOW_USER, 0, 0)
    users: dict[bytes, int] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        kernel.settimeout(_PATIENCE)
        kernel.send(_HEADER.pack(_HEADER.size + len(request), _BY_FAMILY, _DUMP, 1, 0) + request)
        while True:
            answer = kernel.recv(_BUFFER)
            at = 0
            while at < len(answer):
                length, kind, *_ = _HEADER.unpack_from(answer, at)
                if kind in (_DONE, _ERROR) or length < _HEADER.size:
                    return users
                _note(answer[at + _HEADER.size : at + length], users)
                at += _aligned(length)


def _note(described: bytes, users: dict[bytes, int]) -> None:
    """Add the socket that a message describes, if it has a name and a user."""
    _, kind, *_ = _SOCKET.unpack_from(described)
    attributes: dict[int, bytes] = {}
    at = _SOCKET.size
    while at + _ATTRIBUTE.size <= len(described):
        length, attribute = _ATTRIBUTE.unpack_from(described, at)
        attributes[attribute] = described[at + _ATTRIBUTE.size : at + length]
        at += max(_aligned(length), _ATTRIBUTE.size)
    name, user = attributes.get(_NAME), attributes.get(_USER)
    if kind == socket.SOCK_SEQPACKET and name and user:
        # Accepted connections have the name and the user of the listening socket.
        users.setdefault(name, struct.unpack("=I", user)[0])


def _aligned(length: int) -> int:
    return (length + 3) & ~3
