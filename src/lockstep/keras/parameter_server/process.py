"""The common parts of the chief, the workers and the parameter servers in a call."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy.typing as npt

from lockstep.checkpoint.checkpoint_files import Contents
from lockstep.errors import DataError, ModelError, PeerLostError
from lockstep.keras.backends.contract import EQUAL, Backend, ServedProgram
from lockstep.keras.backends.losses import divided
from lockstep.keras.backends.multi_update import Update
from lockstep.keras.input.readings import read_batch
from lockstep.keras.numbered_calls import NumberedCall
from lockstep.keras.parameter_server.dispatcher import ComputedHere, DispatchedCall
from lockstep.keras.parameter_server.embedding_tables import EmbeddingTables
from lockstep.keras.parameter_server.mesh import mesh_of_job
from lockstep.keras.parameter_server.served_optimizers import place_weights
from lockstep.keras.parameter_server.server_embedding import server_layers
from lockstep.keras.parameter_server.server_shards import ServedVariables
from lockstep.keras.parameter_server.server_tables import ServerTables, tables_of_job
from lockstep.keras.parameter_server.servers import Servers
from lockstep.keras.seeds import seed_at
from lockstep.keras.state.snapshots import Part
from lockstep.observability.events import OrderRecorded
from lockstep.parameter_server.order import OrderFile, OrderWriter, RecordedOrder, RecordKind, read_order
from lockstep.parameter_server.partitioners import Partitioner, Shard
from lockstep.parameter_server.tasks import ServerPlace, Tasks, TaskType
from lockstep.system.paths import RunPaths
from lockstep.transport.array_channel import AskingChannel, QuestionArrival
from lockstep.worker.job import Job

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class ServerOptions:
    """The options of a `ParameterServerStrategy`.

    Attributes:
        partitioner: divides variables; None to divide none.
        max_staleness: the largest number of changes of the weights between reading and changing them; None
            for any.
    """

    partitioner: Partitioner | None
    max_staleness: int | None


@dataclass(frozen=True)
class ServedCall:
    """A call of `fit`, in one process.

    Attributes:
        job: the job of the process.
        backend: the backend of Keras.
        call: the call.
        model: the model, built, equal in all processes.
        options: the options of the strategy.
        tables: the tables from which workers read rows.
        trained: number of training steps of the job before the call.
        install: makes Keras's loop call a step.
        take_snapshot: returns the state for a worker that joins; see `Snapshots.take_apart`.
        joins: the chief's `Mesh.peers`, in a worker that joins; None in others.
    """

    job: Job
    backend: Backend
    call: NumberedCall
    model: Any
    options: ServerOptions
    tables: EmbeddingTables
    trained: int
    install: Callable[[Callable[[Any, Any], tuple[Any, Any]]], None]
    take_snapshot: Callable[[bool, dict[str, Part], Sequence[tuple[Any, Any]]], Contents]
    joins: Mapping[str, Any] | None = None

    @property
    def tasks(self) -> Tasks:
        """The tasks of the job's processes."""
        return self.job.context.tasks

    @property
    def task(self) -> TaskType:
        """The type of this process's task."""
        return "worker" if self.joins is not None else self.tasks.of(self.job.process)[0]

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """The places of the trainable variables."""
        return place_weights([self.update], self.tasks.servers, self.options.partitioner)

    @property
    def update(self) -> Update:
        """The optimizer of the model, with the variables that a step updates."""
        return Update(self.model.optimizer, self.model.trainable_variables)


class UsedIterators:
    """The iterators that a `fit` has read. Each process has read them to a different position."""

    def __init__(self) -> None:
        # They are kept, so that no other object gets the same id.
        self._used: dict[int, Any] = {}

    def refuse_again(self, data: Any) -> None:
        """Raise DataError if `data` is an iterator that has been read before."""
        if not hasattr(data, "__next__"):
            return
        if id(data) in self._used:
            raise DataError(
                "this iterator was read by an earlier fit, after which it is at another position in each "
                "process of a job with parameter servers: pass a new iterator, or a dataset"
            )
        self._used[id(data)] = data


