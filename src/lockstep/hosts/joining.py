"""How an agent's host joins a coordinator over the network: one connection, attempted until it succeeds."""

import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from lockstep.errors import ConfigError, NetworkError
from lockstep.protocol.credentials import Credentials
from lockstep.protocol.greeting import ConnectionKind, Greeting
from lockstep.protocol.host import MOST_QUEUED, RemoteInstruction, RemoteReport
from lockstep.system.event_loop import EventLoop
from lockstep.transport.dial import connect
from lockstep.transport.stream_channel import StreamChannel

_ATTEMPT = 4.0
_PAUSE = 0.5


@dataclass
class CoordinatorAddress:
    """The address at which agents join a coordinator over the network.

    Attributes:
        address: HOST:PORT; may change while there is no connection.
        credentials: the credentials of the job.
        loop: serves the attempts.
        others: more addresses, at which another coordinator of the job may be; they may be added later.
        tried: the address of the last attempt.
    """

    address: str
    credentials: Credentials
    loop: EventLoop
    others: list[str] = field(default_factory=list)
    tried: str = ""
    _attempts: int = 0

    def next(self) -> str:
        """Return the address for the next attempt: each in turn."""
        addresses = list(dict.fromkeys((self.address, *self.others)))
        self._attempts += 1
        self.tried = addresses[(self._attempts - 1) % len(addresses)]
        return self.tried

    def dial(self, news: Callable[[], None] = lambda: None) -> "CoordinatorDialer":
        """Begin to connect; `news` is called when there is a result, or when another attempt has failed."""
        return CoordinatorDialer(self.next, self.credentials, self.loop, news)

    def channel(self, connection: socket.socket) -> StreamChannel[RemoteReport, RemoteInstruction]:
        """Return the channel over a connection."""
        return StreamChannel.over(
            connection, RemoteInstruction, self.credentials, accepted=False, most_queued=MOST_QUEUED
        )


class CoordinatorDialer:
    """Connects to a coordinator in a thread, repeatedly until it succeeds.

    Args:
        address: returns the address of the coordinator, for each attempt.
        credentials: the credentials of the job.
        loop: calls `news`.
        news: called when there is a result, or when another attempt has failed.

    Attributes:
        failure: why the last attempt failed; empty before.
        connection: the connection, until the caller takes it; None if there is none.
        error: why there can be no connection; None otherwise.
    """

    def __init__(
        self, address: Callable[[], str], credentials: Credentials, loop: EventLoop, news: Callable[[], None]
    ) -> None:
        self.failure = ""
        self.connection: socket.socket | None = None
        self.error: ConfigError | None = None
        self._address = address
        self._credentials = credentials
        self._loop = loop
        self._news = news
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        loop.watch(self._wake, self._serve)
        self._thread = threading.Thread(target=self._run, name="join", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the attempts, without a wait; a connection that the caller has not taken is closed."""
        with self._lock:
            self._ended.set()
            self._loop.unwatch(self._wake)
            os.close(self._wake)
            if self.connection is not None:
                self.connection.close()

    def take(self) -> socket.socket | None:
        """Return the connection, if there is one now.

        Raises:
            ConfigError: no connection is possible.
        """
        if self.error is not None:
            raise self.error
        with self._lock:
            connection, self.connection = self.connection, None
        return connection

    def _serve(self) -> None:
        os.eventfd_read(self._wake)
        self._news()

    def _check(self) -> None:
        if self._ended.is_set():
            raise NetworkError("the attempts were ended")

    def _run(self) -> None:
        greeting = Greeting(ConnectionKind.CONTROL)
        while not self._ended.is_set():
            connection, failure, error = None, "", None
            try:
                connection = connect(self._address(), greeting, self._credentials, _ATTEMPT, self._check)
            except NetworkError as why:
                failure = str(why)
            except ConfigError as why:
                error = why
            with self._lock:
                if self._ended.is_set():
                    if connection is not None:
                        connection.close()
                    return
                self.connection, self.failure, self.error = connection, failure or self.failure, error
                os.eventfd_write(self._wake, 1)
            if connection is not None or error is not None:
                return
            self._ended.wait(_PAUSE)
