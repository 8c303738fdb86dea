"""Embedding tables whose rows are on the parameter servers only.

No process has a whole table, even between the calls of `fit`. Each server creates and keeps a range of rows,
and so does its standby, which makes the same changes. In `fit`, workers read rows as they do with any table.
Outside of it, a thread of each server answers reads of rows. A digest of all rows is a variable of the layer,
so a comparison of the states of models also compares the tables.

**Objects.** `ServerTables` is the part of a process in all tables of the job. `ServerTable` is one table in
one process. It belongs to a layer, and numbers identify it in messages: every script builds the layers in the
same order. `TableRows` has the rows of one server, both in that server and in its standby.

**Where the rows are.** At first, the holders of a server's rows are the server and its standby, which is the
next server, if possible on another host. At the beginning of each call, all processes announce whose rows
they have (`ServerTables.meet`). All processes derive from that the holders (`_note_holders`), the processes
that have the shards in the call (`places`), and the new standbys, which copy the rows (`_add_standbys`). It
is not enough to know which processes are alive: a server that took over shards without having their rows
would begin with initial values. If some rows are on no process, the job ends with a message.

**Who may read when.** Rows have one value at a time, so a reader must know that nothing changes them:

* While steps or functions may be in progress, nobody reads on the chief. `closed` says why.
* Otherwise, within `fit` and between functions, the chief reads in turn with the other messages of the call,
  over `within`.
* Once functions are scheduled, no other process reads, unless all processes evaluate together (`_together`).
* At all other times, any process reads over `_servers`. A thread of the server answers at once.

A process may be ahead of another one in its script. It may ask for a table that the server's script has not
built yet, or whose weights it has not loaded yet. So a question has the number of the table and the number of
loads, and the thread waits until the server's script has reached this point (`_put`). If the server's script
is further ahead, the rows are not those that the process asks for: the answer is empty, and the process
raises an error.

**Lookups in graphs.** A graph of TensorFlow outlives the function in which it was traced, so it asks for the
running function (`running_function`). In a replay in one process, several functions are suspended at the same
time; the code that continues one calls `look_up_for`.
"""

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from lockstep.errors import (
    DisagreementError,
    LockstepError,
    ModelError,
    PeerLostError,
)
from lockstep.keras.parameter_server.mesh import mesh_of_job
from lockstep.keras.parameter_server.servers import AsksServer
from lockstep.keras.parameter_server.table_rows import VALUES, TableRows, positions_of, ranges_of
from lockstep.parameter_server.tasks import ServerPlace
from lockstep.protocol.parameter_server import (
    Answer,
    Applied,
    CopiedRows,
    CopyRows,
    ReadRows,
    ServedValues,
    WriteRows,
)
from lockstep.system.notes import note
from lockstep.transport.array_channel import QuestionArrival
from lockstep.worker.job import Job

Array = npt.NDArray[Any]
AnswerRows = Callable[[ReadRows | WriteRows, Sequence[Array]], tuple[Answer, Sequence[Array]]]

NO_ROWS_ON_JAX = (
    "of whose rows jax.grad returns no gradient: train it in fit, run the job on TensorFlow or PyTorch, or "
    "use keras.layers.Embedding, whose whole table each function reads"
)
"""Why functions on JAX train no tables that only servers have, and what to do."""

_COPIED_AT_ONCE = 1 << 16
"""Number of rows that a new standby copies at a time."""

_Announced = tuple[list[int], list[dict[int, bytes]], list[tuple[int, int]]]
"""The announcement of a process in `ServerTables.meet`: the servers whose rows it has, the digests of these
rows for each table, and the numbers of the tables with their loads."""


class LooksUp(Protocol):
    """A scheduled function that runs in this process."""

    def note_lookup(self, variable: Any) -> None:
        """Note that the function, or the graph that it traces, looks up rows.

        Args:
            variable: the variable that represents the table.
        """

    def look_up(self, table: "ServerTable", ids: Array) -> Array:
        """Return the rows of ids; see `ServerTable.look_up`."""


