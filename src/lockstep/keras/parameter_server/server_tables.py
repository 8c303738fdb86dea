"""Embedding tables whose rows are on the parameter servers only.

No process has a whole table, also between the calls of `fit`: each server creates and keeps a range of rows,
and so does its standby, which makes the same changes. In `fit`, workers read rows as of any table. Outside of
it, a thread of each server answers reads of rows. A digest of all rows is a variable of the layer, so
whatever compares the states of models compares the tables, too.
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
from lockstep.keras.parameter_server.server_channel import AsksServer
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
from lockstep.transport.array_channel import Asked
from lockstep.worker.job import Job

Array = npt.NDArray[Any]
AnswerRows = Callable[[ReadRows | WriteRows, Sequence[Array]], tuple[Answer, Sequence[Array]]]

NO_ROWS_ON_JAX = (
    "of whose rows jax.grad returns no gradient: train it in fit, run the job on TensorFlow or PyTorch, or "
    "use keras.layers.Embedding, whose whole table each function reads"
)
"""Why functions on JAX train no tables that only servers have, and what to do."""

_BLOCK = 1 << 16
"""Rows that a new standby copies at a time."""

_Told = tuple[list[int], list[dict[int, bytes]], list[tuple[int, int]]]
"""What a process tells the others in `ServerTables.meet`: the servers whose rows it has, the digests of these
rows for each table, and the numbers of the tables with their loads."""


class LooksUp(Protocol):
    """A scheduled function that runs in this process."""

    def note_lookup(self, variable: Any) -> None:
        """Note that the function, or the graph that it traces, looks up rows.

        Args:
            variable: that takes the place of the table.
        """

    def look_up(self, table: "ServerTable", ids: Array) -> Array:
        """Return the rows of ids; see `ServerTable.look_up`."""


class ServerTable:
    """A table, in one process.

    Args:
        tables: of the job.
        name: the path of its layer.
        shape: number of rows, and of columns.
        dtype: of the rows.
        create: returns the initial values of a range of rows, given the first one and the one after the last.
        standbys: whether the standby of each server has its rows, too.

    Attributes:
        number: of the table, in the order in which the script builds them.
        name: likewise.
        rows: their number.
        width: likewise of columns.
        dtype: likewise.
        ranges: the first row of each server, and the row after its last one.
        loads: how often the script has loaded weights.
        digest_variable: of its layer.
        standbys: likewise.
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
        """Copy the rows of a server, given what asks a process that has them."""
        if not self.standbys or server >= len(self.ranges):
            return
        start, stop = self.ranges[server]
        made = TableRows(start, np.zeros((stop - start, self.width), self.dtype))
        for first in range(start, stop, _BLOCK):
            numbers = np.arange(first, min(first + _BLOCK, stop))
            answer, arrays = ask(CopyRows(self.number, self.loads), numbers)
            if not isinstance(answer, CopiedRows):
                # The script has dropped the layer.
                return
            made.paste(numbers, answer, arrays, self._tables.optimizers)
        self._rows[server] = made

    def rows_of(self, server: int) -> TableRows | None:
        """Return the rows of a server, if this process has them, and if there are any.

        It creates them when they are first needed: a layer may be built while a backend traces a function.
        """
        held = self._tables.held if self.standbys else self._tables.own
        if server not in held or server >= len(self.ranges):
            return None
        if server not in self._rows:
            start, stop = self.ranges[server]
            self._rows.setdefault(server, TableRows(start, self._create(start, stop)))
        return self._rows[server]

    @property
    def held(self) -> dict[int, TableRows]:
        """All rows that this process has, by their servers."""
        found = {server: self.rows_of(server) for server in self._tables.held}
        return {server: rows for server, rows in found.items() if rows is not None}

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
        """Return the rows of ids in the scheduled function that runs now: its graph outlives one run.

        Raises:
            ModelError: none runs, so this is a function of another kind.
        """
        return _running(self.name).look_up(self, ids)

    def note_lookup(self, variable: Any) -> None:
        """Note that a scheduled function looks up rows.

        Args:
            variable: that takes the place of the table.
        """
        _running(self.name).note_lookup(variable)

    def arranged(self, ids: Array, read: Callable[[Array], Array]) -> Array:
        """Return the rows of ids, given what reads distinct rows by their numbers, in ascending order."""
        numbers, inverse = np.unique(positions_of(self.name, self.rows, ids).ravel(), return_inverse=True)
        return np.take(read(numbers), inverse.reshape(-1), axis=0).reshape(*ids.shape, self.width)

    def read(self, numbers: Array, slot: int = VALUES) -> Array:
        """Return rows, or their slots, by their numbers, in ascending order."""
        return self._tables.read(self, numbers, slot)

    def load(self, blocks: Iterable[tuple[int, Array, Callable[[], Array]]]) -> None:
        """Replace rows and their slots.

        In `fit`, the chief does it for all servers. Otherwise all processes call this, and a server loads the
        rows that it has.

        Args:
            blocks: for each the number of a slot or `VALUES`, the numbers of the rows, and what reads them.

        Raises:
            ModelError: functions are scheduled; or in `fit`, the optimizer has no such slot.
        """
        self._tables.refuse_load(self)
        known = (VALUES, *self.slots()) if self._tables.is_within else None
        for slot, numbers, read in blocks:
            if known is not None and slot not in known:
                raise ModelError(
                    f"the saved weights of layer {self.name!r} have variables of another optimizer than that "
                    "of this fit: load them before fit"
                )
            self._tables.write(self, slot, numbers, read)
        if not self._tables.is_within:
            for rows in self.held.values():
                rows.note_load()
            self._tables.note_load(self)

    def slots(self) -> tuple[int, ...]:
        """Return the numbers of the slots that the servers have."""
        return self._tables.slots(self)


