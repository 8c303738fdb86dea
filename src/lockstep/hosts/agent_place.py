"""The place of an agent on its host: an agent without a coordinator ends when another agent takes its place.

A host that was cut off may get a new agent while its old one still waits for the coordinator. The old agent
waits for `--timeout`, or until the new agent of the job takes its place on the host.
"""

import contextlib
import os
import secrets
import select
import socket
from pathlib import Path

from lockstep.system.event_loop import ARRIVES, EventLoop, arrived
from lockstep.system.socket_owners import is_of_this_user

_BACKLOG = 16


class AgentPlace:
    """A socket without a file, by which agents of the same job and user on this host find each other.

    Args:
        job: the id of the job.
        loop: serves the socket.

    Attributes:
        is_wanted: whether another agent has come since this was last set to False.
    """

    def __init__(self, job: bytes, loop: EventLoop) -> None:
        self.is_wanted = False
        self._loop = loop
        prefix = f"lockstep/{os.geteuid()}/agent/{job.hex()}/"
        _tell_others(prefix)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind(f"\0{prefix}{secrets.token_hex(8)}".encode())
        self._listener.listen(_BACKLOG)
        self._arrivals = select.epoll()
        self._arrivals.register(self._listener, ARRIVES)
        loop.watch(self._arrivals.fileno(), self._serve)

    def close(self) -> None:
        """Leave the place."""
        self._loop.unwatch(self._arrivals.fileno())
        self._arrivals.close()
        self._listener.close()

    def _serve(self) -> None:
        self._arrivals.poll(0)
        for connection in arrived(self._listener, self._arrivals, _BACKLOG):
            with connection:
                self.is_wanted = self.is_wanted or is_of_this_user(connection)


def _tell_others(prefix: str) -> None:
    """Connect to the sockets of all agents whose addresses begin with `prefix`."""
    for line in Path("/proc/net/unix").read_text(errors="replace").splitlines()[1:]:
        address = line.rpartition(" ")[2]
        if address.startswith(f"@{prefix}"):
            with (
                contextlib.suppress(OSError),
                socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as connection,
            ):
                connection.connect(f"\0{address[1:]}".encode())
