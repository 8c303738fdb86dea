"""The listening socket of a process: the only way in from other hosts.

A process to which other hosts connect has one listening socket, which is bound only to the requested address.
Beyond the loopback device it needs the key of the job. From it, every holder derives the same key for
greetings and the same certificate authority, and mints a certificate of its own (`keys.py`). A worker gets
`Credentials` from its agent: a certificate, its private key and the key for greetings, but not the key of the
job.

    connecting side                         listener                            receiving side
    connect: greeting, 96 bytes     ->      format, HMAC, job, view, copies
                                            refused: closed and reported
                                            CONTROL, admitted                -> coordinator: TLS in its loop
                                            LANE, admitted: the descriptor   -> worker: `accept`
                                            STATE, admitted                  -> a thread of the agent
    mutual TLS 1.3                  <- - - - - - - - - - - - - - - - - - - - -> mutual TLS 1.3
    dial: returns                   <- - - - - - - - - - - - - - - - - - - - -  one byte: certificate accepted

The greeting is cheap to check, so a stranger costs the listener one read, and cannot begin a handshake.
Copies of greetings are refused: a lane is connected once in a view, and the nonces of other connections are
remembered. A job without a key listens only on the loopback device, and asks the kernel for the user of the
other process.

A worker sends on connections that it opens and receives on those that it accepts, so no TLS object is used
by two threads.
"""

import contextlib
import errno
import itertools
import os
import select
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from lockstep.errors import ConfigError, NetworkError
from lockstep.protocol.credentials import KEY_EXPIRED, Credentials
from lockstep.protocol.greeting import SIZE, ConnectionKind, Greeting, decode_greeting, may_begin
from lockstep.system.clock import Clock
from lockstep.system.event_loop import EventLoop
from lockstep.system.prose import count
from lockstep.system.socket_owners import describe, user_of_connection
from lockstep.transport.addresses import is_loopback, join_address, resolve_host, split_address
from lockstep.transport.keys import key_needed

Admit = Callable[[Greeting, socket.socket, str], str | None]
"""Called with a greeting, its connection and the address of its sender. It takes the connection, which is
non-blocking, and returns None; or it returns why the sender is refused. It may raise OSError if this process
has too many descriptors; then the sender is refused, too."""

LateConnection = Callable[[str, int], None]
"""Called with the address of a worker of this job that connects for a view that has ended, and the view."""

PATIENCE = 5.0
"""Seconds that a connection has for its greeting."""

MOST_PENDING = 128
"""The number of connections that may be open without a greeting."""

PER_TURN = 16
"""The number of connections that one turn of the loop accepts, and from which it reads."""

QUIET = 5.0
"""Seconds between two lines about refused connections."""

_BACKLOG = 1024
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE = 0.5
_MOST_HOSTS = 8
_OTHERS = "other hosts"
_UNKNOWN = "an unknown address"


