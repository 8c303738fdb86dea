"""A parameter server: has shards, and updates them as gradients arrive.

It is also the standby of another server: it keeps the messages of that one, and takes over the shards if it
is lost. So a process may have the shards of several servers, each with its own order of arrivals. The state
of a server does not depend on the process that has its shards, so a replay needs no loss.

The threads of connections only put arrivals into a queue, and keep messages of the other server (`_put`). The
main thread does everything else, one message at a time. For each message it sends the message to the standby,
processes it meanwhile, waits until the standby has it, and only then answers. So whatever another process may
have seen of the shards, the standby can repeat.
"""

import queue
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt

from lockstep.errors import PeerLostError, PeerStuckError
from lockstep.keras.backends.multi_update import Update
from lockstep.keras.numbered_calls import NumberedCall
from lockstep.keras.parameter_server.process import TaskProcess
from lockstep.keras.parameter_server.served_variables import ServedVariables, TableSnapshot
from lockstep.keras.parameter_server.server_tables import AnswerRows
from lockstep.keras.parameter_server.standby import (
    KeptServer,
    Processed,
    StandbyLink,
    TakenOverError,
    record_of,
)
from lockstep.parameter_server.assignments import StepSet
from lockstep.parameter_server.order import OrderedArrivals, OrderWriter, Record, RecordedOrder, RecordKind
from lockstep.parameter_server.partitioners import Shard
from lockstep.protocol.parameter_server import (
    Answer,
    Applied,
    EndCall,
    Keep,
    KeepState,
    Pull,
    PullRows,
    Push,
    Read,
    ReadRows,
    ServedValues,
    Write,
    WriteRows,
)
from lockstep.system.notes import note
from lockstep.system.prose import count
from lockstep.transport.array_channel import QuestionArrival
from lockstep.worker.job import GRACE_FOR_AGENT, Job

Array = npt.NDArray[Any]

_LOOK_AGAIN = 0.01
"""Seconds between two checks whether a standby is lost whose connection has ended."""

_SOONER = GRACE_FOR_AGENT / 2
"""Seconds by which a server waits less for its standby than others wait for the server. So the first error
names the process that does not answer."""

_LOOK_EVERY = 1.0
"""Seconds between two checks for lost processes."""


