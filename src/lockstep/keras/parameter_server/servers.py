"""The parameter servers as the chief and the workers use them: with whole variables and slots.

Each server has some rows of the variables and slots. A connection to a server survives the server: its
standby answers the open question.
"""

import ctypes
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from lockstep.collectives.layout import allocate
from lockstep.errors import PeerLostError
from lockstep.keras.parameter_server.table_rows import NO_ROWS, put_rows, take_rows
from lockstep.parameter_server.partitioners import Shard
from lockstep.protocol.parameter_server import EndCall, Pull, PullRows, Push, Question, Read, Slot, Write
from lockstep.system.notes import note
from lockstep.transport.array_channel import AskingChannel

Array = npt.NDArray[Any]

_COMPARED = 1 << 20
"""Bytes that are compared at once, so that the results stay in the cache."""


class AsksServer(Protocol):
    """Asks one server."""

    def send(self, message: Question, arrays: Sequence[Array] = ()) -> None:
        """Ask; see `AskingChannel.send`."""

    def receive(self) -> tuple[Any, list[Array]]:
        """Wait for the answer to the last question; see `AskingChannel.receive`."""

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
        """Return the connection to the first process that is still alive."""
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
        """Wait for the answer to the last question; see `AskingChannel.receive`."""
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


class RowsOfServer(NamedTuple):
    """Rows of a table that one server has.

    Attributes:
        server: the number of the server.
        shard: the position of the table's shard among those of the server.
        rows: the numbers of the rows in the shard.
    """

    server: int
    shard: int
    rows: Array


@dataclass(frozen=True)
class Gradients:
    """The gradients that a worker gives all servers at the same time.

    Attributes:
        of: the gradients, by the numbers of their variables; of a table, the gradients of some rows.
        rows: the distinct rows, in order, to which the gradients of tables belong, by their variables.
        updates: the numbers of the optimizers that are applied.
        part: the number of times that the step has applied an optimizer before.
    """

    of: Mapping[int, Array]
    rows: Mapping[int, Array] = field(default_factory=dict)
    updates: tuple[int, ...] = (0,)
    part: int = 0


