"""A connection to a parameter server that survives it: the standby answers what the server has not."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy.typing as npt

from lockstep.errors import PeerLostError
from lockstep.protocol.parameter_server import Question
from lockstep.system.notes import note
from lockstep.transport.array_channel import AskingChannel

Array = npt.NDArray[Any]


class AsksServer(Protocol):
    """Asks one server."""

    def send(self, message: Question, arrays: Sequence[Array] = ()) -> None:
        """Ask; see `AskingChannel.send`."""

    def receive(self) -> tuple[Any, list[Array]]:
        """Wait for the answer to what was sent last; see `AskingChannel.receive`."""

    def ask(self, message: Question, arrays: Sequence[Array] = ()) -> tuple[Any, list[Array]]:
        """Ask, and wait for the answer."""

    def silent(self, within: float) -> str:
        """Return the name of the server if it is silent, or empty; see `AskingChannel.is_silent`."""


class ServerChannel:
    """An `AsksServer`; if the server is lost, it asks the one that has taken over the shards.

    Args:
        connects: connect to the process of the server, and to its standby, if there is one.

    Raises:
        PeerLostError: all of them have ended; so for all methods.
    """

    def __init__(self, connects: Sequence[Callable[[], AskingChannel]]) -> None:
        self._connects = list(connects)
        self._asked: tuple[Question, Sequence[Array]] | None = None
        self._channel: AskingChannel | None = None
        self._connect()

    def send(self, message: Question, arrays: Sequence[Array] = ()) -> None:
        """Ask; see `AskingChannel.send`."""
        assert self._channel is not None
        self._asked = message, arrays
        try:
            self._channel.send(message, arrays)
        except PeerLostError as error:
            self._replace(error)

    def receive(self) -> tuple[Any, list[Array]]:
        """Wait for the answer to what was sent last; see `AskingChannel.receive`."""
        assert self._asked is not None
        message, _ = self._asked
        while True:
            assert self._channel is not None
            try:
                answer = self._channel.receive(message)
            except PeerLostError as error:
                self._replace(error)
            else:
                self._asked = None
                return answer

    def ask(self, message: Question, arrays: Sequence[Array] = ()) -> tuple[Any, list[Array]]:
        """Ask, and wait for the answer."""
        self.send(message, arrays)
        return self.receive()

    def silent(self, within: float) -> str:
        """Return the name of the server if it is silent, or empty; see `AskingChannel.is_silent`."""
        channel = self._channel
        return channel.peer if channel is not None and channel.is_silent(within) else ""

    def close(self) -> None:
        """Close the connection."""
        if self._channel is not None:
            self._channel.close()

    def _replace(self, lost: PeerLostError) -> None:
        """Ask the standby what has no answer."""
        if not self._connects:
            raise PeerLostError(f"{lost}; no standby has its weights") from None
        assert self._channel is not None
        self._channel.close()
        self._channel = None
        try:
            self._connect()
        except PeerLostError as error:
            raise PeerLostError(f"{lost}; no standby has its weights: {error}") from None
        note(f"{lost}; its standby continues with its weights")

    def _connect(self) -> None:
        while True:
            try:
                self._channel = self._connects.pop(0)()
                if self._asked is not None:
                    self._channel.send(*self._asked)
                return
            except PeerLostError:
                if not self._connects:
                    raise