class ServerTable:
    """A table, in one process.

    Args:
        tables: the tables of the job.
        name: the path of its layer.
        shape: number of rows, and of columns.
        dtype: the dtype of the rows.
        create: returns the initial values of a range of rows, given its first row and the row after its last.
        standbys: whether the standby of each server has its rows, too.

    Attributes:
        number: the number of the table, in the order in which the script builds them.
        name: the path of its layer.
        rows: the number of rows.
        width: the number of columns.
        dtype: the dtype of the rows.
        ranges: the first row of each server, and the row after its last one.
        loads: the number of times that the script has loaded weights.
        digest_variable: the variable of the layer that has the digest of all rows.
        standbys: whether the standby of each server has its rows, too.
    """

    digest_variable: Any

    def __init__(
        self,
        tables: "ServerTables",
        name: str,
        shape: tuple[int, int],
        dtype: Any,
        create: Callable[[int, int], Array],
        standbys: bool,
    ) -> None:
        self._tables, self._create, self.standbys = tables, create, standbys
        self._rows: dict[int, TableRows] = {}
        self.number = tables.add(self)
        self.name, (self.rows, self.width), self.dtype = name, shape, np.dtype(dtype)
        self.ranges = ranges_of(self.rows, tables.servers)
        self.loads = 0

    def copy_rows(self, server: int, ask: Callable[[CopyRows, Array], tuple[Any, list[Array]]]) -> None:
        """Copy the rows of a server, by asking a process that has them."""
        if not self.standbys or server >= len(self.ranges):
            return
        start, stop = self.ranges[server]
        rows = TableRows(start, np.zeros((stop - start, self.width), self.dtype))
        for first in range(start, stop, _COPIED_AT_ONCE):
            numbers = np.arange(first, min(first + _COPIED_AT_ONCE, stop))
            answer, arrays = ask(CopyRows(self.number, self.loads), numbers)
            if not isinstance(answer, CopiedRows):
                # The script has dropped the layer.
                return
            rows.paste(numbers, answer, arrays, self._tables.optimizers)
        self._rows[server] = rows

    def rows_of(self, server: int) -> TableRows | None:
        """Return the rows of a server, or None if this process does not have them, or if there are none.

        Rows are created when they are first needed, because a layer may be built while a backend traces a
        function.
        """
        available = self._tables.held_servers if self.standbys else self._tables.own_servers
        if server not in available or server >= len(self.ranges):
            return None
        if server not in self._rows:
            start, stop = self.ranges[server]
            self._rows.setdefault(server, TableRows(start, self._create(start, stop)))
        return self._rows[server]

    @property
    def held_rows(self) -> dict[int, TableRows]:
        """All rows that this process has, by their servers."""
        rows_by_server = {server: self.rows_of(server) for server in self._tables.held_servers}
        return {server: rows for server, rows in rows_by_server.items() if rows is not None}

    def look_up(self, ids: Array) -> Array:
        """Return the rows of ids of any shape; negative ones count from the end.

        Raises:
            DataError: an id is outside of the table.
            PeerLostError: a server has ended.
        """
        try:
            return self.arranged(ids, self.read)
        except LockstepError as error:
            self._tables.failure = error
            raise

    def look_up_in_function(self, ids: Array) -> Array:
        """Return the rows of ids in the running scheduled function. Graphs call this.

        Raises:
            ModelError: no scheduled function runs.
        """
        return _running(self.name).look_up(self, ids)

    def note_lookup(self, variable: Any) -> None:
        """Note that a scheduled function looks up rows.

        Args:
            variable: the variable that represents the table.
        """
        _running(self.name).note_lookup(variable)

    def arranged(self, ids: Array, read: Callable[[Array], Array]) -> Array:
        """Return the rows of ids; `read` returns distinct rows by their numbers, in ascending order."""
        numbers, inverse = np.unique(positions_of(self.name, self.rows, ids).ravel(), return_inverse=True)
        return np.take(read(numbers), inverse.reshape(-1), axis=0).reshape(*ids.shape, self.width)

    def read(self, numbers: Array, slot: int = VALUES) -> Array:
        """Return rows, or their slots, by their numbers, in ascending order."""
        return self._tables.read(self, numbers, slot)

    def load(self, blocks: Iterable[tuple[int, Array, Callable[[], Array]]]) -> None:
        """Replace rows and their slots.

        In `fit`, the chief replaces the rows of all servers. Otherwise all processes call this, and a server
        replaces the rows that it has.

        Args:
            blocks: for each block the number of a slot or `VALUES`, the numbers of the rows, and a function
                that reads them.

        Raises:
            ModelError: functions are scheduled; or in `fit`, the optimizer has no such slot.
        """
        self._tables.refuse_load(self)
        readable_slots = (VALUES, *self.slots()) if self._tables.is_within else None
        for slot, numbers, read in blocks:
            if readable_slots is not None and slot not in readable_slots:
                raise ModelError(
                    f"the saved weights of layer {self.name!r} have variables of another optimizer than that "
                    "of this fit: load them before fit"
                )
            self._tables.write(self, slot, numbers, read)
        if not self._tables.is_within:
            for rows in self.held_rows.values():
                rows.note_load()
            self._tables.note_load(self)

    def slots(self) -> tuple[int, ...]:
        """Return the numbers of the slots that the servers have."""
        return self._tables.slots(self)


