"""Finds the running jobs of this user on this machine, and sends them requests."""

import contextlib
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from lockstep.coordinator.admin_socket import address, plain
from lockstep.errors import ConfigError, UnfitError
from lockstep.protocol.admin import (
    MAX_PACKET,
    AdminRequest,
    Refused,
    Reply,
    Status,
    StatusRequest,
    decode_reply,
    encode,
)
from lockstep.system.notes import NOTE_EVERY, note
from lockstep.system.prose import columns, count, duration_text
from lockstep.system.socket_owners import is_of_another_user, is_of_this_user, peer

_SOCKETS = Path("/proc/net/unix")
_LISTENS = (b"00010000", b"0005")
_PATIENCE = 5.0
"""Seconds that a job has to reply to a request."""
_LIST_PATIENCE = 2.0
"""The same for each job in a list of all jobs."""
_PAUSE = 0.05
_MOST_AT_ONCE = 64
_NAMED = 3
"""The most names in a message; the last ones are the newest runs."""
_UNSEEN = 0
_COLUMNS = ("JOB", "PROCESS", "WORKERS", "REPLICAS", "SINCE", "DOING", "FOLDER", "SO FAR")


class RunningJobs(NamedTuple):
    """The running jobs of this user.

    Attributes:
        running: the state of each job that replied, the oldest first.
        silent: the names of jobs that did not reply.
    """

    running: tuple[Status, ...]
    silent: tuple[str, ...]


def running_jobs(patience: float = _LIST_PATIENCE) -> RunningJobs:
    """Return the state of every job of this user; each has `patience` seconds to reply.

    Raises:
        UnfitError: the system does not list its sockets.
    """
    names = _names()
    with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        replies = list(pool.map(lambda name: _ask(name, patience), names))
    running = [reply for reply in replies if isinstance(reply, Status)]
    silent = [name for name, reply in zip(names, replies, strict=True) if isinstance(reply, Refused)]
    return RunningJobs(tuple(sorted(running, key=lambda status: status.since)), tuple(silent))


def send(job: str, request: AdminRequest, patience: float = _PATIENCE) -> Reply:
    """Send a request to a job of this user, and return its reply.

    Args:
        job: its name, or the beginning of its name if that is unambiguous.
        request: the message to send.
        patience: seconds that the job has to reply.

    Raises:
        ConfigError: there is no such job, the name is ambiguous, or the job does not reply.
        UnfitError: the system does not list its sockets.
    """
    name = _find(job)
    try:
        reply = call_job(name, request, patience)
    except TimeoutError:
        raise ConfigError(f"{name} has not replied in {patience:g} seconds; {_advice(name)}") from None
    except ValueError as error:
        raise ConfigError(
            f"cannot read the reply of {name} ({error}); use the version of Lockstep that started it"
        ) from None
    if reply is None:
        raise ConfigError(f"{name} has just ended")
    return reply


def accepted(reply: Reply) -> Status:
    """Return the state in a reply.

    Raises:
        ConfigError: the request is refused.
    """
    if not isinstance(reply, Status):
        raise ConfigError(reply.reason if isinstance(reply, Refused) else "the reply is not a state")
    return reply


class JobWatch:
    """Watches a job until its name is free or belongs to another job.

    Args:
        name: the name of the job, complete.

    Attributes:
        owner: id of the process that receives the requests to the job; 0 while it is unknown.
    """

    def __init__(self, name: str) -> None:
        self.owner = _UNSEEN
        self._name = name

    def is_running(self) -> bool:
        """Whether the job still runs, or has just ended. This asks the job's socket, not the job."""
        owner = _owner(self._name)
        if owner is None or (owner and self.owner and owner != self.owner):
            return False
        self.owner = owner or self.owner
        return True


def wait_until_gone(name: str) -> None:
    """Wait until no job, or a different one, has this name; print a note every few seconds.

    This wait has no limit: Ctrl-C ends it, and the note names the process to kill.
    """
    watch = JobWatch(name)
    begun = said = time.monotonic()
    while watch.is_running():
        if (now := time.monotonic()) - said >= NOTE_EVERY:
            said = now
            how = f"; to kill the whole job: kill -KILL {watch.owner}" if watch.owner else ""
            note(f"{name} is still stopping after {now - begun:.0f} s{how}")
        time.sleep(_PAUSE)


