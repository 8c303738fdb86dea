"""A call of `fit` that repeats a recorded one in one process, which does what the chief, the workers and the
servers did.

The recorded orders say what came after what: the assignments and completed steps on the chief, the pulls and
pushes on each server. The chief follows its own order up to the next completed step. For a step to be
complete, each server follows its order up to the step's push. A push takes the gradients of its step, which
take the step's pulls on all servers. What is needed never leads back to where it began, because the recorded
run has done all this in some order of time.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.data.batch import GlobalBatch
from lockstep.errors import ConfigError, DisagreementError
from lockstep.keras.parameter_server.chief_process import ChiefProcess
from lockstep.keras.parameter_server.process import ServedCall
from lockstep.keras.parameter_server.served_variables import ServedVariables
from lockstep.keras.parameter_server.server_process import ServerShards
from lockstep.keras.parameter_server.servers import Servers
from lockstep.keras.parameter_server.standby import record_of
from lockstep.keras.parameter_server.transfers import transfers_of
from lockstep.keras.parameter_server.worker_step import ComputedStep, WorkerStep
from lockstep.keras.randomness import random_states, set_random_states
from lockstep.parameter_server.order import Kind, Record, RecordedOrder
from lockstep.protocol.parameter_server import EndCall, Question, Read, Write
from lockstep.transport.array_channel import Asked

Array = npt.NDArray[Any]

_NO_ROWS = np.zeros(0, np.int64)


class OneProcess(ChiefProcess):
    """The chief of a recorded call, which also computes what workers and servers have computed.

    Args:
        served: the call.
    """

    def __init__(self, served: ServedCall) -> None:
        super().__init__(served)
        self._worker = WorkerStep(self)
        self._ahead = _ReadAhead()
        self._transfers = transfers_of(served.backend)
        self._followed: _FollowedSteps | None = None

    def begin(self) -> "_FollowedSteps":
        """Create the shards of all servers, with the orders that they follow."""
        self.live = tuple(self.tasks.workers)
        tables = self.served.tables.variables
        if self.tables is not None:
            self.tables.note_optimizer(self.served.update.optimizer)
        shards = []
        for server in range(self.tasks.servers):
            variables = ServedVariables(self.backend, own=True, plain=self.served.options.max_staleness == 0)
            variables.add(
                self.served.update, [one for one in self.served.shards if one.server == server], tables
            )
            writer, order = self.order(f"ps-{server}")
            assert order is not None
            answers = None if self.tables is None else self.tables.answers_of(server)
            shards.append((ServerShards(variables, writer, order, None, answers), order))
        self._followed = _FollowedSteps(self, shards)
        return self._followed

    def reach_servers(self) -> Servers:
        """Return what asks the servers of this process."""
        assert self._followed is not None
        return self._followed.asked

    def one_ahead(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield batches; those that steps need earlier are read before."""
        yield from super().one_ahead(self._ahead.through(batches))

    def batch_of(self, step: int) -> GlobalBatch | None:
        """Return the batch of a step; None if the step is complete.

        Raises:
            DisagreementError: the epoch has no such batch.
        """
        batch = self._ahead.batch(step)
        return None if batch is None else self.read(batch)

    def forget_batch(self, step: int) -> None:
        """Forget the batch of a complete step."""
        self._ahead.forget(step)

    def look_up(self, data: GlobalBatch) -> dict[int, Array]:
        """Return the distinct rows that a batch looks up; see `WorkerStep`."""
        with self._worker.rows:
            return self._worker.look_up(data)

    def compute(
        self, step: int, data: GlobalBatch, weights: Sequence[Array], layers: Mapping[str, Array]
    ) -> ComputedStep:
        """Compute a step as a worker does; what the chief has of the model stays as it is."""
        states = random_states()
        with self._worker.rows, self._values_kept():
            self._worker.look_up(data)
            self._worker.make_room(step, data)
            # A backend may use the arrays in place.
            copies = {name: np.array(array) for name, array in layers.items()}
            computed = self._worker.compute(step, data, weights, copies)
        set_random_states(states)
        return computed

    @contextmanager
    def _values_kept(self) -> Iterator[None]:
        """Give variables of the model their values back, where the state of the step is in variables."""
        if self._worker.state is not None:
            yield
            return
        rooms = {id(self.model.trainable_variables[table]) for table in self.served.tables.variables}
        variables = {id(one): one for one in (*self.model.variables, *self.model.metrics_variables)}.values()
        own = [one for one in variables if id(one) not in rooms]
        values = self._transfers.read(own)
        try:
            yield
        finally:
            self._transfers.assign(own, values)

    def _take(self, state: Any, batch: Any) -> tuple[Any, Any]:
        self._worker.state = state
        return super()._take(state, batch)


