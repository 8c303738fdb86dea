"""What the chief, the workers and the parameter servers have in common."""

import itertools
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy.typing as npt
import xxhash

from lockstep.data.batch import GlobalBatch, PendingBatch
from lockstep.errors import DataError, ModelError, PeerLostError
from lockstep.keras.backends.common import misfits_explained
from lockstep.keras.backends.contract import Backend, ServedProgram
from lockstep.keras.backends.losses import divided
from lockstep.keras.backends.multi_update import Update
from lockstep.keras.input.readings import whole_batch
from lockstep.keras.numbered_calls import NumberedCall
from lockstep.keras.parameter_server.dispatcher import DispatchedCall
from lockstep.keras.parameter_server.embedding_tables import EmbeddingTables
from lockstep.keras.parameter_server.served_variables import place_weights
from lockstep.keras.parameter_server.servers import Servers
from lockstep.observability.events import OrderRecorded
from lockstep.parameter_server.order import Kind, OrderFile, OrderWriter, RecordedOrder, read_order
from lockstep.parameter_server.partitioners import Partitioner, Shard
from lockstep.parameter_server.tasks import Tasks
from lockstep.system.paths import RunPaths
from lockstep.transport.array_channel import AnsweringEnd, AskingChannel
from lockstep.worker.job import Job

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class ServerOptions:
    """The options of a `ParameterServerStrategy`.

    Attributes:
        partitioner: divides variables; None for none.
        max_staleness: the largest number of changes of the weights between reading and changing them; None
            for any.
    """

    partitioner: Partitioner | None = None
    max_staleness: int | None = None


@dataclass(frozen=True)
class ServedCall:
    """A call of `fit`, in one process.

    Attributes:
        job: of the process.
        backend: of Keras.
        call: the call.
        model: built, equal in all processes.
        options: of the strategy.
        tables: of which workers read rows.
        trained: number of training steps of the job before the call.
        install: makes Keras's loop call a step.
    """

    job: Job
    backend: Backend
    call: NumberedCall
    model: Any
    options: ServerOptions
    tables: EmbeddingTables
    trained: int
    install: Callable[[Callable[[Any, Any], tuple[Any, Any]]], None]

    @property
    def tasks(self) -> Tasks:
        """The tasks of the job's processes."""
        tasks = self.job.context.tasks
        assert tasks is not None
        return tasks

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """Where the trainable variables are."""
        return place_weights([self.update], self.tasks.servers, self.options.partitioner)

    @property
    def update(self) -> Update:
        """What a step updates."""
        return Update(self.model.optimizer, self.model.trainable_variables)


class UsedIterators:
    """The iterators that a `fit` has read, each to another position in each process."""

    def __init__(self) -> None:
        # Kept, so that no other object gets the same id.
        self._used: dict[int, Any] = {}

    def refuse_again(self, data: Any) -> None:
        """Raise DataError if `data` is an iterator that was read before."""
        if not hasattr(data, "__next__"):
            return
        if id(data) in self._used:
            raise DataError(
                "this iterator was read by an earlier fit, after which it is at another position in each "
                "process of a job with parameter servers: pass a new iterator, or a dataset"
            )
        self._used[id(data)] = data