class Servers:
    """The connections of one process to all servers.

    Variables are numbered over all optimizers. So are slots, in the order of the optimizers' variables.

    Args:
        channels: the connection to each server.
        shards: the shards of all variables.

    Attributes:
        digests: the digests of the tables that only servers have, at the last read, by their variables.
    """

    def __init__(self, channels: Sequence[AsksServer], shards: Sequence[Shard]) -> None:
        self._channels = channels
        self._updated: dict[int, Array] = {}
        self._tables: dict[Slot, ReadTable] = {}
        self.digests: dict[int, Array] = {}
        self._shards: list[list[Shard]] = [[] for _ in channels]
        self.add(shards)

    def add(self, shards: Iterable[Shard]) -> None:
        """Add the shards of further variables."""
        for shard in shards:
            self._shards[shard.server].append(shard)

    def pull(
        self, step: int, rows: Mapping[int, Array], *, common: bool = False, part: int = 0
    ) -> tuple[list[Array], dict[Slot, Array]]:
        """Return the variables for a unit of work, and the slots that do not belong to one of them.

        Args:
            step: the number of the unit of work.
            rows: the distinct rows of tables to return, in order, by their variables.
            common: whether the slots are needed. They have the values of the first server.
            part: the number of times that the unit has applied an optimizer before.

        Raises:
            PeerLostError: a server has ended.
            PeerStuckError: a server has not answered in time.
        """
        for server, channel in enumerate(self._channels):
            channel.send(*self.pull_of(server, step, rows, common=common, part=part))
        return self.pulled([channel.receive() for channel in self._channels])

    def pull_of(
        self, server: int, step: int, rows: Mapping[int, Array], *, common: bool = False, part: int = 0
    ) -> tuple[Pull, list[Array]]:
        """Return the message that `pull` sends to one server, with its arrays."""
        shards = enumerate(self._shards[server])
        needed = {k: _rows_in(shard, rows[shard.variable]) for k, shard in shards if shard.variable in rows}
        return Pull(step, common=common, part=part, tables=tuple(needed)), list(needed.values())

    def pulled(self, answers: Sequence[tuple[Any, Sequence[Array]]]) -> tuple[list[Array], dict[Slot, Array]]:
        """Return the result of `pull`, given the answers of all servers."""
        parts: dict[int, list[tuple[Shard | None, Array]]] = {}
        for shards, (_, arrays) in zip(self._shards, answers, strict=True):
            for shard, array in zip(shards, arrays, strict=False):
                parts.setdefault(shard.variable, []).append((shard, array))
        values, arrays = answers[0]
        common = dict(zip(values.slots, arrays[len(self._shards[0]) :], strict=True))
        return [_whole(parts[variable]) for variable in range(len(parts))], common

    def pull_rows(self, step: int, variable: int, rows: Array, lookup: int) -> Array:
        """Return rows of a table.

        Args:
            step: the number of the function that looks them up.
            variable: the table.
            rows: the numbers of the rows, distinct and in order.
            lookup: the number of the lookup in the function.
        """
        parts = self.rows_by_server(variable, rows)
        for part in parts:
            self._channels[part.server].send(PullRows(step, part.shard, lookup), [part.rows])
        return np.concatenate([self._channels[part.server].receive()[1][0] for part in parts])

    def rows_by_server(self, variable: int, rows: Array) -> list["RowsOfServer"]:
        """Return rows of a table by their servers, in order. The rows are distinct and sorted."""
        parts = [
            (shard.start, RowsOfServer(server, k, of_shard))
            for server, shards in enumerate(self._shards)
            for k, shard in enumerate(shards)
            if shard.variable == variable and len(of_shard := _rows_in(shard, rows))
        ]
        return [part for _, part in sorted(parts, key=lambda part: part[0])]

    def push(self, step: int, gradients: Gradients) -> int:
        """Let the servers update variables, and return the largest staleness.

        Args:
            step: the step for which the gradients were computed.
            gradients: the gradients of the variables of all servers.
        """
        for server, channel in enumerate(self._channels):
            channel.send(*self.push_of(server, step, gradients))
        answers = [channel.receive()[0] for channel in self._channels]
        # A server that has applied the push before answers with -1.
        return max([0, *(int(answer.staleness) for answer in answers)])

    def push_of(self, server: int, step: int, gradients: Gradients) -> tuple[Push, list[Array]]:
        """Return the message that `push` sends to one server, with its arrays."""
        of, rows = gradients.of, gradients.rows
        updated = {k: shard for k, shard in enumerate(self._shards[server]) if shard.variable in of}
        numbers = {
            k: _rows_in(shard, rows[shard.variable]) for k, shard in updated.items() if shard.variable in rows
        }
        parts = [
            _part_of(of[shard.variable], shard, rows[shard.variable])
            if k in numbers
            else shard.part_of(of[shard.variable])
            for k, shard in updated.items()
        ]
        push = Push(step, tuple(updated), gradients.updates, gradients.part, tuple(numbers))
        return push, [*parts, *numbers.values()]

    def read(
        self,
        step: int,
        slots: Sequence[Slot],
        last: tuple[Sequence[Array], Sequence[Array]] | None = None,
    ) -> tuple[list[Array], list[Array]]:
        """Return the variables and the slots, after a number of steps.

        Args:
            step: the number of steps.
            slots: the slots to return.
            last: the variables and the slots at the last read or write, or at the beginning. Of tables and
                their slots, the servers send only the rows that were updated since then; of tables that only
                servers have, they send nothing. The rest is returned unchanged. None if there are no tables.
        """
        answers = self._ask_all(Read(step))
        pieces: dict[Slot, list[tuple[Shard | None, Array, Array | None]]] = {}
        self.digests = {}
        for shards, (values, arrays) in zip(self._shards, answers, strict=True):
            count = len(shards) + len(values.slots)
            rows = dict(zip(values.tables, arrays[count:], strict=True))
            keys = [*((k, -1) for k in range(len(shards))), *values.slots]
            for (position, number), array in zip(keys, arrays[:count], strict=True):
                shard = shards[position] if position >= 0 else None
                if number == -1 and shard is not None and position in values.digests:
                    self.digests[shard.variable] = self.digests.get(shard.variable, 0) + array
                    continue
                key = (position if shard is None else shard.variable, number)
                pieces.setdefault(key, []).append((shard, array, rows.get(position)))
                if number == -1 and shard is not None and position in rows:
                    self._is_updated(shard.variable)[shard.start + rows[position]] = True
        weights: Sequence[Array | None] = [None] * sum(number == -1 for _, number in pieces)
        others: Sequence[Array | None] = [None] * len(slots)
        if last is not None:
            weights, others = last
        keys = [*((i, -1) for i in range(len(weights))), *slots]
        arrays = [
            self._joined(key, pieces.get(key, ()), value)
            for key, value in zip(keys, [*weights, *others], strict=True)
        ]
        return arrays[: len(weights)], arrays[len(weights) :]

    def write(self, step: int, variables: Mapping[int, Array], slots: Mapping[Slot, Array]) -> None:
        """Replace values of variables and slots, after a number of steps."""
        for channel, shards in zip(self._channels, self._shards, strict=True):
            written = [(k, shard) for k, shard in enumerate(shards) if shard.variable in variables]
            arrays = [shard.part_of(variables[shard.variable]) for _, shard in written]
            keys: list[Slot] = []
            for (variable, number), value in slots.items():
                if variable < 0:
                    keys.append((variable, number))
                    arrays.append(value)
                for k, shard in enumerate(shards):
                    if shard.variable == variable:
                        keys.append((k, number))
                        arrays.append(shard.part_of(value))
            channel.ask(Write(step, tuple(k for k, _ in written), tuple(keys)), arrays)

    @property
    def channels(self) -> Sequence[AsksServer]:
        """The connections."""
        return self._channels

    def silent(self, within: float) -> list[str]:
        """Return the names of the servers that are silent; see `AskingChannel.is_silent`."""
        names = [channel.silent(within) for channel in self._channels]
        # The standby of a lost server is another server.
        return [*dict.fromkeys(filter(None, names))]

    def end_call(self) -> None:
        """End the call on all servers."""
        for channel in self._channels:
            channel.ask(EndCall())

    @property
    def updated_rows(self) -> dict[int, Array]:
        """The distinct rows of tables that all reads have returned, in order, by their variables."""
        return {variable: np.nonzero(updated)[0] for variable, updated in self._updated.items()}

    def lends(self, array: Array) -> bool:
        """Whether an array is a table, or its slot, that the last read returned; see `ReadTable`."""
        return any(table.lends(array) for table in self._tables.values())

    def _is_updated(self, variable: int) -> Array:
        """Return for each row of a table whether a read has returned it; the array can be changed."""
        if variable not in self._updated:
            stops = [
                shard.stop for of_server in self._shards for shard in of_server if shard.variable == variable
            ]
            self._updated[variable] = np.zeros(max(stops), bool)
        return self._updated[variable]

    def _joined(
        self, key: Slot, pieces: Sequence[tuple[Shard | None, Array, Array | None]], last: Array | None
    ) -> Array:
        """Return a variable or slot, given its pieces or its changed rows, and its last value."""
        if not pieces:
            assert last is not None
            return last
        changes = [
            (shard.start + rows, array)
            for shard, array, rows in pieces
            if shard is not None and rows is not None
        ]
        if not changes:
            return _whole([(shard, array) for shard, array, _ in pieces])
        assert last is not None
        assert len(changes) == len(pieces)
        return self._tables.setdefault(key, ReadTable()).changed(last, changes)

    def _ask_all(self, question: Read) -> list[tuple[Any, list[Array]]]:
        for channel in self._channels:
            channel.send(question)
        return [channel.receive() for channel in self._channels]


