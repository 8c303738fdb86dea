"""How the shards of a parameter server survive it: another server keeps the messages that it processes.

A server sends each message that it processes to its standby, another server of the job, and answers only
when the standby has it. So the standby can repeat all updates whose results another process has seen, and
continue the recorded order of arrivals. It keeps the messages as they are, and updates nothing before it
takes over. When the messages need more memory than the shards, the server sends the state of the shards
instead.

Rows of tables that only servers have are too many to be sent. In a model with such tables, the standby also
has all rows of the server, and repeats each message soon after it has arrived.
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
from lockstep.transport.array_channel import AskingChannel, QuestionArrival

Array = npt.NDArray[Any]
Ordered = Pull | PullRows | Push | Read | Write
Processed = Ordered | WriteRows

KEPT_BYTES = 16 << 20
"""The size of the messages that a standby keeps: this, or the size of the state, if that is more."""

LEAST_BYTES = 64 << 10
"""The size that a smaller message counts as, because repeating it takes time."""


def record_of(process: int, question: Ordered) -> Record:
    """Return the record of a message of a process in the order of arrivals."""
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
        channel: the connection to the standby.
        name: the name of the standby, for messages.
        confirm_loss: waits until the coordinator has announced that the standby is lost; raises the error of
            the connection, which it is given, if that does not happen.
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
        sent = () if isinstance(question, Pull | PullRows) else arrays
        if not isinstance(question, Pull | PullRows):
            self._kept += max(LEAST_BYTES, sum(array.nbytes for array in sent))
        self._question: Keep | KeepState = Keep(process, question)
        self._channel.send(self._question, sent)

    def confirm(self) -> None:
        """Wait until the standby has what was sent last.

        Raises:
            PeerLostError: the standby has ended.
            PeerStuckError: it has not answered in time.
            TakenOverError: it has taken over the shards.
        """
        answer, _ = self._channel.receive(self._question)
        if isinstance(answer, Applied) and answer.staleness < 0:
            raise TakenOverError(f"{self._name} has taken over the shards of this server")

    def is_due(self, state_bytes: int) -> bool:
        """Whether the kept messages take more memory than the state.

        Args:
            state_bytes: the size of the state.
        """
        return not self._repeats and self._kept > max(KEPT_BYTES, state_bytes)

    def send_state(self, state: Sequence[Array]) -> None:
        """Send the state, and wait until the standby has it; raises the errors of `send` and `confirm`."""
        self._kept = 0
        self._question = KeepState()
        self._channel.send(self._question, state)
        self.confirm()

    def lose(self, error: PeerLostError) -> None:
        """Close the connection, whose other end is lost.

        Raises:
            PeerLostError: the standby has not ended, and could take over with the weights of now.
        """
        self._channel.close()
        self._confirm_loss(error)


class TakenOverError(PeerLostError):
    """The standby of this server has taken over its shards: another process could not reach this one."""


class KeptServer:
    """The data that the standby of a server keeps.

    Attributes:
        state: the state that was sent last; None for the state at the beginning of the call.
        messages: the later messages that change the state, each with the process that sent it and its arrays.
            Messages that this process has repeated are not among them.
        records: the order of all messages of the call.
        pushed: the steps of all updates, with their parts.
        updates: the number of updates.
    """

    def __init__(self) -> None:
        self.state: list[Array] | None = None
        self.messages = deque[tuple[int, Processed, list[Array]]]()
        self.records = RecordList()
        self.pushed = StepSet()
        self.updates = 0
        self._is_taken_over = False
        self._lock = threading.Lock()

    def receive(self, arrival: QuestionArrival) -> None:
        """Keep a `Keep` or `KeepState`, and answer. Its connection's thread calls this."""
        with self._lock:
            is_taken_over = self._is_taken_over
            if not is_taken_over:
                self._keep(arrival)
        arrival.answer(Applied(-1 if is_taken_over else 0))

    def take_over(self) -> None:
        """Keep no more messages. A server that still sends one learns that its shards were taken over."""
        with self._lock:
            self._is_taken_over = True

    def _keep(self, arrival: QuestionArrival) -> None:
        if isinstance(arrival.message, KeepState):
            self.state = arrival.arrays
            self.messages.clear()
            return
        assert isinstance(arrival.message, Keep)
        process, question = arrival.message.process, arrival.message.question
        if not isinstance(question, WriteRows):
            self.records.append(record_of(process, question))
        if isinstance(question, Push):
            self.pushed.add(question.step, question.part)
            self.updates += 1
        if not isinstance(question, Pull | PullRows):
            self.messages.append((process, question, arrival.arrays))