class ServerTables:
    """The tables of a job, in one process.

    Args:
        job: the job of the process.

    Attributes:
        servers: the number of servers.
        own_servers: the servers that this process is: one, if it is a server; all, if it has all tasks.
        held_servers: the servers whose rows this process has: its own, and then those whose standby it is.
        optimizers: the optimizers that have trained tables, with their numbers, equal on all servers.
        within: the connections to the servers in the present call of `fit` or in functions, on the chief;
            None elsewhere.
        closed: why rows cannot be read now; empty if they can.
        failure: the error of a lookup.
        scheduling: whether functions are scheduled, which may run at any time.
    """

    def __init__(self, job: Job) -> None:
        self._job, self._tasks = job, job.context.tasks
        # A table lasts as long as its layer.
        self._tables_by_number: weakref.WeakValueDictionary[int, ServerTable] = weakref.WeakValueDictionary()
        self._count = 0
        self._lock = threading.Lock()
        self._progress = threading.Condition()
        self._mesh = mesh_of_job(job)
        self._mesh.answer_rows = self._put
        self._servers: Sequence[AsksServer] | None = None
        self.within: Sequence[AsksServer] | None = None
        self._holders: list[list[int]] = []
        self.closed = ""
        self.scheduling = False
        self._together = False
        self.failure: LockstepError | None = None
        self.optimizers = weakref.WeakKeyDictionary[Any, int]()
        self._trained_by = 0
        task, index = self._tasks.of(job.process)
        self.servers = self._tasks.servers
        self.own_servers: tuple[int, ...] = ()
        self.held_servers: tuple[int, ...] = ()
        if job.settings.in_one_process:
            self.own_servers = self.held_servers = tuple(range(self.servers))
        # A worker that joins has no task before it replaces a lost one.
        elif task == "ps" and not job.joins:
            self.own_servers = (index,)
            self.held_servers = index, *self._standby_of(job, index)
        # Other processes may read rows, for example to save a model, until their scripts end.
        job.at_completion(
            lambda: job.exchange(lambda _, communicator: communicator.barrier(what="the end of the script"))
        )

    def add(self, table: ServerTable) -> int:
        """Add a table, and return its number."""
        with self._progress:
            self._count += 1
            self._tables_by_number[self._count] = table
            self._progress.notify_all()
        return self._count

    def note_load(self, table: ServerTable) -> None:
        """Note that a table has loaded weights."""
        with self._progress:
            table.loads += 1
            self._progress.notify_all()

    def note_optimizer(self, optimizer: Any) -> None:
        """Note that an optimizer is about to train tables. All servers call this."""
        if optimizer not in self.optimizers:
            self.optimizers[optimizer] = self._trained_by
            self._trained_by += 1

    def meet(self, tables: Sequence[ServerTable], label: str) -> list[Array]:
        """Compare tables with the other processes, which all call this, and return their digests.

        Args:
            tables: the tables of a model.
            label: names the call.

        Raises:
            PeerLostError: a server has ended.
            DisagreementError: only some processes have loaded weights, or a standby's rows differ from its
                server's.
            ModelError: only some of the tables have standbys.
        """
        standbys = tables[0].standbys
        if any(table.standbys != standbys for table in tables):
            raise ModelError(
                f"{label}: only some ServerEmbedding layers of the model have standbys: give all of them the "
                "same argument standbys"
            )
        digests = [{k: rows.digest().tobytes() for k, rows in table.held_rows.items()} for table in tables]
        numbers_and_loads = [(table.number, table.loads) for table in tables]
        announcement = msgspec.msgpack.encode((self.held_servers, digests, numbers_and_loads))
        hosts, gathered = self._mesh.meet(f"the tables of {label}", announcement)
        announcements = {
            process: msgspec.msgpack.decode(data, type=_Announced) for process, data in gathered.items()
        }
        for position, table in enumerate(tables):
            if len({numbers[position][0] for *_, numbers in announcements.values()}) > 1:
                raise DisagreementError(
                    f"{label}: some processes have built more ServerEmbedding layers before layer "
                    f"{table.name!r} than others: build and load models in all processes"
                )
            loads = {numbers[position][1]: process for process, (*_, numbers) in announcements.items()}
            if len(loads) > 1:
                least, most = (self._tasks.name(loads[count]) for count in (min(loads), max(loads)))
                raise DisagreementError(
                    f"{label}: {most} has loaded the weights of layer {table.name!r} more often than "
                    f"{least}: load them in all processes"
                )
        before = self._holders
        if not self._job.settings.in_one_process:
            self._note_holders(
                {process: servers for process, (servers, *_) in announcements.items()}, standbys, label
            )
        if self._servers is None or self._holders != before:
            self._servers = self._mesh.servers(self._holders)
        # Scheduled functions update only the rows of the standbys that were there when they began.
        completes = standbys and self._job.settings.order is None and not self.scheduling
        if completes and self._add_standbys(hosts):
            self._servers = self._mesh.servers(self._holders)
        return [
            self._digest(table, [digests[k] for _, digests, _ in announcements.values()], label)
            for k, table in enumerate(tables)
        ]

    def places(self, left: Collection[int], label: str) -> tuple[ServerPlace, ...]:
        """Return the processes that have the shards of each server in a call: those with its tables' rows.

        Args:
            left: the ids of the processes that are still alive since `meet`.
            label: names the call.

        Raises:
            PeerLostError: rows are lost.
        """
        places = []
        for server, holders in enumerate(self._holders):
            process, standby, *_ = *(process for process in holders if process in left), None, None
            if process is None:
                raise self._lost(server, label)
            places.append(ServerPlace(process, standby))
        return tuple(places)

    def _add_standbys(self, hosts: Sequence[Collection[int]]) -> bool:
        """Replace lost standbys with new ones, and return whether there are any.

        Args:
            hosts: the ids of the processes of each host.
        """
        new = False
        for server, server_place in enumerate(self._tasks.places(hosts, self._holders)):
            if server_place.standby is None or server_place.standby in self._holders[server]:
                continue
            if server_place.standby == self._job.process:
                self._copy(server, server_place.process)
            self._holders[server] = [*self._holders[server], server_place.standby]
            new = True
        return new

    def _copy(self, server: int, process: int) -> None:
        """Copy the rows of a server from another process: this process is the new standby."""
        note(
            f"{self._tasks.name(process)} has the rows of parameter server {server}; this process, the new "
            "standby, copies them"
        )
        assert self._servers is not None
        channel = self._servers[server]
        for table in list(self._tables_by_number.values()):
            table.copy_rows(server, lambda message, numbers: channel.ask(message, [numbers]))
        self.held_servers = *self.held_servers, server

    @property
    def is_within(self) -> bool:
        """Whether this process is the chief in a call of `fit`, or in functions."""
        return self.within is not None

    def read(self, table: ServerTable, numbers: Array, slot: int) -> Array:
        """Return rows; see `ServerTable.read`."""
        if self.closed:
            raise ModelError(
                f"the rows of layer {table.name!r} cannot be read now, because servers may change them: "
                f"{self.closed}"
            )
        if self.scheduling and not self._together and self._job.process:
            raise ModelError(
                f"the rows of layer {table.name!r} cannot be read now, because the chief may have scheduled "
                "further functions, which change them: read them on the chief only, or evaluate or predict"
            )
        needed = []
        with self._lock:
            servers, in_turn = self._connections(table)
            for server, (start, stop) in enumerate(table.ranges):
                first, last = np.searchsorted(numbers, (start, stop))
                if last > first:
                    needed.append((server, numbers[first:last]))
            parts = []
            for server, part_numbers in needed:
                if (rows := table.rows_of(server)) is not None:
                    parts.append(rows.read(slot, part_numbers))
                else:
                    question = ReadRows(table.number, slot, table.loads, in_turn)
                    (answer,) = servers[server].ask(question, [part_numbers])[1]
                    if len(answer) != len(part_numbers) and not table.standbys:
                        raise self._lost(server, f"a read of layer {table.name!r}")
                    if len(answer) != len(part_numbers):
                        raise DisagreementError(
                            f"parameter server {server} no longer has the rows of layer {table.name!r} that "
                            "this process reads: build, load and call models in all processes"
                        )
                    parts.append(answer)
        return np.concatenate(parts) if parts else np.zeros((0, table.width), table.dtype)

    def write(self, table: ServerTable, slot: int, numbers: Array, read: Callable[[], Array]) -> None:
        """Replace rows; see `ServerTable.load`."""
        for server, (start, stop) in enumerate(table.ranges):
            first, last = np.searchsorted(numbers, (start, stop))
            if last > first and (rows := table.rows_of(server)) is not None:
                rows.write(slot, numbers[first:last], read()[first:last])
            elif last > first and self.within is not None:
                message = WriteRows(table.number, slot)
                self.within[server].ask(message, [numbers[first:last], read()[first:last]])

    def refuse_load(self, table: ServerTable) -> None:
        """Raise ModelError if functions may read rows while weights are loaded."""
        if self.scheduling:
            raise ModelError(
                f"weights of layer {table.name!r} are loaded while functions are scheduled: load them before "
                "the first schedule, or after fit, which ends them"
            )

    def slots(self, table: ServerTable) -> tuple[int, ...]:
        """Return the numbers of the slots of a table."""
        if (rows := table.rows_of(0)) is not None:
            return rows.slots
        with self._lock:
            servers, in_turn = self._connections(table)
            question = ReadRows(table.number, VALUES, table.loads, in_turn)
            values, _ = servers[0].ask(question, [np.zeros(0, np.int64)])
        return tuple(nth for _, nth in values.slots)

    def answers_of(self, server: int) -> AnswerRows:
        """Return a function that answers questions about the rows of a server."""
        return partial(self.answer, server)

    def answer(
        self, server: int, message: ReadRows | WriteRows | CopyRows, arrays: Sequence[Array]
    ) -> tuple[Answer, Sequence[Array]]:
        """Read or write rows of a server, and return the answer."""
        table = self._tables_by_number.get(message.table)
        rows = None if table is None else table.rows_of(server)
        if rows is None:
            return ServedValues(), [np.zeros(0)]
        if isinstance(message, WriteRows):
            rows.write(message.slot, *arrays)
            return Applied(), []
        if isinstance(message, CopyRows):
            return rows.copied(arrays[0], self.optimizers)
        slots = tuple((message.table, nth) for nth in rows.slots)
        return ServedValues(slots), [rows.read(message.slot, *arrays)]

    def _put(self, arrival: QuestionArrival) -> None:
        message: Any = arrival.message

        def has_arrived() -> bool:
            table = self._tables_by_number.get(message.table)
            return message.table <= self._count and (table is None or table.loads >= message.loads)

        with self._progress:
            # The script of this process may be behind that of the process that asks.
            self._progress.wait_for(has_arrived, self._job.policy.timeout)
            table = self._tables_by_number.get(message.table)
            is_same = table is not None and table.loads == message.loads
        if is_same:
            arrival.answer(*self.answer(arrival.server, message, arrival.arrays))
        else:
            arrival.answer(ServedValues(), [np.zeros(0)])

    def _standby_of(self, job: Job, index: int) -> list[int]:
        """Return the servers whose standby a server is at the beginning of the job."""
        if job.settings.order is not None:
            # A replay does not lose servers.
            return []
        process = self._tasks.id_of_server(index)
        places = self._tasks.places(job.view.hosts)
        return [
            server
            for server, server_place in enumerate(places)
            if process in server_place and server != index
        ]

    def _note_holders(self, servers_of: Mapping[int, Collection[int]], standbys: bool, label: str) -> None:
        """Note which processes have the rows of each server: its own process first, if it is left.

        Args:
            servers_of: the servers whose rows each process has.
            standbys: whether the tables have standbys. Otherwise only the servers themselves have rows.
            label: names the call.

        Raises:
            PeerLostError: rows are lost.
        """
        self._holders = []
        for server in range(self.servers):
            circle = [self._tasks.id_of_server((server + k) % self.servers) for k in range(self.servers)]
            candidates = circle if standbys else circle[:1]
            # More than two processes have them only if servers were lost while others created tables.
            holders = [process for process in candidates if server in servers_of.get(process, ())][:2]
            if not holders:
                raise self._lost(server, label)
            self._holders.append(holders)
            if standbys and server in self.held_servers and self._job.process not in holders:
                self.held_servers = tuple(other for other in self.held_servers if other != server)

    def _digest(self, table: ServerTable, digest_maps: Sequence[Mapping[int, bytes]], label: str) -> Array:
        """Return the digest of a table, given the digests of its servers' rows in each process."""
        total = np.zeros(2, np.uint64)
        for server in range(len(table.ranges)):
            of_server = {digests[server] for digests in digest_maps if server in digests}
            if len(of_server) > 1:
                raise DisagreementError(
                    f"{label}: parameter server {server} and its standby have different rows of layer "
                    f"{table.name!r}: build and load models with the same seeds and files in all processes"
                )
            total += np.frombuffer(of_server.pop(), np.uint64)
        return total

    def _lost(self, server: int, label: str) -> PeerLostError:
        return PeerLostError(
            f"{label}: parameter server {server} has ended, and no other process has its rows of embedding "
            "tables: start the job again from saved weights"
        )

    def _connections(self, table: ServerTable) -> tuple[Sequence[AsksServer], bool]:
        """Return connections to the servers, and whether they answer in turn with the questions of a call."""
        # When all processes evaluate between functions, the servers also evaluate, and do not serve.
        if self.within is not None and not (self.scheduling and self._together):
            return self.within, True
        if self._servers is None:
            raise ModelError(
                f"the rows of layer {table.name!r} are on the parameter servers, to which this process "
                "connects in the first fit, evaluate or predict: call one of these first"
            )
        return self._servers, False