class ServerTables:
    """The tables of a job, in one process.

    Args:
        job: of the process.

    Attributes:
        servers: the number of servers.
        own: those that this process is: itself, if it is one; all, if it has all tasks.
        held: those whose rows this process has: its own, and then those whose standby it is.
        optimizers: those that have trained tables, with their numbers, which are the same on all servers.
        within: asks the servers in the present call of `fit`, or in functions, on the chief; None elsewhere.
        closed: why rows cannot be read now; empty if they can.
        failure: the error of a lookup.
        scheduling: whether functions are scheduled, which may run at any time.
    """

    def __init__(self, job: Job) -> None:
        assert job.context.tasks is not None
        self._job, self._tasks = job, job.context.tasks
        # A table lasts as long as its layer.
        self._known: weakref.WeakValueDictionary[int, ServerTable] = weakref.WeakValueDictionary()
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
        self.own: tuple[int, ...] = ()
        self.held: tuple[int, ...] = ()
        if job.settings.in_one_process:
            self.own = self.held = tuple(range(self.servers))
        # A worker that joins has no task before it takes the place of a lost one.
        elif task == "ps" and not job.joins:
            self.own = (index,)
            self.held = index, *self._kept_for(job, index)
        # Others may read rows, for example to save a model, until their scripts end.
        job.at_completion(lambda: job.exchange(lambda _, one: one.barrier(what="the end of the script")))

    def add(self, table: ServerTable) -> int:
        """Add a table; return its number."""
        with self._progress:
            self._count += 1
            self._known[self._count] = table
            self._progress.notify_all()
        return self._count

    def note_load(self, table: ServerTable) -> None:
        """Note that a table has loaded weights."""
        with self._progress:
            table.loads += 1
            self._progress.notify_all()

    def note_optimizer(self, optimizer: Any) -> None:
        """Note that an optimizer is about to train tables; all servers call this."""
        if optimizer not in self.optimizers:
            self.optimizers[optimizer] = self._trained_by
            self._trained_by += 1

    def meet(self, tables: Sequence[ServerTable], what: str) -> list[Array]:
        """Compare tables with the other processes, which all call this; return their digests.

        Args:
            tables: of a model.
            what: names the call.

        Raises:
            PeerLostError: a server has ended.
            DisagreementError: only some processes have loaded weights, or a standby has other rows than its
                server.
            ModelError: only some of the tables have standbys.
        """
        standbys = tables[0].standbys
        if any(one.standbys != standbys for one in tables):
            raise ModelError(
                f"{what}: only some ServerEmbedding layers of the model have standbys: give all of them the "
                "same argument standbys"
            )
        digests = [{k: rows.digest().tobytes() for k, rows in one.held.items()} for one in tables]
        told = msgspec.msgpack.encode((self.held, digests, [(one.number, one.loads) for one in tables]))
        hosts, gathered = self._mesh.meet(f"the tables of {what}", told)
        found = {process: msgspec.msgpack.decode(one, type=_Told) for process, one in gathered.items()}
        for position, table in enumerate(tables):
            if len({known[position][0] for *_, known in found.values()}) > 1:
                raise DisagreementError(
                    f"{what}: some processes have built more ServerEmbedding layers before layer "
                    f"{table.name!r} than others: build and load models in all processes"
                )
            loads = {known[position][1]: process for process, (*_, known) in found.items()}
            if len(loads) > 1:
                least, most = (self._tasks.name(loads[one]) for one in (min(loads), max(loads)))
                raise DisagreementError(
                    f"{what}: {most} has loaded the weights of layer {table.name!r} more often than {least}: "
                    "load them in all processes"
                )
        before = self._holders
        if not self._job.settings.in_one_process:
            self._place({process: held for process, (held, *_) in found.items()}, standbys, what)
        if self._servers is None or self._holders != before:
            self._servers = self._mesh.servers(self._holders)
        # Functions that are scheduled update the rows of the standbys that were there at first.
        completes = standbys and self._job.settings.order is None and not self.scheduling
        if completes and self._complete(hosts):
            self._servers = self._mesh.servers(self._holders)
        return [
            self._digest(table, [digests[k] for _, digests, _ in found.values()], what)
            for k, table in enumerate(tables)
        ]

    def places(self, left: Collection[int], what: str) -> tuple[ServerPlace, ...]:
        """Return where the shards of each server are in a call: where the rows of the tables are.

        Args:
            left: the ids of the processes that are left since `meet`.
            what: names the call.

        Raises:
            PeerLostError: rows are lost.
        """
        found = []
        for server, holders in enumerate(self._holders):
            process, standby, *_ = *(one for one in holders if one in left), None, None
            if process is None:
                raise self._lost(server, what)
            found.append(ServerPlace(process, standby))
        return tuple(found)

    def _complete(self, hosts: Sequence[Collection[int]]) -> bool:
        """Give servers new standbys in place of lost ones; return whether there are any.

        Args:
            hosts: the ids of the processes of each host.
        """
        new = False
        for server, place in enumerate(self._tasks.places(hosts, self._holders)):
            if place.standby is None or place.standby in self._holders[server]:
                continue
            if place.standby == self._job.process:
                self._copy(server, place.process)
            self._holders[server] = [*self._holders[server], place.standby]
            new = True
        return new

    def _copy(self, server: int, process: int) -> None:
        """Copy the rows of a server that another process has: this process is the new standby."""
        note(
            f"{self._tasks.name(process)} has the rows of parameter server {server}; this process, the new "
            "standby, copies them"
        )
        assert self._servers is not None
        channel = self._servers[server]
        for table in list(self._known.values()):
            table.copy_rows(server, lambda message, numbers: channel.ask(message, [numbers]))
        self.held = *self.held, server

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
        asked = []
        with self._lock:
            servers, in_turn = self._asks(table)
            for server, (start, stop) in enumerate(table.ranges):
                first, last = np.searchsorted(numbers, (start, stop))
                if last > first:
                    asked.append((server, numbers[first:last]))
            parts = []
            for server, some in asked:
                if (own := table.rows_of(server)) is not None:
                    parts.append(own.read(slot, some))
                else:
                    question = ReadRows(table.number, slot, table.loads, in_turn)
                    (found,) = servers[server].ask(question, [some])[1]
                    if len(found) != len(some) and not table.standbys:
                        raise self._lost(server, f"a read of layer {table.name!r}")
                    if len(found) != len(some):
                        raise DisagreementError(
                            f"parameter server {server} no longer has the rows of layer {table.name!r} that "
                            "this process reads: build, load and call models in all processes"
                        )
                    parts.append(found)
        return np.concatenate(parts) if parts else np.zeros((0, table.width), table.dtype)

    def write(self, table: ServerTable, slot: int, numbers: Array, read: Callable[[], Array]) -> None:
        """Replace rows; see `ServerTable.load`."""
        for server, (start, stop) in enumerate(table.ranges):
            first, last = np.searchsorted(numbers, (start, stop))
            if last > first and (own := table.rows_of(server)) is not None:
                own.write(slot, numbers[first:last], read()[first:last])
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
        if (own := table.rows_of(0)) is not None:
            return own.slots
        with self._lock:
            servers, in_turn = self._asks(table)
            question = ReadRows(table.number, VALUES, table.loads, in_turn)
            values, _ = servers[0].ask(question, [np.zeros(0, np.int64)])
        return tuple(nth for _, nth in values.slots)

    def answers_of(self, server: int) -> AnswerRows:
        """Return what answers questions about the rows of a server."""
        return partial(self.answer, server)

    def answer(
        self, server: int, message: ReadRows | WriteRows | CopyRows, arrays: Sequence[Array]
    ) -> tuple[Answer, Sequence[Array]]:
        """Read or write rows of a server; return the answer."""
        table = self._known.get(message.table)
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

    def _put(self, asked: Asked) -> None:
        message: Any = asked.message

        def has_arrived() -> bool:
            table = self._known.get(message.table)
            return message.table <= self._count and (table is None or table.loads >= message.loads)

        with self._progress:
            # The script of this process may be behind that of the other one.
            self._progress.wait_for(has_arrived, self._job.policy.timeout)
            table = self._known.get(message.table)
            is_same = table is not None and table.loads == message.loads
        if is_same:
            asked.answer(*self.answer(asked.server, message, asked.arrays))
        else:
            asked.answer(ServedValues(), [np.zeros(0)])

    def _kept_for(self, job: Job, index: int) -> list[int]:
        """Return the servers whose standby a server is, as long as the job lasts."""
        if job.settings.order is not None:
            # A replay loses no server.
            return []
        own = self._tasks.id_of_server(index)
        places = self._tasks.places(job.view.hosts)
        return [server for server, place in enumerate(places) if own in place and server != index]

    def _place(self, held: Mapping[int, Collection[int]], standbys: bool, what: str) -> None:
        """Note which processes have the rows of each server: its own first, if it is left.

        Args:
            held: the servers whose rows each process has.
            standbys: whether the tables have standbys: of others, only the servers themselves have rows.
            what: names the call.

        Raises:
            PeerLostError: rows are lost.
        """
        self._holders = []
        for server in range(self.servers):
            circle = [self._tasks.id_of_server((server + k) % self.servers) for k in range(self.servers)]
            some = circle if standbys else circle[:1]
            # More than two have them only if servers were lost while the others created the tables.
            holders = [process for process in some if server in held.get(process, ())][:2]
            if not holders:
                raise self._lost(server, what)
            self._holders.append(holders)
            if standbys and server in self.held and self._job.process not in holders:
                self.held = tuple(one for one in self.held if one != server)

    def _digest(self, table: ServerTable, found: Sequence[Mapping[int, bytes]], what: str) -> Array:
        """Return the digest of a table, given those of its ranges, by servers, that processes have."""
        total = np.zeros(2, np.uint64)
        for server in range(len(table.ranges)):
            digests = {one[server] for one in found if server in one}
            if len(digests) > 1:
                raise DisagreementError(
                    f"{what}: parameter server {server} and its standby have different rows of layer "
                    f"{table.name!r}: build and load models with the same seeds and files in all processes"
                )
            total += np.frombuffer(digests.pop(), np.uint64)
        return total

    def _lost(self, server: int, what: str) -> PeerLostError:
        return PeerLostError(
            f"{what}: parameter server {server} has ended, and no other process has its rows of embedding "
            "tables: start the job again from saved weights"
        )

    def _asks(self, table: ServerTable) -> tuple[Sequence[AsksServer], bool]:
        """Return what asks the servers, and whether they answer in turn with the questions of a call."""
        # The servers are in the same call, and do not serve, when all processes evaluate between functions.
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
    """Within the block, which the chief does not leave before the others have read them, all can read rows.

    The error of a lookup is raised by the block itself, where a backend raises another one instead.
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


class _Process:
    function: LooksUp | None = None


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
    """Let this process run a scheduled function from now on, or none."""
    _Process.function = function


def running_function() -> LooksUp | None:
    """Return the scheduled function that this process runs; None if it runs none."""
    return _Process.function


def _running(name: str) -> LooksUp:
    if _Process.function is None:
        raise ModelError(
            f"a graph that was traced in a scheduled function looks up rows of layer {name!r}, a "
            "ServerEmbedding, outside of one: let the script call another tf.function"
        )
    return _Process.function


_of_jobs: weakref.WeakKeyDictionary[Job, ServerTables] = weakref.WeakKeyDictionary()


def tables_of_job(job: Job) -> ServerTables:
    """Return the tables of a job with parameter servers."""
    if job not in _of_jobs:
        _of_jobs[job] = ServerTables(job)
    return _of_jobs[job]


def server_table(variable: Any) -> ServerTable | None:
    """Return the table whose place a variable takes in a model; None for other variables."""
    table: ServerTable | None = getattr(variable, _TABLE, None)
    return table


def stand_for(variable: Any, table: ServerTable) -> None:
    """Let a variable with one row take the place of a table."""
    setattr(variable, _TABLE, table)
    variable.numpy = lambda: _refuse_reading(table)


_TABLE = "lockstep_table"
"""The attribute of a variable that takes the place of a table."""


def _refuse_reading(table: ServerTable) -> Any:
    raise ModelError(
        f"the weights of layer {table.name!r} are rows on the parameter servers, which no process reads as a "
        "whole: save the model instead of calling get_weights, as EarlyStopping does to restore weights"
    )