class ServerShards:
    """The shards of one server, which processes one message at a time.

    Args:
        variables: the variables with its shards.
        writer: writes the order of arrivals.
        recorded: the order to follow; None for the order of arrival.
        standby: keeps each message before it is answered; None if no other server is left.
        answer_rows: answers questions about rows of tables that only servers have; None if there are none.

    Attributes:
        ended: whether the chief has ended the call.
        closed: whether the chief has also received the answer.
        pushed: the steps of the updates that have not been measured.
    """

    def __init__(
        self,
        variables: ServedVariables,
        writer: OrderWriter,
        recorded: RecordedOrder | None,
        standby: StandbyLink | None,
        answer_rows: AnswerRows | None = None,
    ) -> None:
        self._variables, self._writer, self._standby = variables, writer, standby
        self._answer_rows = answer_rows
        self._arrivals = OrderedArrivals[tuple[QuestionArrival, bool]](writer, recorded)
        self.ended = self.closed = False
        self.pushed: list[int] = []
        self._version = 0
        self._pulled: dict[int, int] = {}
        self._applied = StepSet()
        self._unanswered: dict[int, Record] = {}

    def resume(self, kept: KeptServer) -> None:
        """Continue from the last message that a lost server sent to this standby."""
        if kept.state is not None:
            self._variables.restore(kept.state)
        while kept.messages:
            self.repeat(kept)
        self.pushed.clear()
        self._version, self._applied = 0, kept.pushed
        for record in kept.records:
            self._writer.add(*record)
            self._unanswered[record.worker] = record
            if record.kind is RecordKind.PULL:
                self._pulled[record.worker] = self._version
            elif record.kind is RecordKind.PUSH:
                self._pulled.pop(record.worker, None)
                self._version += 1
        self._writer.add(RecordKind.TAKEN, 0, 0)

    def repeat(self, kept: KeptServer) -> None:
        """Repeat the next message that is kept, if there is one. Another server has processed it before."""
        if kept.messages:
            self._process(*kept.messages.popleft())

    def arrive(self, arrival: QuestionArrival) -> None:
        """Process a message, at its turn.

        Raises:
            PeerLostError: the connection to the standby has ended, but not the standby.
            PeerStuckError: the standby has not answered in time.
            TakenOverError: the standby has taken over the shards.
        """
        message: Any = arrival.message
        if isinstance(message, ReadRows | WriteRows):
            # These are not in the order: the chief asks only while no step is in work.
            self._answer(arrival)
            return
        record = record_of(arrival.process, message)
        again = self._unanswered.pop(arrival.process, None) == record
        if isinstance(message, Push) and (message.step, message.part) in self._applied:
            # The step of a lost worker was computed again, or a lost server applied it without an answer.
            arrival.answer(Applied(-1))
            return
        if isinstance(message, Write) and again:
            arrival.answer(Applied())
            return
        if isinstance(message, Push) and not self._arrivals.expects(record):
            # In the recorded run, this push was lost with its worker.
            arrival.answer(Applied(-1))
            return
        for due, is_repeated in self._arrivals.arrive(record, (arrival, again)):
            self._answer(due, again=is_repeated)

    def tables(self) -> dict[int, TableSnapshot]:
        """Return the tables as they are now, by the positions of their shards."""
        return self._variables.tables()

    def end_call(self, arrival: QuestionArrival) -> None:
        """End the call: the order is complete."""
        self._writer.end()
        self._writer.close()
        self.ended = True
        arrival.answer(Applied())

    def forget(self, process: int) -> None:
        """Forget the last pull of a process that has closed its connection."""
        self._pulled.pop(process, None)

    def awaited(self) -> Record | None:
        """Return the record that arrivals wait for, if an order is followed and some wait."""
        return self._arrivals.awaited()

    def close(self) -> None:
        """Write the rest of the order."""
        self._writer.close()

    def _answer(self, arrival: QuestionArrival, *, again: bool = False) -> None:
        """Process a message, while the standby receives it, and answer."""
        message: Any = arrival.message
        if self._standby is None or isinstance(message, ReadRows):
            arrival.answer(*self._process(arrival.process, message, arrival.arrays, again))
            return
        standby, lost = self._standby, None
        try:
            standby.send(arrival.process, message, arrival.arrays)
        except PeerLostError as error:
            lost = error
        answer = self._process(arrival.process, message, arrival.arrays, again)
        try:
            if lost is None:
                standby.confirm()
                if standby.is_due(self._variables.state_bytes):
                    standby.send_state(self._variables.state())
        except TakenOverError:
            # The standby continues the order, in the same file.
            self._writer.drop()
            raise
        except PeerLostError as error:
            lost = error
        if lost is not None:
            standby.lose(lost)
            self._standby = None
        arrival.answer(*answer)

    def _process(
        self, process: int, message: Processed | ReadRows, arrays: list[Array], again: bool = False
    ) -> tuple[Answer, Sequence[Array]]:
        match message:
            case ReadRows() | WriteRows():
                assert self._answer_rows is not None
                return self._answer_rows(message, arrays)
            case Pull():
                self._pulled[process] = self._version
                slots, common = self._variables.common() if message.common else ((), [])
                rows = dict(zip(message.tables, arrays, strict=True))
                return ServedValues(slots), [*self._variables.values(rows), *common]
            case PullRows():
                return ServedValues(), [self._variables.rows(message.shard, *arrays)]
            case Push():
                gradients = dict(zip(message.shards, arrays, strict=False))
                rows = dict(zip(message.tables, arrays[len(message.shards) :], strict=True))
                self._variables.update(gradients, message.updates, rows)
                self._applied.add(message.step, message.part)
                staleness = self._version - self._pulled.pop(process, self._version)
                self._version += 1
                self.pushed.append(message.step)
                return Applied(staleness), []
            case Read():
                changed, of_tables = self._variables.changes(again=again)
                digests = self._variables.digests()
                values = ServedValues(self._variables.slots, tuple(of_tables), tuple(digests))
                return values, [digests.get(k, array) for k, array in enumerate(changed)] + [
                    *of_tables.values()
                ]
            case Write():
                shards = dict(zip(message.shards, arrays, strict=False))
                written_slots = dict(zip(message.slots, arrays[len(message.shards) :], strict=True))
                self._variables.write(shards, written_slots)
                return Applied(), []