def table(running: Sequence[Status], wall: float) -> list[str]:
    """Return a table: a line of headings and a line per job; `wall` is the current time."""
    return columns([_COLUMNS, *(_row(status, wall) for status in running)])


def _row(status: Status, wall: float) -> tuple[str, ...]:
    workers = f"{len(status.workers)} of {status.wanted}"
    if status.joining:
        workers += f" +{len(status.joining)} joining"
    since = duration_text(wall - status.since)
    first_columns = status.job, str(status.pid), workers, str(status.replicas), since
    return *first_columns, status.where, status.run_dir, status.went


def job_names() -> list[str]:
    """Return the sorted names of this user's running jobs. This does not ask a job, so no job can delay it.

    Raises:
        UnfitError: the system does not list its sockets.
    """
    return [name for name in _names() if _owner(name) is not None]


def _find(job: str) -> str:
    names = job_names()
    if (name := choose(job, names)) is not None:
        return name
    raise ConfigError(f"there is no job '{job}'; {listed(names)}")


def choose(job: str, names: Sequence[str]) -> str | None:
    """Return the name that `job` is, or the only one that begins with it, or None if there is none.

    Raises:
        ConfigError: several names begin with it.
    """
    meant = [name for name in names if name == job]
    meant = meant or [name for name in names if job and name.startswith(job)]
    if len(meant) > 1:
        others = [count(len(meant) - _NAMED, "other")] if len(meant) > _NAMED else []
        shown = " or ".join([*meant[-_NAMED:], *others])
        raise ConfigError(f"'{job}' is ambiguous: {shown}; give more of the name")
    return meant[0] if meant else None


def listed(names: Sequence[str]) -> str:
    """Return the end of a message that lists the running jobs."""
    return f"running jobs: {', '.join(names)}" if names else "no job is running"


def _advice(name: str) -> str:
    owner = _owner(name)
    return "try again" + (f", or kill the whole job with kill -KILL {owner}" if owner else "")


def _ask(name: str, patience: float) -> Reply | None:
    """Return the state of a job; `Refused` if it does not reply, None if there is no such job."""
    try:
        return call_job(name, StatusRequest(), patience)
    except (TimeoutError, ValueError) as error:
        return Refused(str(error))


def call_job(name: str, request: AdminRequest, patience: float) -> Reply | None:
    """Return the reply of a job, or None if there is no such job.

    Raises:
        TimeoutError: it did not reply in time.
        ValueError: it sent data that is not a reply.
    """
    deadline = time.monotonic() + patience
    while (left := deadline - time.monotonic()) > 0:
        try:
            connection = _connect(name)
            if connection is None:
                return None
            with connection:
                connection.settimeout(left)
                connection.send(encode(request))
                if packet := connection.recv(MAX_PACKET + 1):
                    return decode_reply(packet)
        except (BlockingIOError, ConnectionError):
            pass
        # Too many other clients are waiting, or the job has ended: the next attempt shows which.
        time.sleep(_PAUSE)
    raise TimeoutError


def _owner(name: str) -> int | None:
    """Return the id of the process that receives the requests to a job, or None if there is no such job."""
    try:
        connection = _connect(name)
    except BlockingIOError:
        return _UNSEEN
    if connection is None:
        return None
    with connection:
        return peer(connection)[0]


def _connect(name: str) -> socket.socket | None:
    """Return a connection to a job, or None if this user has no job of this name.

    Raises:
        BlockingIOError: the job exists, but too many clients are waiting for it.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        connection.connect(address(name))
        if is_of_this_user(connection):
            return connection
    except (ConnectionRefusedError, PermissionError):
        pass
    except BlockingIOError:
        if not is_of_another_user(address(name)):
            connection.close()
            raise
    except BaseException:
        connection.close()
        raise
    connection.close()
    return None


def _names() -> list[str]:
    """Return the names of sockets that may be jobs of this user; any user can take such a name."""
    try:
        lines = _SOCKETS.read_bytes().split(b"\n")
    except OSError as error:
        raise UnfitError(f"{_SOCKETS}, which lists the jobs, cannot be read: {error.strerror}") from None
    start = b"@" + address("")[1:]
    names = set()
    for line in lines:
        fields = line.split(None, 7)
        if tuple(fields[3:5]) == _LISTENS and fields[-1].startswith(start):
            # Names of jobs are UTF-8.
            with contextlib.suppress(UnicodeDecodeError):
                names.add(fields[-1].removeprefix(start).decode())
    return sorted(name for name in names if name and name == plain(name))