class Listener:
    """Accepts connections of this job, and refuses strangers.

    A connection has `PATIENCE` seconds to send its greeting. If more than `MOST_PENDING` have not done so,
    the oldest of the host with most of them is closed. Each turn of the loop does bounded work.

    Attributes:
        address: the address at which it listens, with the number of the port.
    """

    def __init__(
        self,
        listening: socket.socket,
        credentials: Credentials | None,
        admit: Admit,
        report: Callable[[str], None],
        loop: EventLoop,
        clock: Clock,
    ) -> None:
        self.address = join_address(listening.getsockname())
        self._listening = listening
        self._credentials = credentials
        self._admit = admit
        self._loop = loop
        self._clock = clock
        self._refusals = _Refusals(report)
        self._pending: dict[int, _Pending] = {}
        self._events = select.epoll()
        self._events.register(listening, select.EPOLLIN)
        self._resumes: float | None = None
        self._job: bytes | None = None
        self._view = (0, 0)
        self._tell_of_late: LateConnection = lambda address, view: None
        self._lanes: dict[tuple[int, int], set[tuple[int, int, int, int]]] = {}
        self._nonces: set[bytes] = set()
        loop.watch(self._events.fileno(), self._serve)
        loop.before_each_wait(self._tend)

    @classmethod
    def open(
        cls,
        address: str,
        credentials: Credentials | None,
        admit: Admit,
        report: Callable[[str], None],
        *,
        loop: EventLoop,
        clock: Clock,
    ) -> "Listener":
        """Listen at an address.

        Args:
            address: a host of this machine and a port, such as 10.0.0.1:12345 or [::1]:0; port 0 means any
                free one.
            credentials: the credentials with which greetings are checked. On the loopback device, they may be
                None. Then only processes of this user are accepted.
            admit: takes the connections of this job.
            report: called with a line about refused connections, at most one in `QUIET` seconds.
            loop: serves the listener.
            clock: for deadlines.

        Raises:
            ConfigError: the address is malformed, not of this host or in use, or needs a key.
            NetworkError: no socket can be opened.
        """
        host, port = split_address(address)
        family, socket_address = resolve_host(host, port, PATIENCE)
        if credentials is None and not is_loopback(socket_address[0]):
            raise key_needed(f"{address} can be reached from other hosts")
        with contextlib.ExitStack() as undo:
            try:
                listening = undo.enter_context(
                    socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
                )
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listening.bind(socket_address)
                listening.listen(_BACKLOG)
            except OSError as error:
                raise _cannot_listen(address, error) from None
            undo.pop_all()
        return cls(listening, credentials, admit, report, loop, clock)

    def enter(self, job: bytes, term: int, view: int, late: LateConnection) -> None:
        """Refuse, from now on, connections of other jobs or of earlier views.

        Connections of later views are accepted, because their coordinator may have told the sender first.
        Connections of earlier views are closed and reported to `late`.
        """
        self._job, self._view, self._tell_of_late = job, (term, view), late
        self._lanes = {key: seen for key, seen in self._lanes.items() if key >= self._view}

    def close(self) -> None:
        """Stop listening, and close the connections without a greeting; safe to call more than once."""
        if self._events.closed:
            return
        self._loop.unwatch(self._events.fileno())
        self._events.close()
        self._listening.close()
        for pending in self._pending.values():
            pending.connection.close()
        self._pending.clear()
        self._refusals.show_all(self._clock.now())

    def _tend(self) -> float | None:
        """Close connections whose time is over; return the seconds until the next one is due."""
        if self._events.closed:
            return None
        now = self._clock.now()
        for pending in list(itertools.islice(self._pending.values(), PER_TURN)):
            if pending.until > now:
                break
            self._refuse(pending, f"it did not send a greeting within {PATIENCE:g} s")
        if self._resumes is not None and self._resumes <= now:
            self._resumes = None
            self._events.modify(self._listening, select.EPOLLIN)
        oldest = next(iter(self._pending.values()), None)
        dues = [oldest.until if oldest else None, self._resumes, self._refusals.show(now)]
        return min((due - now for due in dues if due is not None), default=None)

    def _serve(self) -> None:
        accepts = False
        for descriptor, _ in self._events.poll(0, PER_TURN):
            if descriptor == self._listening.fileno():
                accepts = True
            elif descriptor in self._pending:
                self._hear(self._pending[descriptor])
        for _ in range(PER_TURN if accepts else 0):
            try:
                connection, peer = self._listening.accept()
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno in _NO_DESCRIPTORS:
                    self._make_room(error)
                    break
                # The peer has already closed this one.
                continue
            self._take(connection, join_address(peer))

    def _take(self, connection: socket.socket, peer: str) -> None:
        connection.setblocking(False)
        pending = _Pending(connection, peer, self._clock.now() + PATIENCE)
        self._pending[connection.fileno()] = pending
        self._events.register(connection, select.EPOLLIN)
        self._hear(pending)
        if len(self._pending) > MOST_PENDING:
            self._evict("too many connections are open without a greeting")

    def _make_room(self, error: OSError) -> None:
        """Pause after running out of descriptors; otherwise the loop would try again at once, forever."""
        reason = _no_room(error)
        now = self._clock.now()
        if self._pending:
            self._evict(reason)
        else:
            self._refusals.add(_UNKNOWN, _UNKNOWN, reason, now)
        self._events.modify(self._listening, 0)
        self._resumes = now + _PAUSE

    def _evict(self, reason: str) -> None:
        """Refuse the oldest connection of the host that has most connections without a greeting."""
        hosts: dict[str, list[_Pending]] = {}
        for pending in self._pending.values():
            hosts.setdefault(pending.host, []).append(pending)
        self._refuse(max(hosts.values(), key=len)[0], reason)

    def _hear(self, pending: "_Pending") -> None:
        try:
            data = pending.connection.recv(SIZE - len(pending.data))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        pending.data += data
        if not data:
            self._refuse(pending, "it closed the connection without a greeting")
        elif not may_begin(pending.data):
            self._refuse(pending, "it is not a process of Lockstep")
        elif len(pending.data) == SIZE:
            try:
                greeting = self._checked(pending)
            except _LateError as late:
                self._drop(pending)
                pending.connection.close()
                self._tell_of_late(pending.peer, late.view)
                return
            except ValueError as error:
                self._refuse(pending, str(error))
                return
            self._drop(pending)
            try:
                refusal = self._admit(greeting, pending.connection, pending.peer)
            except OSError as error:
                refusal = _no_room(error)
            if refusal:
                self._close(pending, refusal)

    def _checked(self, pending: "_Pending") -> Greeting:
        """Return the greeting of a connection; raise ValueError if it is refused."""
        data = bytes(pending.data)
        if self._credentials is None:
            greeting = decode_greeting(data, b"")
            if (user := user_of_connection(pending.connection)) != os.geteuid():
                raise ValueError(
                    f"it is {describe(user)}, and a job without a key accepts only processes of its own user"
                )
        else:
            greeting = decode_greeting(data, self._credentials.greeting_key)
            if self._clock.wall() >= self._credentials.expires:
                raise ValueError(KEY_EXPIRED)
        self._remember(greeting)
        return greeting

    def _remember(self, greeting: Greeting) -> None:
        """Remember a greeting.

        Raises:
            ValueError: the greeting is a copy, or belongs to another job.
            _LateError: the greeting belongs to a view that has ended.
        """
        view, in_view = (greeting.term, greeting.view), greeting.kind is not ConnectionKind.CONTROL
        if in_view and self._job is not None and greeting.job != self._job:
            raise ValueError("it belongs to another job with the same key")
        # Questions are asked within a call of the script, in which views may end.
        late = in_view and view < self._view and greeting.kind is not ConnectionKind.QUESTIONS
        if late or greeting.kind is not ConnectionKind.LANE:
            if greeting.nonce in self._nonces:
                raise ValueError("its greeting is a copy of an earlier one")
            self._nonces.add(greeting.nonce)
            if late:
                raise _LateError(greeting.view)
            return
        lane = greeting.host, greeting.incarnation, greeting.lane, greeting.receiver
        if lane in self._lanes.setdefault(view, set()):
            raise ValueError(
                "its greeting is a copy of an earlier one, or that of a second connection of a lane"
            )
        self._lanes[view].add(lane)

    def _drop(self, pending: "_Pending") -> None:
        descriptor = pending.connection.fileno()
        del self._pending[descriptor]
        # `close` alone does not unregister it while a worker that is just starting has a copy.
        self._events.unregister(descriptor)

    def _refuse(self, pending: "_Pending", reason: str) -> None:
        self._drop(pending)
        self._close(pending, reason)

    def _close(self, pending: "_Pending", reason: str) -> None:
        pending.connection.close()
        self._refusals.add(pending.host, pending.peer, reason, self._clock.now())


