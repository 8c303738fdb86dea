"""The shards of one parameter server. It processes one message at a time, whichever process has them.

    StandbyLink        sends each message to the standby of the server, another server
    KeptServer         what the standby keeps
    ServedVariables    the variables with the shards: updated, read, written
    ServerShards       a message: its turn, its way to the standby, what it changes, and its answer

**Numbers.** Two kinds of numbers occur here:

* Variables that a program trains are numbered over all its optimizers (`Shard.variable`). A call of `fit` has
  one optimizer. Functions of a `ClusterCoordinator` may have several, which are added one after another.
* The shards of a server have positions, in the order in which they were added. Messages contain positions. In
  a `Slot`, the position of a shard takes the place of the variable.

**Variables and tables.** `ServedVariables` has two kinds of shards. Most are variables of Keras, all of which
one compiled update changes. A table of an embedding is a `TableShard`, and an update changes some of its
rows. The update needs the common variables of the optimizer from before the step. So tables are updated
before the other shards, whose update advances the iterations.

**Copies.** In `fit`, a server may update the program's own variable, because the value is replaced at the end
of the call anyway. In scheduled functions, the script of the server reads its variables between calls, and in
a replay in one process, the chief's model has the same variables. There, all shards are copies (`copies`).

**The standby.** A server sends each message to its standby, processes it meanwhile, waits until the standby
has it, and only then answers. So the standby can repeat all updates whose results another process has seen,
and continue the recorded order of arrivals. It keeps the messages as they are, and does not update anything
before it takes over. When the messages need more memory than the shards, the server sends the state of the
shards instead. Rows of tables that only servers have are too many to be sent. In a model with such tables,
the standby also has all rows of the server, and repeats each message soon after it has arrived.
"""