class TaskProcess:
    """A process in a call: the processes that take part, and the orders that this one writes and follows.

    Args:
        job: the job of the process.
        call: the call of `fit`, or the calls of a `ClusterCoordinator`.
        order: the name of the order that this process writes; empty for none.

    Attributes:
        tasks: the tasks of the job.
        mesh: the connections of the process.
        live: the processes that compute gradients when the call begins.
        tables: the tables of the job, if the call uses tables that only servers have; else None.
    """

    tables: ServerTables | None = None

    def __init__(self, job: Job, call: NumberedCall, order: str) -> None:
        self.job, self.call, self.tasks = job, call, job.context.tasks
        self.mesh = mesh_of_job(job)
        self.timeout = job.policy.timeout
        self.live: tuple[int, ...] = ()
        self.writer, self.recorded = self.order(order) if order else (OrderWriter(None), None)

    def order(self, name: str) -> tuple[OrderWriter, RecordedOrder | None]:
        """Begin an order of arrivals, and return its writer, and the order to follow in a replay."""
        folder, followed, recorded = self.job.context.folder, self.job.settings.order, None
        writer = OrderWriter(None)
        if folder is not None:
            file = OrderFile(RunPaths(folder).orders / name)
            writer = OrderWriter(self._publisher(name) if self.job.context.over_hosts else file.write)
        writer.add(RecordKind.CALL, 0, self.call.number)
        # This is written at once, so that a killed process also leaves a trace of the call.
        writer.close()
        if followed is not None:
            recorded = RecordedOrder(read_order(RunPaths(followed).orders / name, self.call.number))
        return writer, recorded

    def dispatched(self, max_staleness: int | None, here: ComputedHere | None) -> DispatchedCall:
        """Return the call for the chief's dispatcher.

        Args:
            max_staleness: see `Assignments`.
            here: computes the steps in this process; None if workers compute them.
        """
        return DispatchedCall(
            tasks=self.tasks,
            name=self.call.name,
            max_staleness=max_staleness,
            writer=self.writer,
            recorded=self.recorded,
            timeout=self.timeout,
            drop=self.mesh.drop,
            lost=self.mesh.lost,
            workers=self.mesh.workers,
            replacements=self.job.replacements,
            here=here,
        )

    def meet(self, receive: Callable[[QuestionArrival], object] = QuestionArrival.abandon) -> None:
        """Begin the call, together with the other processes.

        Args:
            receive: receives the questions of other processes in the call; see `Mesh.begin`.

        Raises:
            PeerLostError: the chief has ended, or a server without a standby.
        """
        self.mesh.begin(self.call.number, receive)
        hosts, processes = self.mesh.meet(f"the addresses of {self.call.name}")
        servers = [self.tasks.id_of_server(index) for index in range(self.tasks.servers)]
        left = [server for server in servers if server in processes]
        for process in (0, *([] if left else servers)):
            if process not in processes:
                raise PeerLostError(
                    f"{self.tasks.name(process)} has ended before {self.call.name}; its log says why"
                )
        if self.tables is not None:
            places = self.tables.places(processes, self.call.name)
        else:
            places = self.tasks.places(hosts)
        if self.job.settings.order is not None:
            # A replay does not lose a server, even if the recorded run did. So it does not need standbys.
            places = tuple(ServerPlace(server_place.process, None) for server_place in places)
        self.mesh.places = places
        self.live = tuple(sorted(process for process in processes if process in self.tasks.workers))

    def add_variables(
        self,
        variables: Mapping[int, ServedVariables],
        update: Update,
        shards: Sequence[Shard],
        tables: frozenset[int] = frozenset(),
    ) -> None:
        """Add the variables of another optimizer to those of servers; see `ServedVariables.add`.

        Args:
            variables: the variables of the servers that this process is, or whose standby it is.
            update: the optimizer.
            shards: the shards of all variables on all servers.
            tables: the variables whose rows workers read and update.
        """
        if self.tables is not None:
            self.tables.note_optimizer(update.optimizer)
        for server, served in variables.items():
            served.add(update, [shard for shard in shards if shard.server == server], tables)

    def connect_servers(self, shards: Sequence[Shard]) -> Servers:
        """Connect to all servers, which have these shards."""
        channels = self.mesh.servers(self.mesh.places, self.timeout)
        for channel in channels:
            channel.connect()
        return Servers(channels, shards)

    def connect_chief(self) -> AskingChannel:
        """Connect to the chief without a time limit for answers, because it runs callbacks or the script."""
        chief = self.mesh.channel(0, timeout=self.timeout)
        chief.be_patient()
        return chief

    def close(self) -> None:
        """Leave the call."""
        if self.tables is not None:
            self.tables.within, self.tables.closed = None, ""
        self.mesh.leave(self.call.number)
        self.writer.close()

    def _publisher(self, order: str) -> Callable[[bytes], object]:
        """Return a function that publishes parts of an order: the run folder may be on another host."""
        numbers, events = itertools.count(), self.job.events
        return lambda records: events.publish(OrderRecorded(name=order, number=next(numbers), data=records))

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FitProcess(TaskProcess):
    """A process that computes steps of `fit`: the chief or a worker."""

    def __init__(self, served: ServedCall, order: str) -> None:
        super().__init__(served.job, served.call, order)
        self.served, self.model, self.backend = served, served.model, served.backend
        self.tables = tables_of_job(served.job) if server_layers(served.model) else None

    def program(self) -> ServedProgram:
        """Prepare a step of the model."""
        program: Any = self.backend.program(self.model, "train")
        return program  # type: ignore[no-any-return]

    def computed(self, program: ServedProgram, state: Any, step: int, batch: Any) -> Mapping[str, Array]:
        """Compute the gradients and changes of a step; return them as arrays, by their names in a partial.

        Raises:
            ModelError: parameter servers do not support the step.
        """
        data = read_batch(batch)
        seed = seed_at(self.call.seed, self.call.number, step)
        share = data.share(0, seed)
        partial = program.compute(state, share, ())
        if not program.is_last(0):
            raise ModelError(
                f"the step of model {self.model.name!r} updates weights several times, or uses them after "
                "an update, which parameter servers do not support; use MultiWorkerMirroredStrategy"
            )
        trained = program.trained()
        if [id(variable) for variable in trained] != [
            id(variable) for variable in self.model.trainable_variables
        ]:
            raise ModelError(
                f"the step of model {self.model.name!r} does not update exactly its trainable variables with "
                "self.optimizer, which parameter servers do not support; use MultiWorkerMirroredStrategy"
            )
        for name in partial:
            if name.startswith(EQUAL):
                raise ModelError(
                    f"the step changes the variable {name.split('/', 2)[2]!r}, whose dtype is not "
                    "floating-point; parameter servers add up changes of layers' state, so keep counts in a "
                    "metric or in a float32 variable, or use MultiWorkerMirroredStrategy"
                )
        arrays = {name: self.backend.to_numpy(value) for name, value in partial.items()}
        return divided(self.model, "train", program.parts(0, arrays))