class _Memory:
    """Memory for an array, which is lent to others.

    Args:
        like: an array of the same size.
    """

    def __init__(self, like: Array) -> None:
        self._shape, self._dtype = like.shape, like.dtype
        # A view refers to the array that has the memory. An array of ctypes is not one of NumPy, so views
        # refer to the lent array, which is alive as long as they are.
        self._buffer: Any = (ctypes.c_char * like.nbytes).from_buffer(allocate(like.nbytes).data)
        self._lent: weakref.ref[Array] | None = None

    def lend(self) -> Array:
        """Return the array."""
        array: Array = np.ndarray(self._shape, self._dtype, self._buffer)
        self._lent = weakref.ref(array)
        return array

    def has_lent(self, array: Array) -> bool:
        """Whether an array is the one that was lent last."""
        return self._lent is not None and self._lent() is array

    @property
    def is_free(self) -> bool:
        """Whether the array that was lent is no longer in use."""
        return self._lent is None or self._lent() is None


class ReadTable:
    """A table, or its slot, as one read after another returns it.

    A new array of many rows takes long, because its memory is new. So it has the memory of the last array but
    one, and replaces only the rows that have changed since then, unless that array is still in use: the
    variables of TensorFlow have the memory of arrays that are assigned to them.
    """

    def __init__(self) -> None:
        self._last: _Memory | None = None
        self._spare: _Memory | None = None
        self._behind: Array = NO_ROWS

    def lends(self, array: Array) -> bool:
        """Whether an array is the last one."""
        return self._last is not None and self._last.has_lent(array)

    def changed(self, last: Array, changes: Sequence[tuple[Array, Array]]) -> Array:
        """Return the array with some rows replaced.

        Args:
            last: the array before.
            changes: numbers of rows, and these rows.
        """
        if not self.lends(last):
            # The array has been replaced by other code.
            self._last = self._spare = None
        memory = self._spare
        if memory is None or not memory.is_free:
            memory = _Memory(last)
            array = memory.lend()
            array[...] = last
        else:
            array = memory.lend()
            put_rows(array, self._behind, take_rows(last, self._behind))
        for numbers, rows in changes:
            put_rows(array, numbers, rows)
        self._spare, self._last = self._last, memory
        self._behind = np.concatenate([numbers for numbers, _ in changes])
        return array


