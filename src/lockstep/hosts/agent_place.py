"""The place of an agent on its host: an agent without a coordinator ends when another agent takes its place.

A host that was cut off may get a new agent while its old one still waits for the coordinator. The old agent
waits for `--timeout`, or until the new agent of the job takes its place on the host.

A command of `--hosts` that is run again may begin another job in the place of one that a standby could have
continued. After it leads, no coordinator can continue the old job, and its waiting agents also end.
"""

import contextlib
import hashlib
import os
import secrets
import select
import socket
from collections.abc import Callable
from pathlib import Path

from lockstep.system.event_loop import ARRIVES, EventLoop, arrived
from lockstep.system.socket_owners import is_of_this_user

_BACKLOG = 16


class AgentPlace:
    """A socket without a file, with which agents of the same job and user on this host find each other.

    Args:
        job: the id of the job.
        loop: serves the socket.
        store: the URL of the store that decides which job leads; empty if there is none.

    Attributes:
        is_wanted: whether another agent has arrived since this was last set to False.
    """

    def __init__(self, job: bytes, loop: EventLoop, store: str = "") -> None:
        self.is_wanted = False
        self._loop = loop
        self._agents = f"lockstep/{os.geteuid()}/agent/"
        self._job = f"{self._agents}{job.hex()}/"
        self._store = f"/{hashlib.blake2b(store.encode(), digest_size=8).hexdigest()}/" if store else ""
        prefix = f"{self._job.rstrip('/')}{self._store or '/'}"
        _tell(lambda name: name.startswith(self._job))
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind(f"\0{prefix}{secrets.token_hex(8)}".encode())
        self._listener.listen(_BACKLOG)
        self._arrivals = select.epoll()
        self._arrivals.register(self._listener, ARRIVES)
        loop.watch(self._arrivals.fileno(), self._serve)

    def replace_other_jobs(self) -> None:
        """Tell the agents of other jobs with the same store that this job leads there."""
        if self._store:
            _tell(
                lambda name: (
                    name.startswith(self._agents) and self._store in name and not name.startswith(self._job)
                )
            )

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


def _tell(is_told: Callable[[str], bool]) -> None:
    """Connect to the sockets without a file whose names are chosen."""
    for line in Path("/proc/net/unix").read_text(errors="replace").splitlines()[1:]:
        address = line.rpartition(" ")[2]
        if address.startswith("@") and is_told(address[1:]):
            with (
                contextlib.suppress(OSError),
                socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as connection,
            ):
                connection.connect(f"\0{address[1:]}".encode())
