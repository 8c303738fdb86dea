"""A connection to a parameter server that survives the server: its standby answers the open question."""

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
    """An `AsksServer`. If the server is lost, it asks the process that has taken over the shards.

    Its methods raise PeerLostError if all these processes have ended.

    Args:
        connects: functions that return the connection to the process of the server, and to its standby, if
            there is one.
    """

    def __init__(self, connects: Sequence[Callable[[], AskingChannel]]) -> None:
        self._connects = list(connects)
        self._unanswered: tuple[Question, Sequence[Array]] | None = None
        self._channel: AskingChannel | None = None

    def connect(self) -> AskingChannel:
        """Return the connection to the first process that is left."""
        while True:
            try:
                self._channel = self._connects[0]()
                return self._channel
            except PeerLostError:
                if len(self._connects) == 1:
                    raise
                self._connects.pop(0)

    def send(self, message: Question, arrays: Sequence[Array] = ()) -> None:
        """Ask; see `AskingChannel.send`."""
        self._unanswered = message, arrays
        channel = self.connect()
        try:
            channel.send(message, arrays)
        except PeerLostError as error:
            self._replace(error)

    def receive(self) -> tuple[Any, list[Array]]:
        """Wait for the answer to what was sent last; see `AskingChannel.receive`."""
        assert self._unanswered is not None
        message, _ = self._unanswered
        while True:
            assert self._channel is not None
            try:
                answer = self._channel.receive(message)
            except PeerLostError as error:
                self._replace(error)
            else:
                self._unanswered = None
                return answer

    def ask(self, message: Question, arrays: Sequence[Array] = ()) -> tuple[Any, list[Array]]:
        """Ask, and wait for the answer."""
        self.send(message, arrays)
        return self.receive()

    def silent(self, within: float) -> str:
        """Return the name of the server if it is silent, or empty; see `AskingChannel.is_silent`."""
        channel = self._channel
        return channel.peer if channel is not None and channel.is_silent(within) else ""

    def _replace(self, lost: PeerLostError) -> None:
        """Ask the standby the question that has no answer."""
        if len(self._connects) == 1:
            raise PeerLostError(f"{lost}; no standby has its weights") from None
        assert self._channel is not None
        assert self._unanswered is not None
        self._channel.close()
        self._channel = None
        self._connects.pop(0)
        try:
            self.connect().send(*self._unanswered)
        except PeerLostError as error:
            raise PeerLostError(f"{lost}; no standby has its weights: {error}") from None
        note(f"{lost}; its standby continues with its weights")