class _ReadAhead:
    """The batches of Keras's loop, of which steps may need later ones earlier."""

    def __init__(self) -> None:
        self._batches: Iterator[Any] = iter(())
        self._waiting: deque[Any] = deque()
        self._kept: dict[int, Any] = {}
        self._count = 0

    def through(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of a pass."""
        self._batches = batches
        while self._waiting or self._read():
            yield self._waiting.popleft()

    def batch(self, step: int) -> Any:
        """Return the batch of a step, counted over all passes; None if it was forgotten.

        Raises:
            DisagreementError: the pass ends before.
        """
        while step >= self._count:
            if not self._read():
                raise DisagreementError(
                    f"the recorded run has trained with batch {step + 1}, but the data ends with batch "
                    f"{self._count}: the script or its data has changed"
                )
        return self._kept.get(step)

    def forget(self, step: int) -> None:
        """Forget the batch of a step."""
        self._kept.pop(step, None)

    def _read(self) -> bool:
        batch = next(self._batches, None)
        if batch is None:
            return False
        self._kept[self._count] = batch
        self._waiting.append(batch)
        self._count += 1
        return True


@dataclass
class _Attempt:
    """A step that was assigned to a worker; if it was lost with the worker, another attempt follows.

    Attributes:
        layers: the layers' state at the assignment.
        data: the batch, once weights were read.
        rows: the distinct rows that it looks up.
        weights: the answers of servers, by their numbers.
        pushed: the servers that have the gradients.
        computed: the gradients, once a server needs them.
        staleness: the largest of all servers.
    """

    layers: Mapping[str, Array]
    data: GlobalBatch | None = None
    rows: Mapping[int, Array] = field(default_factory=dict)
    weights: dict[int, list[Array]] = field(default_factory=dict)
    pushed: set[int] = field(default_factory=set)
    computed: ComputedStep | None = None
    staleness: int = 0


class _FollowedSteps:
    """The steps of a recorded call, in the order of the chief: the `CompletedSteps` of this process.

    Args:
        process: computes them.
        servers: the shards of each, and the order that they follow.

    Attributes:
        asked: asks the servers.
    """

    def __init__(self, process: OneProcess, servers: Sequence[tuple[ServerShards, RecordedOrder]]) -> None:
        assert process.recorded is not None
        self.staleness: list[int] = []
        self.silent: Callable[[float], Sequence[str]] = lambda _: ()
        self._process, self._order, self._writer = process, process.recorded, process.writer
        self._servers = [_FollowedServer(k, *one, self._follow) for k, one in enumerate(servers)]
        self.asked = Servers(self._servers, process.served.shards)
        self._layers: dict[str, Array] = {}
        self._attempts: dict[tuple[int, int], _Attempt] = {}
        self._results: deque[Mapping[str, Array]] = deque()
        self._checks: dict[int, tuple[int, bytes]] = {}
        for server in self._servers:
            if server.order.pulled_twice():
                raise ConfigError(
                    f"{process.call.name}: a worker and the one that has taken its place have begun the same "
                    "step, which a replay in one process does not support: use lockstep rerun without "
                    "--one-process"
                )

    @property
    def layers(self) -> Mapping[str, Array]:
        """The present values of the layers' state."""
        return dict(self._layers)

    def set_layers(self, layers: Mapping[str, Array]) -> None:
        """Set values of the layers' state."""
        self._layers |= layers

    def open(self, epoch: int) -> None:
        """Begin an epoch; no step is in work."""
        self._attempts.clear()

    def result(self) -> Mapping[str, Array]:
        """Return the arrays of the next completed step.

        Raises:
            DisagreementError: the recorded call has completed no further one.
        """
        while not self._results:
            if not self._advance():
                raise self._differs("takes a further step")
        return self._results.popleft()

    def take_check(self, step: int) -> tuple[int, bytes] | None:
        """Return the worker that has computed a step, and its hash of the batch, once."""
        return self._checks.pop(step, None)

    def drain(self) -> None:
        """Complete all steps that the recorded call has completed."""
        while self._advance():
            pass

    def finish(self) -> None:
        """Do nothing: no worker waits."""

    def close(self) -> None:
        """Write the rest of the servers' orders."""
        for server in self._servers:
            server.shards.close()

    def _advance(self) -> bool:
        """Process the next record of the chief; return False after the last one."""
        turn = self._order.awaited()
        if turn is None:
            return False
        self._order.advance()
        self._writer.add(*turn)
        if turn.kind is Kind.ASSIGN:
            self._attempts[turn.worker, turn.step] = _Attempt(dict(self._layers))
        elif turn.kind is Kind.DONE:
            self._complete(turn.worker, turn.step)
        return True

    def _complete(self, worker: int, step: int) -> None:
        """Complete a step, and take what it changes."""
        attempt, push = self._attempt(worker, step), Record(Kind.PUSH, worker, step)
        computed = self._computed(worker, step)
        for server in self._servers:
            # One without the record has applied the step before, of a lost worker.
            while server.order.has(push) and server.number not in attempt.pushed:
                self._serve_next(server)
        del self._attempts[worker, step]
        self._process.forget_batch(step)
        assert attempt.data is not None
        found = dict(computed.found)
        for name in self._layers.keys() & found.keys():
            self._layers[name] = self._layers[name] + found.pop(name)
        self.staleness.append(attempt.staleness)
        self._checks[step] = worker, attempt.data.check()
        self._results.append(found)

    def _computed(self, worker: int, step: int) -> ComputedStep:
        """Return what a worker has computed of a step."""
        attempt = self._attempt(worker, step)
        for server in self._servers:
            while server.number not in attempt.weights:
                self._serve_next(server)
        if attempt.computed is None:
            assert attempt.data is not None
            weights = self.asked.whole([attempt.weights[server.number] for server in self._servers])
            attempt.weights = {number: [] for number in attempt.weights}
            attempt.computed = self._process.compute(step, attempt.data, weights, attempt.layers)
        return attempt.computed

    def _follow(self, server: "_FollowedServer", until: Record | None) -> None:
        """Process what the order of a server has before a record of the chief; None for all of it.

        Raises:
            DisagreementError: the record does not come next.
        """
        while (turn := server.order.awaited()) != until:
            if turn is None or turn.kind not in (Kind.PULL, Kind.PUSH):
                asks, asked = (_named(one) for one in (until, turn))
                raise self._differs(f"{asks} on parameter server {server.number}; the recorded one {asked}")
            self._serve_next(server)

    def _serve_next(self, server: "_FollowedServer") -> None:
        """Process the next record of a server, which is of a worker."""
        turn = server.order.awaited()
        if turn is not None and turn.kind is Kind.PULL:
            self._pull(server, turn.worker, turn.step)
        elif turn is not None and turn.kind is Kind.PUSH:
            self._push(server, turn.worker, turn.step)
        else:
            raise self._differs(f"trains on, but the recorded one {_named(turn)}")

    def _pull(self, server: "_FollowedServer", worker: int, step: int) -> None:
        """Let a worker read the weights of a step."""
        attempt = self._attempts.get((worker, step))
        if attempt is not None and attempt.data is None:
            attempt.data = self._process.batch_of(step)
            if attempt.data is not None:
                attempt.rows = self._process.look_up(attempt.data)
        # A lost worker that got no further than this has changed nothing: its rows do not matter.
        rows = dict.fromkeys(self._process.served.tables.variables, _NO_ROWS)
        rows |= attempt.rows if attempt is not None else {}
        _, arrays = server.answer(worker, *self.asked.pull_of(server.number, step, rows))
        if attempt is not None:
            attempt.weights[server.number] = arrays

    def _push(self, server: "_FollowedServer", worker: int, step: int) -> None:
        """Let a worker update weights."""
        computed, attempt = self._computed(worker, step), self._attempt(worker, step)
        pushed = self.asked.push_of(server.number, step, computed.gradients, (0,), 0, attempt.rows)
        answer, _ = server.answer(worker, *pushed)
        if answer.staleness < 0:
            raise _unfit(f"parameter server {server.number} has applied step {step + 1} twice")
        attempt.staleness = max(attempt.staleness, answer.staleness)
        attempt.pushed.add(server.number)

    def _attempt(self, worker: int, step: int) -> _Attempt:
        if (worker, step) not in self._attempts:
            raise _unfit(f"the chief has not assigned step {step + 1} to worker {worker}")
        return self._attempts[worker, step]

    def _differs(self, how: str) -> DisagreementError:
        return DisagreementError(
            f"{self._process.call.name}: the new run {how}: the script, its data or its libraries have "
            "changed"
        )


class _FollowedServer:
    """A server of this process, as an `AsksServer` of the chief.

    Args:
        number: of the server.
        shards: of the server.
        order: that they follow.
        follow: processes what the order has before a record of the chief; None for all of it.
    """

    def __init__(
        self,
        number: int,
        shards: ServerShards,
        order: RecordedOrder,
        follow: Callable[["_FollowedServer", Record | None], None],
    ) -> None:
        self.number, self.shards, self.order, self._follow = number, shards, order, follow
        self._asked: tuple[Question, Sequence[Array]] | None = None

    def send(self, message: Question, arrays: Sequence[Array] = ()) -> None:
        """Ask; see `AskingChannel.send`."""
        self._asked = message, arrays

    def receive(self) -> tuple[Any, list[Array]]:
        """Return the answer to what was sent last, at its turn."""
        assert self._asked is not None
        message, arrays = self._asked
        if isinstance(message, Read | Write):
            self._follow(self, record_of(0, message))
        elif isinstance(message, EndCall):
            self._follow(self, None)
        return self.answer(0, message, arrays)

    def ask(self, message: Question, arrays: Sequence[Array] = ()) -> tuple[Any, list[Array]]:
        """Ask, and return the answer."""
        self.send(message, arrays)
        return self.receive()

    def silent(self, within: float) -> str:
        """Return empty: it always answers."""
        return ""

    def answer(self, process: int, message: Question, arrays: Sequence[Array]) -> tuple[Any, list[Array]]:
        """Return the answer to a question of a process whose turn it is, in arrays of its own."""
        asked = Asked(process, message, [np.array(array) for array in arrays], self.number)
        if isinstance(message, EndCall):
            self.shards.end_call(asked)
        else:
            self.shards.arrive(asked)
        answer = asked.answered()
        assert answer is not None
        return answer[0], [np.array(array) for array in answer[1]]


def _named(record: Record | None) -> str:
    """Return what happens at a record of a server, in the present tense."""
    if record is None:
        return "ends the call"
    done = {Kind.READ: "reads the weights", Kind.WRITE: "changes the weights"}.get(record.kind, "trains on")
    return f"{done} after step {record.step}"


def _unfit(why: str) -> ConfigError:
    return ConfigError(f"the recorded orders do not fit together: {why}")