class ServedState:
    """The variables and slots that the servers have, as the chief last read or wrote them.

    Attributes:
        slots: the slot for each variable of the optimizers.
        weights: the values of the variables.
        values: the values of the slots.
    """

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.weights: list[Array] = []
        self.values: list[Array] = []

    def read(self, servers: Servers, step: int) -> None:
        """Read the values, after a number of steps."""
        self.weights, self.values = servers.read(step, self.slots, (self.weights, self.values))

    def write_changes(
        self, servers: Servers, step: int, weights: list[Array], values: list[Array]
    ) -> tuple[list[int], list[Slot]]:
        """Write the values that have changed, after a number of steps, and return which have changed.

        Args:
            servers: the servers.
            step: the number of steps.
            weights: the present values of the variables, which may be their memory: changed values are
                copied.
            values: the same of the slots.
        """
        weights, changed = _updated(self.weights, weights, servers.lends)
        values, numbers = _updated(self.values, values, servers.lends)
        slots = {self.slots[i]: values[i] for i in numbers}
        if changed or slots:
            servers.write(step, {i: weights[i] for i in changed}, slots)
        self.weights, self.values = weights, values
        return changed, list(slots)


def same_bits(left: Array, right: Array) -> bool:
    """Whether two arrays have the same shape and bits."""
    if left is right:
        return True
    if (
        left.flags.c_contiguous
        and right.flags.c_contiguous
        and (left.shape, left.dtype, left.ctypes.data) == (right.shape, right.dtype, right.ctypes.data)
    ):
        # Both have the same memory.
        return True
    first, second = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (left, right))
    if left.shape != right.shape or first.size != second.size:
        return False
    words = first.size // 8 * 8
    parts = [slice(start, min(start + _COMPARED, words)) for start in range(0, words, _COMPARED)]
    return np.array_equal(first[words:], second[words:]) and all(
        np.array_equal(first[part].view(np.uint64), second[part].view(np.uint64)) for part in parts
    )


def _updated(
    before: Sequence[Array], now: Sequence[Array], lends: Callable[[Array], bool]
) -> tuple[list[Array], list[int]]:
    """Return arrays with the present values, and the positions of those that have changed.

    Unchanged arrays are not copied, unless they are the memory of a variable: JAX may use an array in place.
    Arrays that the servers have lent are not changed in place; see `ServedProgram.put`.
    """
    arrays, changed = list[Array](), list[int]()
    for position, (old, new) in enumerate(zip(before, now, strict=True)):
        same = same_bits(old, new)
        kept = same and (lends(old) or not np.may_share_memory(old, new))
        arrays.append(old if kept else np.array(new))
        if not same:
            changed.append(position)
    return arrays, changed


def _whole(pieces: Sequence[tuple[Shard | None, Array]]) -> Array:
    """Return a variable or slot, given its pieces."""
    ordered = sorted(pieces, key=lambda piece: 0 if piece[0] is None else piece[0].start)
    arrays = [array for _, array in ordered]
    divided = len(arrays) > 1 and ordered[0][0] is not None and arrays[0].ndim > 0
    return np.concatenate(arrays) if divided else arrays[0]


def _rows_in(shard: Shard, rows: Array) -> Array:
    """Return the numbers, in a shard, of those rows that the shard has."""
    first, last = np.searchsorted(rows, (shard.start, shard.stop))
    return rows[first:last] - shard.start


def _part_of(array: Array, shard: Shard, rows: Array) -> Array:
    """Return a shard's part of an array that has some rows of the variable."""
    first, last = np.searchsorted(rows, (shard.start, shard.stop))
    return array[first:last]
