"""The order in which a parameter server, or the chief, processed arrivals. A run writes it, and another run
follows it.

Asynchronous training is a function of these orders. A record has 8 bytes: its kind, a part of a step, the id
of a worker, and a step. A file begins with a mark. Each call of `fit`, or of the functions of a
`ClusterCoordinator`, begins with a record of its number.
"""

import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from lockstep.errors import ConfigError
from lockstep.system.notes import note

Arrival = TypeVar("Arrival")

_MARK = b"lockstep order 1\n"
_RECORD = struct.Struct("<BBHI")
_TOGETHER = 32 << 10
"""Bytes of records that are written at once."""
_NAME = re.compile(r"chief|ps-[0-9]{1,6}")


class RecordKind(IntEnum):
    """The kind of a record; see `Record`."""

    CALL = 0
    PULL = 1
    PUSH = 2
    ASSIGN = 3
    DONE = 4
    READ = 5
    WRITE = 6
    END = 7
    RAISE = 8
    POLL = 9
    TAKEN = 10
    JOINED = 11
    PULL_ROWS = 12


class Record(NamedTuple):
    """One arrival.

    Attributes:
        kind: the kind of the arrival. `CALL` begins a call of `fit`, or the calls of a `ClusterCoordinator`,
            with the number of the call as the step. `END` ends it. At `TAKEN`, another process took over the
            shards of a server. At `JOINED`, another worker replaced a lost one.
        worker: the worker that sent it. For `POLL`, whether `done` returned True.
        step: the step. For `JOINED`, the worker id of the new worker. For `READ`, `WRITE`, `RAISE` and
            `POLL`, the number of completed steps in `fit`, or the number of the call of the
            `ClusterCoordinator`.
        part: the number of times that the function had already applied an optimizer. For `PULL_ROWS`, the
            number of the lookup in the function. Only the lower 8 bits are recorded.
    """

    kind: RecordKind
    worker: int
    step: int
    part: int = 0


class RecordList:
    """Records, stored in the same size as in a file."""

    def __init__(self) -> None:
        self._packed = bytearray()

    def append(self, record: Record) -> None:
        """Add a record."""
        self._packed += _packed(record)

    def __len__(self) -> int:
        return len(self._packed) // _RECORD.size

    def __iter__(self) -> Iterator[Record]:
        return _records(memoryview(self._packed))


class OrderFile:
    """A file with the order of one process. Writing the first records creates it.

    If it cannot be written, training continues, and a note says that the run cannot be repeated.

    Args:
        path: the path of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lost = False

    def write(self, records: bytes) -> None:
        """Append encoded records."""
        if self._lost:
            return
        try:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            with self._path.open("ab") as file:
                size = file.tell()
                # An earlier run in the folder may have ended in the middle of a record.
                whole = size - (size - len(_MARK)) % _RECORD.size if size >= len(_MARK) else 0
                if whole < size:
                    file.truncate(whole)
                file.write(records if whole else _MARK + records)
        except OSError as error:
            self._lost = True
            note(f"{self._path} cannot be written ({error.strerror}): lockstep rerun cannot repeat this run")


class ReceivedOrders:
    """Writes orders that arrive in parts from the processes of a job over hosts.

    Args:
        folder: the folder for the files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, OrderFile] = {}
        self._next: dict[str, int] = {}

    def append(self, name: str, number: int, records: bytes) -> None:
        """Append a part to an order. If a part is missing, the rest of its call is dropped.

        Args:
            name: the name of the order.
            number: the number of the part in its call, from 0.
            records: the encoded records.
        """
        if _NAME.fullmatch(name) is None or number not in (0, self._next.get(name)):
            self._next.pop(name, None)
            return
        self._next[name] = number + 1
        if name not in self._files:
            self._files[name] = OrderFile(self._folder / name)
        self._files[name].write(records)


class OrderWriter:
    """Writes the order of one process.

    Args:
        write: writes encoded records, many at a time; None to write nothing.
    """

    def __init__(self, write: Callable[[bytes], object] | None) -> None:
        self._write = write
        self._records = bytearray()

    def add(self, kind: RecordKind, worker: int, step: int, part: int = 0) -> None:
        """Add a record. It is written when many have accumulated, or by `close`."""
        if self._write is not None:
            self._records += _packed(Record(kind, worker, step, part))
            if len(self._records) >= _TOGETHER:
                self.close()

    def end(self) -> None:
        """Mark the end of a call, because its order is complete."""
        self.add(RecordKind.END, 0, 0)

    def drop(self) -> None:
        """Forget all records that are not written, because another process writes the order from now on."""
        self._records.clear()
        self._write = None

    def close(self) -> None:
        """Write everything."""
        if self._write is not None and self._records:
            records, self._records = bytes(self._records), bytearray()
            self._write(records)


def read_order(path: Path, call: int) -> list[Record]:
    """Read the order of one call of `fit`, or of functions.

    Raises:
        ConfigError: the file is missing, damaged or of another version, or does not have the whole call.
    """
    calls = _read_calls(path)
    if call not in calls:
        raise ConfigError(f"{path} has no order of call {call}")
    if not _is_complete(order := calls[call]):
        raise ConfigError(f"{path} has only the beginning of the order of call {call}: it did not end")
    return _without_repeated(order[:-1])