class _LateError(Exception):
    """A worker of this job has connected for the view `view`, which has ended."""

    def __init__(self, view: int) -> None:
        super().__init__(view)
        self.view = view


@dataclass
class _Pending:
    """A connection that has not sent a greeting yet."""

    connection: socket.socket
    peer: str
    until: float
    data: bytearray = field(default_factory=bytearray)

    @property
    def host(self) -> str:
        return self.peer.rpartition(":")[0]


class _Refusals:
    """Reports refused connections: the first at once, then one line in `QUIET` seconds."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._quiet_until: float | None = None
        self._counts: dict[str, int] = {}
        self._reasons: dict[str, str] = {}

    def add(self, host: str, peer: str, reason: str, now: float) -> None:
        """Count a connection that was refused, from the address `peer` of `host`."""
        if self._quiet_until is None:
            self._quiet_until = now + QUIET
            self._report(f"refused a connection from {peer}: {reason}")
            return
        # Only the first hosts of a flood are named.
        named = host if host in self._counts or len(self._counts) < _MOST_HOSTS else _OTHERS
        self._counts[named] = self._counts.get(named, 0) + 1
        self._reasons[named] = reason

    def show(self, now: float) -> float | None:
        """Show the reports that are due; return the time of the next one, if any."""
        if self._quiet_until is not None and self._quiet_until <= now:
            self.show_all(now)
        return self._quiet_until

    def show_all(self, now: float) -> None:
        """Report everything that was counted."""
        if not self._counts:
            self._quiet_until = None
            return
        self._quiet_until = now + QUIET
        hosts = [f"{number} from {host} ({self._reasons[host]})" for host, number in self._counts.items()]
        total = count(sum(self._counts.values()), "more connection")
        self._report(f"refused {total}: {', '.join(hosts)}")
        self._counts.clear()
        self._reasons.clear()


def _no_room(error: OSError) -> str:
    return f"this process cannot open more connections ({error.strerror})"


def _cannot_listen(address: str, error: OSError) -> Exception:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"{address} is in use by another program: stop it, or give another port")
    if error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(
            f"{address} is not an address of this host: give one that it has, with a free port"
        )
    if error.errno == errno.EACCES:
        return ConfigError(f"this user may not listen at {address}: give a port above 1023")
    return NetworkError(f"cannot listen at {address}: {error.strerror}")