class TaskProcess:
    """What all tasks have in common: their addresses, and the orders that they write and follow.

    Args:
        job: of the process.
        call: the call of `fit`, or the calls of a `ClusterCoordinator`.
        order: the name of the order that this process writes; empty for none.
    """

    def __init__(self, job: Job, call: NumberedCall, order: str) -> None:
        assert job.context.tasks is not None
        self.job, self.call, self.tasks = job, call, job.context.tasks
        self.timeout = job.policy.timeout
        self._asking: list[AskingChannel] = []
        folder, followed = job.context.folder, job.context.order
        self.writer = OrderWriter(None)
        if folder is not None and order:
            file = OrderFile(RunPaths(folder).orders / order)
            self.writer = OrderWriter(self._publisher(order) if job.context.over_hosts else file.write)
        self.recorded: RecordedOrder | None = None
        if order:
            self.writer.add(Kind.CALL, 0, call.number)
            if followed is not None:
                self.recorded = RecordedOrder(read_order(RunPaths(followed).orders / order, call.number))

    def dispatched(self, max_staleness: int | None) -> DispatchedCall:
        """Return the call as the chief hands out its steps."""
        membership = self.job.membership
        return DispatchedCall(
            self.tasks,
            self.call.name,
            max_staleness,
            self.writer,
            self.recorded,
            self.timeout,
            membership.accept,
            membership.lost_workers,
        )

    def addresses(self, end: AnsweringEnd | None = None) -> dict[int, bytes]:
        """Exchange addresses with the other processes; return those of the chief and the servers by process.

        Args:
            end: answers at this process; None if it only asks.

        Raises:
            PeerLostError: one of these has ended.
        """
        own = b""
        if end is not None:
            own = end.address
            if end.entrance:
                self.job.membership.answers_at(end.entrance)
        what = f"the addresses of {self.call.name}"
        known = self.job.exchange(
            lambda view, communicator: dict(
                zip(view.workers, communicator.gather(own, what=what), strict=True)
            )
        )
        for process in (0, *map(self.tasks.id_of_server, range(self.tasks.servers))):
            if process not in known:
                raise PeerLostError(
                    f"{self.tasks.name(process)} has ended before {self.call.name}; its log says why"
                )
        self.live = tuple(process for process in known if process in self.tasks.workers)
        return known

    def connect(self, addresses: Mapping[int, bytes], process: int) -> AskingChannel:
        """Connect to the chief or a server."""
        dial = self.job.membership.dial(process)
        name = self.tasks.name(process)
        made = AskingChannel(addresses[process], self.job.worker, name, self.timeout, dial)
        self._asking.append(made)
        return made

    def connect_servers(self, addresses: Mapping[int, bytes], shards: Sequence[Shard]) -> Servers:
        """Connect to all servers, which have these shards."""
        channels = [self.connect(addresses, self.tasks.id_of_server(i)) for i in range(self.tasks.servers)]
        return Servers(channels, shards)

    def close(self) -> None:
        """Close all connections."""
        for channel in self._asking:
            channel.close()
        self.writer.close()

    def _publisher(self, order: str) -> Callable[[bytes], object]:
        """Return what publishes parts of an order: this host may not be that of the run folder."""
        numbers, events = itertools.count(), self.job.events
        return lambda records: events.publish(OrderRecorded(name=order, number=next(numbers), data=records))

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FitProcess(TaskProcess):
    """What the chief and the workers have in common in a call of `fit`: they compute steps."""

    def __init__(self, served: ServedCall, order: str) -> None:
        super().__init__(served.job, served.call, order)
        self.served, self.model, self.backend = served, served.model, served.backend

    def program(self) -> ServedProgram:
        """Prepare a step of the model."""
        program: Any = self.backend.program(self.model, "train")
        return program  # type: ignore[no-any-return]

    def read(self, batch: Any) -> GlobalBatch:
        """Return a batch of Keras's loop as a global batch."""
        if isinstance(batch, PendingBatch):
            return batch.read(nullcontext)
        return batch if isinstance(batch, GlobalBatch) else whole_batch(batch)

    def computed(self, program: ServedProgram, state: Any, step: int, batch: Any) -> Mapping[str, Array]:
        """Compute the gradients and changes of a step, as arrays by their names in a partial.

        Raises:
            ModelError: parameter servers do not support the step.
        """
        data = self.read(batch)
        seed = xxhash.xxh3_64_intdigest(struct.pack("<3Q", self.call.seed, self.call.number, step))
        share = data.share(0, 1, seed)
        with misfits_explained(self.model, share.examples):
            partial = program.compute(state, share, ())
        if not program.is_last(0):
            raise ModelError(
                f"the step of model {self.model.name!r} updates weights several times, or uses them after "
                "an update, which parameter servers do not support; use MultiWorkerMirroredStrategy"
            )
        trained = program.trained()
        if [id(one) for one in trained] != [id(one) for one in self.model.trainable_variables]:
            raise ModelError(
                f"the step of model {self.model.name!r} does not update exactly its trainable variables with "
                "self.optimizer, which parameter servers do not support; use MultiWorkerMirroredStrategy"
            )
        arrays = {name: self.backend.to_numpy(value) for name, value in partial.items()}
        return divided(self.model, program.parts(0, arrays))