class ServerProcess(TaskProcess):
    """A process of a parameter server.

    Args:
        job: the job of the process.
        call: the call of `fit`, or the calls of a `ClusterCoordinator`.
        make: returns variables for the shards of one server.
        trained: number of training steps of the job before the call.
    """

    def __init__(
        self, job: Job, call: NumberedCall, make: Callable[[], ServedVariables], trained: int
    ) -> None:
        super().__init__(job, call, "")
        self._make, self._trained = make, trained
        self._updates = 0
        self._inbox: queue.SimpleQueue[QuestionArrival | None] = queue.SimpleQueue()
        self._variables: dict[int, ServedVariables] = {}
        self._served: dict[int, ServerShards] = {}
        self._repeating: dict[int, ServerShards] = {}
        self._kept: dict[int, KeptServer] = {}

    def open(self) -> None:
        """Begin the call, together with the other processes, and connect to standbys.

        Raises:
            PeerLostError: the chief has ended.
        """
        self.meet(self._put)
        for server, (process, standby) in enumerate(self.mesh.places):
            if self.job.process not in (process, standby):
                continue
            self._variables[server] = self._make()
            if self.job.process == process:
                writer, recorded = self.order(f"ps-{server}")
                link = None if standby is None else self._link(standby, server)
                self._served[server] = self._new_shards(server, writer, recorded, link)
            elif self.tables is not None:
                self._repeating[server] = self._new_shards(server, OrderWriter(None))

    def add(self, update: Update, shards: Sequence[Shard], tables: frozenset[int] = frozenset()) -> None:
        """Add the variables of a further optimizer; see `TaskProcess.add_variables`."""
        self.add_variables(self._variables, update, shards, tables)

    def interrupt(self) -> None:
        """Let `serve` return. Another thread calls this."""
        self._inbox.put(None)

    def serve(self) -> None:
        """Answer until the chief ends the call, or `interrupt` is called.

        Raises:
            PeerLostError: the chief has ended before, or another server has taken over the shards.
            PeerStuckError: the next message of the recorded order has not arrived in time, or the standby has
                not answered in time.
        """
        timer = self.job.timer
        timer.lap("other")
        timer.begin(f"updates within {self.call.name}")
        # A standby serves until the chief has ended the call on all servers: one may be lost meanwhile.
        while not all(shards.closed for shards in self._served.values()):
            arrival = self._next()
            timer.lap("wait")
            if arrival is None:
                break
            match arrival.message:
                case None:
                    self._closed(arrival)
                case EndCall():
                    self._shards(arrival).end_call(arrival)
                case Keep():
                    # It repeats one message for each that arrives, so questions to this server wait briefly.
                    self._repeat(arrival.server)
                case _:
                    self._answer(self._shards(arrival), arrival)
        # Other processes may read the rows of this standby before it serves again.
        for server, kept in list(self._kept.items()):
            while kept.messages and server in self._repeating:
                self._repeat(server)

    def close(self) -> None:
        """Leave the call."""
        # Write the orders first: once this process does not answer, standbys continue them in the same files.
        for shards in self._served.values():
            shards.close()
        super().close()

    def _link(self, standby: int, server: int) -> StandbyLink | None:
        """Connect to the standby of a server; return None if it is lost."""
        name = self.tasks.name(standby)

        def confirm(error: PeerLostError) -> None:
            # A standby that is not lost could take over with old weights: those of its last message.
            begun = time.monotonic()
            while standby not in self.mesh.lost():
                if time.monotonic() - begun > self.timeout:
                    raise error
                time.sleep(_LOOK_AGAIN)
            note(f"{error}; it was the standby of this server, which has none until the next call")

        try:
            channel = self.mesh.channel(standby, server, self.timeout - _SOONER)
        except PeerLostError as error:
            confirm(error)
            return None
        return StandbyLink(channel, name, confirm, repeats=self.tables is not None)

    def _new_shards(
        self,
        server: int,
        writer: OrderWriter,
        recorded: RecordedOrder | None = None,
        link: StandbyLink | None = None,
    ) -> ServerShards:
        answer_rows = None if self.tables is None else self.tables.answers_of(server)
        return ServerShards(self._variables[server], writer, recorded, link, answer_rows)

    def _answer(self, shards: ServerShards, arrival: QuestionArrival) -> None:
        shards.arrive(arrival)
        self.job.timer.lap("update" if shards.pushed else "exchange")
        for step in shards.pushed:
            self._updates += 1
            self.job.timer.end(self._updates, trained=self._trained + step + 1)
        shards.pushed.clear()

    def _put(self, arrival: QuestionArrival) -> None:
        if isinstance(arrival.message, Keep | KeepState):
            self._kept.setdefault(arrival.server, KeptServer()).receive(arrival)
            if self.tables is None:
                return
        self._inbox.put(arrival)

    def _repeat(self, server: int) -> None:
        """Repeat a message of the server whose standby this one is, unless it was taken over."""
        if server in self._repeating:
            self._repeating[server].repeat(self._kept[server])

    def _closed(self, arrival: QuestionArrival) -> None:
        """Note that a process has closed its connection."""
        shards = self._served.get(arrival.server)
        if shards is None:
            return
        shards.forget(arrival.process)
        if arrival.process == 0:
            if not shards.ended:
                raise PeerLostError(f"the chief has ended within {self.call.name}; its log says why")
            shards.closed = True

    def _shards(self, arrival: QuestionArrival) -> ServerShards:
        """Return the shards that a question is about. Take them over if their server is lost."""
        if arrival.server not in self._served:
            kept = self._kept.setdefault(arrival.server, KeptServer())
            kept.take_over()
            writer, _ = self.order(f"ps-{arrival.server}")
            shards = self._new_shards(arrival.server, writer)
            shards.resume(kept)
            self._repeating.pop(arrival.server, None)
            self._served[arrival.server] = shards
            note(
                f"parameter server {arrival.server} is lost; this process continues with its weights after "
                f"{count(kept.updates, 'update')}"
            )
        return self._served[arrival.server]

    def _next(self) -> QuestionArrival | None:
        begun = time.monotonic()
        while True:
            try:
                return self._inbox.get(timeout=min(_LOOK_EVERY, self.timeout))
            except queue.Empty:
                for process in self.mesh.lost():
                    self.mesh.drop(self.mesh.workers[process])
                late = time.monotonic() - begun >= self.timeout
                for server, shards in self._served.items() if late else ():
                    if (turn := shards.awaited()) is not None:
                        raise PeerStuckError(
                            f"parameter server {server} follows a recorded order in which step "
                            f"{turn.step + 1} of worker {turn.worker} comes next ({turn.kind.name.lower()}), "
                            f"which has not arrived for {self.timeout:g} s"
                        ) from None