@contextmanager
def rows_read_together(job: Job) -> Iterator[None]:
    """Within the block, all processes can read rows: the chief leaves it after the others have read.

    If a backend replaces the error of a lookup with another one, the block raises the lookup's error.
    """
    tables = _of_jobs.get(job)
    if tables is None:
        yield
        return
    before, tables._together, tables.failure = tables._together, True, None
    try:
        yield
    except Exception as error:
        if isinstance(error, LockstepError) or tables.failure is None:
            raise
        raise tables.failure from None
    finally:
        tables._together = before


_function: list[LooksUp] = []
"""The scheduled function that this process runs, if it runs one."""


@contextmanager
def looking_up_for(function: LooksUp) -> Iterator[None]:
    """Within the block, this process runs a scheduled function."""
    before = running_function()
    look_up_for(function)
    try:
        yield
    finally:
        look_up_for(before)


def look_up_for(function: LooksUp | None) -> None:
    """Let lookups be those of a scheduled function from now on, or of none."""
    _function[:] = [] if function is None else [function]


def running_function() -> LooksUp | None:
    """Return the scheduled function that this process runs, or None if it runs none."""
    return _function[0] if _function else None


def _running(name: str) -> LooksUp:
    if not _function:
        raise ModelError(
            f"a graph that was traced in a scheduled function looks up rows of layer {name!r}, a "
            "ServerEmbedding, outside of one: call another tf.function in the script"
        )
    return _function[0]


_of_jobs: weakref.WeakKeyDictionary[Job, ServerTables] = weakref.WeakKeyDictionary()


def tables_of_job(job: Job) -> ServerTables:
    """Return the tables of a job with parameter servers."""
    if job not in _of_jobs:
        _of_jobs[job] = ServerTables(job)
    return _of_jobs[job]


def server_table(variable: Any) -> ServerTable | None:
    """Return the table that a variable represents in a model, or None for other variables."""
    table: ServerTable | None = getattr(variable, _TABLE, None)
    return table


def represent(variable: Any, table: ServerTable) -> None:
    """Let a variable with one row represent a table in a model."""
    setattr(variable, _TABLE, table)
    variable.numpy = lambda: _refuse_reading(table)


_TABLE = "lockstep_table"
"""The attribute of a variable that represents a table."""


def _refuse_reading(table: ServerTable) -> Any:
    raise ModelError(
        f"the weights of layer {table.name!r} are rows on the parameter servers, which no process reads as a "
        "whole: save the model instead of calling get_weights, as EarlyStopping does to restore weights"
    )
