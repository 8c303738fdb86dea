"""How the shards of a parameter server survive it: another server keeps what it processes.

A server sends each message that it processes to its standby, another server of the job, and answers only
when the standby has it. So the standby can repeat all updates whose results another process has seen, and
continue the recorded order of arrivals. It keeps the messages as they are: it updates nothing before it takes
over. When they need more memory than the shards, the server sends the state of the shards instead.

Rows of tables that only servers have are too many to be sent: of a model with such tables, the standby has
all rows of the server, too, and repeats each message soon after it has arrived.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt

from lockstep.errors import PeerLostError
from lockstep.parameter_server.assignments import StepSet
from lockstep.parameter_server.order import Record, RecordKind, RecordList
from lockstep.protocol.parameter_server import (
    Applied,
    Keep,
    KeepState,
    Pull,
    PullRows,
    Push,
    Read,
    Write,
    WriteRows,
)
from lockstep.transport.array_channel import Asked, AskingChannel

Array = npt.NDArray[Any]
Ordered = Pull | PullRows | Push | Read | Write
Processed = Ordered | WriteRows

KEPT_BYTES = 16 << 20
"""A standby keeps messages of as many bytes, or of as many as the state has, if that is more."""

LEAST_BYTES = 64 << 10
"""A message counts as many bytes at least: it takes time to repeat it."""


def record_of(process: int, question: Ordered) -> Record:
    """Return what the order of arrivals says about a message of a process."""
    match question:
        case Pull():
            return Record(RecordKind.PULL, process, question.step, question.part & 0xFF)
        case PullRows():
            return Record(RecordKind.PULL_ROWS, process, question.step, question.lookup & 0xFF)
        case Push():
            return Record(RecordKind.PUSH, process, question.step, question.part & 0xFF)
        case Read():
            return Record(RecordKind.READ, 0, question.step)
        case Write():
            return Record(RecordKind.WRITE, 0, question.step)


class StandbyLink:
    """A server's connection to its standby.

    Args:
        channel: to the standby.
        name: the name of the standby, for messages.
        confirm_loss: waits until the standby is known to be lost, given the error of the connection; raises
            that otherwise.
        repeats: whether the standby repeats each message, and needs no state.
    """

    def __init__(
        self,
        channel: AskingChannel,
        name: str,
        confirm_loss: Callable[[PeerLostError], object],
        *,
        repeats: bool = False,
    ) -> None:
        self._channel, self._name, self._confirm_loss = channel, name, confirm_loss
        self._repeats = repeats
        self._kept = 0

    def send(self, process: int, question: Processed, arrays: Sequence[Array]) -> None:
        """Send a message that the server processes.

        Raises:
            PeerLostError: the standby has ended.
            PeerStuckError: it does not read.
        """
        given = () if isinstance(question, Pull | PullRows) else arrays
        if not isinstance(question, Pull | PullRows):
            self._kept += max(LEAST_BYTES, sum(array.nbytes for array in given))
        self._asked: Keep | KeepState = Keep(process, question)
        self._channel.send(self._asked, given)

    def confirm(self) -> None:
        """Wait until the standby has what was sent last.

        Raises:
            PeerLostError: the standby has ended.
            PeerStuckError: it has not answered in time.
            TakenOverError: it has taken over the shards.
        """
        answer, _ = self._channel.receive(self._asked)
        if isinstance(answer, Applied) and answer.staleness < 0:
            raise TakenOverError(f"{self._name} has taken over the shards of this server")

    def is_due(self, state_bytes: int) -> bool:
        """Whether the standby keeps so much that the state takes less memory.

        Args:
            state_bytes: the size of the state.
        """
        return not self._repeats and self._kept > max(KEPT_BYTES, state_bytes)

    def send_state(self, state: Sequence[Array]) -> None:
        """Send the state, and wait until the standby has it; raises the errors of `send` and `confirm`."""
        self._kept = 0
        self._asked = KeepState()
        self._channel.send(self._asked, state)
        self.confirm()

    def lose(self, error: PeerLostError) -> None:
        """Close the connection, whose other end is lost.

        Raises:
            PeerLostError: the standby has not ended: it would take over what it has kept until now.
        """
        self._channel.close()
        self._confirm_loss(error)


class TakenOverError(PeerLostError):
    """The standby of this server has taken over its shards: another process could not reach this one."""


class KeptServer:
    """What the standby of a server keeps.

    Attributes:
        state: the state that was sent last; None for that at the beginning of the call.
        messages: those after it that change the state, each with the process that sent it and its arrays;
            without those that this process has repeated.
        records: the order of all messages of the call.
        pushed: the steps of all updates, with their parts.
        updates: their number.
    """

    def __init__(self) -> None:
        self.state: list[Array] | None = None
        self.messages = deque[tuple[int, Processed, list[Array]]]()
        self.records = RecordList()
        self.pushed = StepSet()
        self.updates = 0
        self._taken = False
        self._lock = threading.Lock()

    def take(self, asked: Asked) -> None:
        """Keep a `Keep` or `KeepState`, and answer; called in the thread of its connection."""
        with self._lock:
            taken = self._taken
            if not taken:
                self._keep(asked)
        asked.answer(Applied(-1 if taken else 0))

    def take_over(self) -> None:
        """Keep nothing more: what is kept does not change afterwards, and the server is told."""
        with self._lock:
            self._taken = True

    def _keep(self, asked: Asked) -> None:
        if isinstance(asked.message, KeepState):
            self.state = asked.arrays
            self.messages.clear()
            return
        assert isinstance(asked.message, Keep)
        process, question = asked.message.process, asked.message.question
        if not isinstance(question, WriteRows):
            self.records.append(record_of(process, question))
        if isinstance(question, Push):
            self.pushed.add(question.step, question.part)
            self.updates += 1
        if not isinstance(question, Pull | PullRows):
            self.messages.append((process, question, asked.arrays))