def incomplete_orders(folder: Path, servers: int, calls: Iterable[int] = ()) -> tuple[int, list[str]]:
    """Return the first call without its whole order, and the names of the orders that lack its end.

    Args:
        folder: the folder of the orders, which may be missing.
        servers: the number of parameter servers, each of which has an order.
        calls: numbers of calls that have an order, besides those in the files.

    Returns:
        0 and no names if all orders are complete.

    Raises:
        ConfigError: a file is damaged or of another version.
    """
    names = ["chief", *(f"ps-{server}" for server in range(servers))]
    orders = {name: _read_calls(folder / name) if (folder / name).exists() else {} for name in names}
    for number in sorted(
        {*calls, *(number for calls_of_order in orders.values() for number in calls_of_order)}
    ):
        if lacking := [name for name in names if not _is_complete(orders[name].get(number, ()))]:
            return number, lacking
    return 0, []


def _read_calls(path: Path) -> dict[int, list[Record]]:
    """Read the orders of the calls of the last run in a file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"the recorded order {path} cannot be read: {error.strerror}") from None
    if not data.startswith(_MARK):
        raise ConfigError(f"{path} is not an order of arrivals that this version of Lockstep can read")
    body = memoryview(data)[len(_MARK) :]
    body = body[: len(body) // _RECORD.size * _RECORD.size]
    calls: dict[int, list[Record]] = {}
    try:
        for number, order in _calls(_records(body)):
            if calls and number < max(calls):
                # The calls so far belong to an earlier run in the folder, which may have made more.
                calls.clear()
            calls[number] = order
    except ValueError as error:
        raise ConfigError(f"the recorded order {path} is damaged: {error}") from None
    return calls


def _is_complete(order: Sequence[Record]) -> bool:
    return bool(order) and order[-1].kind is RecordKind.END


def _packed(record: Record) -> bytes:
    return _RECORD.pack(record.kind, record.part & 0xFF, record.worker, record.step)


def _records(data: memoryview) -> Iterator[Record]:
    for kind, part, worker, step in _RECORD.iter_unpack(data):
        yield Record(RecordKind(kind), worker, step, part)


def _calls(records: Iterator[Record]) -> Iterator[tuple[int, list[Record]]]:
    number, order = 0, list[Record]()
    for record in records:
        if record.kind is RecordKind.CALL:
            if number:
                yield number, order
            number, order = record.step, []
        else:
            order.append(record)
    if number:
        yield number, order


def _without_repeated(order: Sequence[Record]) -> list[Record]:
    """Drop each arrival that a lost server processed without an answer, if it was repeated."""
    last: dict[int, int] = {}
    unanswered: dict[int, int] = {}
    repeated = set()
    for position, record in enumerate(order):
        if record.kind is RecordKind.TAKEN:
            unanswered = dict(last)
            continue
        before = unanswered.pop(record.worker, None)
        if before is not None and order[before] == record:
            repeated.add(before)
        last[record.worker] = position
    return [
        record
        for position, record in enumerate(order)
        if position not in repeated and record.kind is not RecordKind.TAKEN
    ]


class RecordedOrder:
    """The order of arrivals that a process follows."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = records
        self._record_set = frozenset(records)
        self._position = 0

    def has(self, record: Record) -> bool:
        """Whether the recorded process processed this arrival."""
        return record in self._record_set

    def awaited(self) -> Record | None:
        """Return the record whose turn it is, or None after the last one."""
        return self._records[self._position] if self._position < len(self._records) else None

    def next_of(self, worker: int) -> Record | None:
        """Return the next record of a worker, or None after its last one."""
        later = (self._records[i] for i in range(self._position, len(self._records)))
        return next((record for record in later if record.worker == worker), None)

    def advance(self) -> None:
        """Advance to the next record."""
        self._position += 1


class OrderedArrivals(Generic[Arrival]):
    """Puts arrivals in order: in the order of arrival, or in the recorded order of another run.

    Args:
        writer: records this run's order.
        recorded: the order to follow; None for the order of arrival.
    """

    def __init__(self, writer: OrderWriter, recorded: RecordedOrder | None = None) -> None:
        self._writer = writer
        self._recorded = recorded
        self._held: dict[Record, Arrival] = {}

    def expects(self, record: Record) -> bool:
        """Whether the recorded process processed this. Without an order to follow, everything is expected."""
        return self._recorded is None or self._recorded.has(record)

    def arrive(self, record: Record, arrival: Arrival) -> list[Arrival]:
        """Return the arrivals that are due now, in order: this one, and those that have waited for it.

        An arrival that is not in the recorded order is returned at once, and is not recorded.
        """
        if self._recorded is None:
            self._writer.add(*record)
            return [arrival]
        if not self._recorded.has(record):
            return [arrival]
        self._held[record] = arrival
        due: list[Arrival] = []
        while (turn := self._recorded.awaited()) is not None and turn in self._held:
            self._recorded.advance()
            self._writer.add(*turn)
            due.append(self._held.pop(turn))
        return due

    def awaited(self) -> Record | None:
        """Return the record for which arrivals wait, if an order is followed and some wait."""
        return self._recorded.awaited() if self._recorded is not None and self._held else None
