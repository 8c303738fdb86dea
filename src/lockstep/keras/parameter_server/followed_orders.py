"""The servers of a recorded call, in one process that follows their orders and computes the workers' steps.

Everything is computed when it is needed. A step is complete on the chief once each server has followed its
order up to the step's push. A push needs the gradients of its step, and these need the weights that the step
has pulled from all servers. For each pull, its server follows its order up to the pull, which may need pushes
of other steps, and so on: `_push_everywhere`, `_compute` and `_pulled` call each other through `_serve_next`.

This recursion ends. The recorded run did everything in some order of time, and everything that a record needs
came earlier. `Attempt.computing` detects orders that do not fit together, such as files of two runs.

A lookup of rows within a function is an exception: only the running function knows which rows it looks up,
but by then its server may have to be further in its order. So at the turn of a lookup, the server takes a
snapshot of its tables, and the function reads the rows from the snapshot (`FollowedOrders.rows`).
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from lockstep.errors import ConfigError, DisagreementError
from lockstep.keras.parameter_server.dispatcher import Answered
from lockstep.keras.parameter_server.process import TaskProcess
from lockstep.keras.parameter_server.server_shards import ServedVariables, ServerShards, record_of
from lockstep.keras.parameter_server.servers import Gradients, Servers
from lockstep.keras.parameter_server.table_rows import NO_ROWS
from lockstep.keras.parameter_server.table_shards import TableSnapshot
from lockstep.keras.parameter_server.worker import DoneWork
from lockstep.parameter_server.order import Record, RecordedOrder, RecordKind
from lockstep.parameter_server.partitioners import Shard
from lockstep.protocol.parameter_server import Assigned, EndCall, PullRows, Question, Read, Write
from lockstep.transport.array_channel import QuestionArrival

Array = npt.NDArray[Any]


@dataclass
class Attempt:
    """A step that was assigned to a worker. If it was lost with the worker, another attempt follows.

    Attributes:
        worker: the worker.
        assigned: the assignment of the chief.
        layers: the layers' state that came with the assignment.
        pulled: the answers to pulls, by their parts and servers.
        tables: by server, the numbers of the step's lookups, and the tables at that moment.
        gradients: the last gradients, by their part.
        pushed: the servers that have these gradients.
        pulls: the number of pulls of the step.
        computing: whether it is being computed.
        staleness: the largest staleness of all servers.
        done: the results of the step, after it has been computed.
        batch: the batch of the step, and the rows that it looks up, after it has been read.
    """

    worker: int
    assigned: Assigned
    layers: Sequence[Array]
    pulled: dict[tuple[int, int], Answered] = field(default_factory=dict)
    tables: dict[int, deque[tuple[int, Mapping[int, TableSnapshot]]]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    gradients: dict[int, Gradients] = field(default_factory=dict)
    pushed: set[int] = field(default_factory=set)
    pulls: int = 0
    computing: bool = False
    staleness: int = 0
    done: DoneWork | None = None
    batch: Any = None

    @property
    def step(self) -> int:
        """The number of the step."""
        return self.assigned.step


class ReplayedWorkers(Protocol):
    """Computes the steps of a recorded run's workers.

    Attributes:
        unit: names a step in messages.
    """

    unit: str

    def pull(
        self, servers: Servers, server: int, attempt: Attempt, part: int
    ) -> tuple[Question, list[Array]]:
        """Return the question of a worker to a server, to compute a step; see `Servers.pull_of`."""

    def compute(self, attempt: Attempt, pulled: list[Answered]) -> DoneWork | Gradients:
        """Compute a step up to its end, or to the gradients that it gives the servers before it pulls again.

        Args:
            attempt: the attempt at the step.
            pulled: the answers of the servers to its pull.
        """

    def completed(self, step: int) -> None:
        """Forget the data of a step that is complete."""


class FollowedServer:
    """A server in this process, as an `AsksServer` of the chief.

    Args:
        number: the number of the server.
        shards: the shards of the server.
        order: the order that it follows.
        orders: the orders of all servers.
    """

    def __init__(
        self, number: int, shards: ServerShards, order: RecordedOrder, orders: "FollowedOrders"
    ) -> None:
        self.number, self.shards, self.order, self._orders = number, shards, order, orders
        self._sent: tuple[Question, Sequence[Array]] | None = None

    def send(self, message: Question, arrays: Sequence[Array] = ()) -> None:
        """Ask; see `AskingChannel.send`."""
        self._sent = message, arrays

    def receive(self) -> Answered:
        """Return the answer to the last question, at its turn."""
        assert self._sent is not None
        message, arrays = self._sent
        if isinstance(message, Read | Write):
            self._orders.follow(self, record_of(0, message))
        elif isinstance(message, EndCall):
            self._orders.follow(self, None)
        return self.answer(0, message, arrays)

    def ask(self, message: Question, arrays: Sequence[Array] = ()) -> Answered:
        """Ask, and return the answer."""
        self.send(message, arrays)
        return self.receive()

    def silent(self, within: float) -> str:
        """Return an empty string, because it always answers."""
        return ""

    def answer(self, process: int, message: Question, arrays: Sequence[Array]) -> Answered:
        """Return the answer to a question whose turn it is. Its arrays are copies."""
        arrival = QuestionArrival(process, message, [np.array(array) for array in arrays], self.number)
        if isinstance(message, EndCall):
            self.shards.end_call(arrival)
        else:
            self.shards.arrive(arrival)
        answer = arrival.answered()
        assert answer is not None
        return answer[0], [np.array(array) for array in answer[1]]


class FollowedOrders:
    """The servers of a recorded call, with the orders that they follow, and the steps of its workers.

    It is the `ComputedHere` of a `Dispatcher`, which follows the order of the chief.

    Args:
        name: the name of the call, for messages.
        servers: the shards and the order of each server.
        shards: the shards of all variables.
        workers: computes the steps.

    Attributes:
        servers: asks the servers.
    """

    def __init__(
        self,
        name: str,
        servers: Sequence[tuple[ServerShards, RecordedOrder]],
        shards: Sequence[Shard],
        workers: ReplayedWorkers,
    ) -> None:
        self._name, self._workers = name, workers
        self._followed = [FollowedServer(k, *server, self) for k, server in enumerate(servers)]
        self.servers = Servers(self._followed, shards)
        self._attempts: dict[tuple[int, int], Attempt] = {}

    def assign(self, worker: int, assigned: Assigned, layers: Sequence[Array]) -> None:
        """Assign a step to a worker, with the layers' state."""
        self._attempts[worker, assigned.step] = Attempt(worker, assigned, layers)

    def done(self, worker: int, step: int) -> QuestionArrival:
        """Compute a step, and return the message that its worker sent to the chief at its end."""
        attempt = self._attempt(worker, step)
        self._compute(attempt)
        for part in attempt.gradients:
            self._push_everywhere(attempt, part)
        del self._attempts[worker, step]
        self._workers.completed(step)
        assert attempt.done is not None
        message = msgspec.structs.replace(attempt.done.message, staleness=attempt.staleness)
        return QuestionArrival(worker, message, attempt.done.arrays)

    def rows(self, attempt: Attempt, variable: int, rows: Array, lookup: int) -> Array:
        """Return rows of a table within a step; see `Servers.pull_rows`.

        Raises:
            DisagreementError: the recorded step did not look up rows of the same server.
        """
        parts = []
        for part in self.servers.rows_by_server(variable, rows):
            kept = attempt.tables[part.server]
            number, tables = kept.popleft() if kept else (-1, {})
            if number != lookup & 0xFF:
                raise self._differs(f"looks up other rows in {self._workers.unit} {attempt.step + 1}")
            parts.append(tables[part.shard].rows(part.rows))
        return np.concatenate(parts)

    def follow(self, server: FollowedServer, until: Record | None) -> None:
        """Process a server's records that precede a record of the chief, or all records for None.

        Raises:
            DisagreementError: the record is not the next one.
        """
        while (turn := server.order.awaited()) != until:
            if turn is None or turn.kind in (RecordKind.READ, RecordKind.WRITE):
                expected, recorded = (_named(record) for record in (until, turn))
                raise self._differs(
                    f"{expected} on parameter server {server.number}, and the recorded one {recorded}"
                )
            self._serve_next(server)

    def close(self) -> None:
        """Write the rest of the servers' orders."""
        for server in self._followed:
            server.shards.close()

    def _compute(self, attempt: Attempt, part: int | None = None) -> None:
        """Compute a step up to the gradients of a part, or to its end."""
        if attempt.computing:
            raise _unfit(f"{self._workers.unit} {attempt.step + 1} needs what it computes later")
        attempt.computing = True
        try:
            while attempt.done is None and part not in attempt.gradients:
                pulled = self._pulled(attempt, attempt.pulls)
                for server in self._followed:
                    while self._looks_up_next(server, attempt):
                        self._serve_next(server)
                attempt.pulls += 1
                computed = self._workers.compute(attempt, pulled)
                if isinstance(computed, DoneWork):
                    attempt.done, gradients = computed, computed.gradients
                else:
                    gradients = computed
                attempt.gradients = {} if gradients is None else {gradients.part & 0xFF: gradients}
                attempt.pushed.clear()
        finally:
            attempt.computing = False

    def _push_everywhere(self, attempt: Attempt, part: int) -> None:
        """Let all servers follow their orders up to a push."""
        push = Record(RecordKind.PUSH, attempt.worker, attempt.step, part)
        for server in self._followed:
            # A server without the record applied this step earlier, for a worker that was lost.
            while server.order.has(push) and server.number not in attempt.pushed:
                self._serve_next(server)

    def _pulled(self, attempt: Attempt, part: int) -> list[Answered]:
        keys = [(part & 0xFF, server.number) for server in self._followed]
        for server, key in zip(self._followed, keys, strict=True):
            while key not in attempt.pulled:
                self._serve_next(server)
        return [attempt.pulled.pop(key) for key in keys]

    def _looks_up_next(self, server: FollowedServer, attempt: Attempt) -> bool:
        """Whether the next record of a worker on a server is a lookup of rows in a step."""
        later = server.order.next_of(attempt.worker)
        return later is not None and later.kind is RecordKind.PULL_ROWS and later.step == attempt.step

    def _serve_next(self, server: FollowedServer) -> None:
        """Process the next record of a server, which has to be that of a worker."""
        turn = server.order.awaited()
        if turn is None or turn.kind in (RecordKind.READ, RecordKind.WRITE):
            raise self._differs(f"trains on, and the recorded one {_named(turn)}")
        attempt, key = self._attempt(turn.worker, turn.step), (turn.part, server.number)
        match turn.kind:
            case RecordKind.PULL:
                question = self._workers.pull(self.servers, server.number, attempt, turn.part)
                attempt.pulled[key] = server.answer(turn.worker, *question)
            case RecordKind.PULL_ROWS:
                # The step is computed later, and only then knows the rows.
                tables = server.shards.tables()
                attempt.tables[server.number].append((turn.part, tables))
                message = PullRows(turn.step, next(iter(tables)), turn.part)
                server.answer(turn.worker, message, [NO_ROWS])
            case RecordKind.PUSH:
                if turn.part not in attempt.gradients:
                    self._compute(attempt, turn.part)
                if turn.part not in attempt.gradients:
                    raise self._differs(f"has no gradients in {self._workers.unit} {attempt.step + 1}")
                self._push(server, attempt, attempt.gradients[turn.part])
                attempt.pushed.add(server.number)
            case _:
                raise _unfit(f"that of parameter server {server.number} has {turn.kind.name}")

    def _push(self, server: FollowedServer, attempt: Attempt, gradients: Gradients) -> None:
        push = self.servers.push_of(server.number, attempt.step, gradients)
        answer, _ = server.answer(attempt.worker, *push)
        if answer.staleness < 0:
            raise _unfit(f"parameter server {server.number} has applied step {attempt.step + 1} twice")
        attempt.staleness = max(attempt.staleness, answer.staleness)

    def _attempt(self, worker: int, step: int) -> Attempt:
        if (worker, step) not in self._attempts:
            raise _unfit(f"the chief has not assigned step {step + 1} to worker {worker}")
        return self._attempts[worker, step]

    def _differs(self, how: str) -> DisagreementError:
        return DisagreementError(
            f"{self._name}: the new run {how}: the script, its data or its libraries have changed"
        )


def followed_orders(
    process: TaskProcess, variables: Mapping[int, ServedVariables], workers: ReplayedWorkers
) -> FollowedOrders:
    """Return the servers of a call in this process, which follow their recorded orders.

    Args:
        process: the process of the call, in a replay.
        variables: the shards of each server.
        workers: computes the steps.
    """
    process.live = tuple(process.tasks.workers)
    servers = []
    for server, shards in variables.items():
        writer, order = process.order(f"ps-{server}")
        assert order is not None
        answers = None if process.tables is None else process.tables.answers_of(server)
        servers.append((ServerShards(shards, writer, order, None, answers), order))
    return FollowedOrders(process.call.name, servers, (), workers)


def _named(record: Record | None) -> str:
    """Describe a record of a server, in the present tense."""
    if record is None:
        return "ends the call"
    return {RecordKind.READ: "reads the weights", RecordKind.WRITE: "changes the weights"}.get(
        record.kind, "trains on"
    )


def _unfit(why: str) -> ConfigError:
    return ConfigError(f"the recorded orders do not fit together: {why}")