import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from lockstep.errors import PeerLostError
from lockstep.keras.backends.contract import Backend
from lockstep.keras.backends.multi_update import Update
from lockstep.keras.parameter_server.served_optimizers import (
    built_copy,
    iterations_of,
    shapes_of,
    slots_of,
    transfers_of,
)
from lockstep.keras.parameter_server.server_tables import AnswerRows, server_table
from lockstep.keras.parameter_server.table_rows import NO_ROWS, take_rows
from lockstep.keras.parameter_server.table_shards import LastingTableShard, TableShard, TableSnapshot
from lockstep.parameter_server.assignments import StepSet
from lockstep.parameter_server.order import (
    OrderedArrivals,
    OrderWriter,
    Record,
    RecordedOrder,
    RecordKind,
    RecordList,
)
from lockstep.parameter_server.partitioners import Shard
from lockstep.protocol.parameter_server import (
    Answer,
    Applied,
    Keep,
    KeepState,
    Pull,
    PullRows,
    Push,
    Read,
    ReadRows,
    ServedValues,
    Slot,
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
        confirm_loss: waits until the coordinator has announced that the standby is lost. If that does not
            happen, it raises its argument, the error of the connection.
        repeats: whether the standby repeats each message, and so does not need the state.
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
        """Wait until the standby has the message that was sent last.

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
        """Close the connection, because its other end is lost.

        Raises:
            PeerLostError: the standby has not ended, and could take over with the present weights.
        """
        self._channel.close()
        self._confirm_loss(error)


class TakenOverError(PeerLostError):
    """The standby of this server has taken over its shards, because a process could not reach this server."""


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
        """Stop keeping messages. A server that still sends one learns that its shards were taken over."""
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


@dataclass(frozen=True)
class _ServedOptimizer:
    """The part of one optimizer that a server has.

    Attributes:
        positions: the positions of its shards that are not tables, among the shards of the server.
        variables: these shards.
        optimizer: a copy of the optimizer, which updates them.
        slots: the slots of the copy.
        update: updates the shards from their gradients.
        tables: the shards whose rows are updated, by their positions.
    """

    positions: tuple[int, ...]
    variables: Sequence[Any]
    optimizer: Any
    slots: tuple[Slot, ...]
    update: Callable[[Sequence[Array | None]], None]
    tables: Mapping[int, "TableShard"]

    def common(self) -> dict[int, Any]:
        """Return the variables of the optimizer that do not belong to a shard, by their numbers."""
        pairs = zip(self.slots, self.optimizer.variables, strict=True)
        return {number: variable for (position, number), variable in pairs if position < 0}


class ServedVariables:
    """The shards of one server, updated by copies of the program's optimizers.

    Args:
        backend: makes updates.
        copies: whether all shards are copies. Otherwise the shard of a variable that is not divided is the
            program's variable itself.
        plain: as in `Update`.

    Attributes:
        state_bytes: the size of `state`.
    """

    def __init__(self, backend: Backend, *, copies: bool = False, plain: bool = False) -> None:
        self._backend, self._copies, self._plain = backend, copies, plain
        self._transfers = transfers_of(backend)
        self._shards: list[Any] = []
        self._served: list[_ServedOptimizer] = []
        self._weights = 0
        self.state_bytes = 0

    def add(self, update: Update, shards: Sequence[Shard], tables: frozenset[int] = frozenset()) -> None:
        """Add the variables of another optimizer.

        Args:
            update: the optimizer, built, with its initial values, and the variables that it updates.
            shards: the shards of all variables on the server.
            tables: the variables whose rows workers read and update.
        """
        first, weights = self._weights, update.variables
        self._weights += len(weights)
        own_shards = [shard for shard in shards if first <= shard.variable < self._weights]
        program_slots = dict(
            zip(slots_of(update.optimizer, weights), update.optimizer.variables, strict=True)
        )
        before, whole, made = len(self._shards), list[Shard](), dict[int, Any]()
        for position, shard in enumerate(own_shards, before):
            variable = weights[shard.variable - first]
            if shard.variable in tables:
                made[position] = self._table(
                    update.optimizer, variable, shard, program_slots, shard.variable - first
                )
            else:
                made[position] = self._variable(variable, shard)
                whole.append(shard)
        positions = [k for k, made_shard in made.items() if not isinstance(made_shard, TableShard)]
        variables = [made[position] for position in positions]
        optimizer, slots = built_copy(update.optimizer, variables)
        for (at, nth), variable in zip(slots, optimizer.variables, strict=True):
            part = whole[at] if at >= 0 else None
            key = (-1 if part is None else part.variable - first, nth)
            value = self._backend.to_numpy(program_slots[key].value)
            # This is a copy, because updates reuse the memory of the server's own variables.
            variable.assign(np.array(value if part is None else part.part_of(value)))
        number = len(self._served)
        made_tables = {k: made_shard for k, made_shard in made.items() if isinstance(made_shard, TableShard)}
        self._shards += made.values()
        self._served.append(
            _ServedOptimizer(
                tuple(positions),
                variables,
                optimizer,
                tuple((positions[at] if at >= 0 else -1 - number, nth) for at, nth in slots),
                self._backend.updater(Update(optimizer, variables, self._plain)),
                made_tables,
            )
        )
        changing = shapes_of([*variables, *optimizer.variables])
        self.state_bytes += sum(math.prod(shape) * size for shape, size in changing)
        self.state_bytes += sum(array.nbytes for table in made_tables.values() for array in table.state)

    def _table(
        self, optimizer: Any, variable: Any, shard: Shard, program_slots: Mapping[Slot, Any], number: int
    ) -> TableShard:
        def make(value: Array) -> Any:
            return _like(variable, value)

        def part(source: Any) -> Array:
            return shard.part_of(self._backend.to_numpy(source.value))

        if (table := server_table(variable)) is not None:
            rows = table.rows_of(shard.server)
            assert rows is not None
            first = {
                nth: np.array(self._backend.to_numpy(slot.value))
                for (of, nth), slot in program_slots.items()
                if of == number
            }
            begun = bool(self._backend.to_numpy(iterations_of(optimizer).value))
            return LastingTableShard(self._backend, optimizer, make, rows, first, begun)
        slots = {nth: part(slot) for (of, nth), slot in program_slots.items() if of == number}
        return TableShard(self._backend, optimizer, make, part(variable), slots)

    def _variable(self, variable: Any, shard: Shard) -> Any:
        if not shard.whole:
            return _part(variable, shard, f"{variable.name}_{shard.start}")
        if not self._copies:
            return variable
        made = _like(variable, shard.part_of(keras.ops.convert_to_numpy(variable.value)))
        made.constraint = variable.constraint
        return made

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The slots of the optimizers, with the positions of the server's shards."""
        return tuple(slot for served in self._served for slot in served.slots) + tuple(
            (position, nth)
            for position, table in self._tables()
            if not isinstance(table, LastingTableShard)
            for nth in table.slots
        )

    def values(self, rows: Mapping[int, Array] | None = None) -> list[Array]:
        """Return copies of the shards. Of tables in `rows`, by position, return only these rows."""
        wanted, whole = rows or {}, [shard for shard in self._shards if not isinstance(shard, TableShard)]
        whole_values = iter(self._transfers.read(whole))
        return [
            (take_rows(shard.value, wanted[k]) if k in wanted else shard.value.copy())
            if isinstance(shard, TableShard)
            else next(whole_values)
            for k, shard in enumerate(self._shards)
        ]

    def rows(self, position: int, numbers: Array) -> Array:
        """Return rows of a table, by the position of its shard and their numbers in it."""
        table = self._shards[position]
        assert isinstance(table, TableShard)
        return take_rows(table.value, numbers)

    def tables(self) -> dict[int, "TableSnapshot"]:
        """Return the present tables, by the positions of their shards."""
        return {position: table.snapshot() for position, table in self._tables()}

    def digests(self) -> dict[int, Array]:
        """Return the digests of the shards that only servers have, by position."""
        return {k: table.digest() for k, table in self._tables() if isinstance(table, LastingTableShard)}

    def common(self) -> tuple[tuple[Slot, ...], list[Array]]:
        """Return the slots that belong to no shard, such as the iterations, and copies of their values."""
        common = [
            ((-1 - number, nth), variable)
            for number, served in enumerate(self._served)
            for nth, variable in served.common().items()
        ]
        return tuple(slot for slot, _ in common), self._transfers.read([variable for _, variable in common])

    def changes(self, *, again: bool = False) -> tuple[list[Array], dict[int, Array]]:
        """Return copies of the shards and then of `slots`, and the numbers of rows by position.

        Of a table and its slots, only the rows that were updated since the last call are returned. For a
        table that only servers have, an empty array is returned.

        Args:
            again: whether to return the rows of the last call again, because they did not arrive.
        """
        tables = [(k, table) for k, table in self._tables() if not isinstance(table, LastingTableShard)]
        rows = {position: table.pop_changed(again=again) for position, table in tables}
        slots = self._transfers.read([v for served in self._served for v in served.optimizer.variables])
        slots += [
            take_rows(slot, rows[position]) for position, table in tables for slot in table.slots.values()
        ]
        none = {position: NO_ROWS for position, _ in self._tables() if position not in rows}
        return [*self.values({**rows, **none}), *slots], rows

    def update(
        self,
        gradients: Mapping[int, Array],
        updates: Sequence[int] = (0,),
        rows: Mapping[int, Array] | None = None,
    ) -> None:
        """Update the shards once, given the gradients by the positions of their shards.

        Without gradients, only the iterations of the optimizers advance, as on the other servers.

        Args:
            gradients: the gradients by position; of a table, those of some rows.
            updates: the numbers of the optimizers that are applied.
            rows: the numbers of the rows of tables, by position.
        """
        for number in updates:
            served = self._served[number]
            for position, table in served.tables.items():
                if position in gradients:
                    assert rows is not None
                    table.update(rows[position], gradients[position], served.common())
            shard_gradients = [gradients.get(position) for position in served.positions]
            if any(gradient is not None for gradient in shard_gradients):
                served.update(shard_gradients)
            else:
                iterations = iterations_of(served.optimizer)
                iterations.assign(iterations.value + 1)

    def write(self, shards: Mapping[int, Array], slots: Mapping[Slot, Array]) -> None:
        """Replace values of shards, and of variables of the optimizers."""
        for position, value in shards.items():
            if not isinstance(shard := self._shards[position], TableShard):
                shard.assign(value)
        for position, table in self._tables():
            table_slots = {nth: value for (at, nth), value in slots.items() if at == position}
            table.write(shards.get(position), table_slots)
        for served in self._served:
            for slot, variable in zip(served.slots, served.optimizer.variables, strict=True):
                if slot in slots:
                    variable.assign(slots[slot])

    def state(self) -> list[Array]:
        """Return all arrays that change. Some are not copies, so the caller uses them before the next update.

        The arrays of optimizers that are added later follow those of earlier ones.
        """
        return [
            array
            for served in self._served
            for array in (
                *self._transfers.read([*served.variables, *served.optimizer.variables]),
                *(array for table in served.tables.values() for array in table.state),
            )
        ]

    def restore(self, state: Sequence[Array]) -> None:
        """Restore the state of the same shards in another process, perhaps from before some were added."""
        rest = list(state)

        def next_arrays(count: int) -> list[Array]:
            nonlocal rest
            arrays, rest = rest[:count], rest[count:]
            return arrays

        for served in self._served:
            if not rest:
                return
            variables = [*served.variables, *served.optimizer.variables]
            self._transfers.assign(variables, next_arrays(len(variables)))
            for table in served.tables.values():
                table.restore(next_arrays(len(table.state)))

    def _tables(self) -> list[tuple[int, TableShard]]:
        return [(k, shard) for k, shard in enumerate(self._shards) if isinstance(shard, TableShard)]


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
            # These are not in the order, because the chief asks only while no step is in progress.
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
        """Return the present tables, by the positions of their shards."""
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
        """Return the record for which arrivals wait, if an order is followed and some wait."""
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


def _like(variable: Any, value: Array) -> Any:
    """Return a new variable with a value, and with the path and the dtype of another."""
    with ExitStack() as scopes:
        # Some optimizers choose variables by their paths.
        for name in variable.path.split("/")[:-1]:
            scopes.enter_context(keras.name_scope(name))
        return keras.Variable(np.array(value), dtype=variable.dtype, trainable=True, name=variable.name)


def _part(variable: Any, shard: Shard, name: str) -> Any:
    value = np.array(shard.part_of(keras.ops.convert_to_numpy(variable.value)))
    return keras.Variable(value, dtype=variable.dtype, trainable=True, name=name)
