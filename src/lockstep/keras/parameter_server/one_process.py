"""A call of `fit` that repeats a recorded one in one process, in the roles of the chief, the workers and the
servers; see `FollowedOrders`."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.errors import DisagreementError
from lockstep.keras.input.readings import read_batch
from lockstep.keras.parameter_server.chief_process import ChiefProcess
from lockstep.keras.parameter_server.dispatcher import Answered
from lockstep.keras.parameter_server.followed_orders import (
    Attempt,
    FollowedOrders,
    followed_orders,
)
from lockstep.keras.parameter_server.process import ServedCall
from lockstep.keras.parameter_server.served_optimizers import transfers_of
from lockstep.keras.parameter_server.server_shards import ServedVariables
from lockstep.keras.parameter_server.servers import Servers
from lockstep.keras.parameter_server.table_rows import NO_ROWS
from lockstep.keras.parameter_server.worker import DoneWork
from lockstep.keras.parameter_server.worker_step import WorkerStep
from lockstep.keras.randomness import random_states, set_random_states
from lockstep.protocol.parameter_server import Pull

Array = npt.NDArray[Any]


class OneProcess(ChiefProcess):
    """The chief of a recorded call, which also computes the workers' steps and the servers' updates.

    Args:
        served: the call.
    """

    unit = "step"

    def __init__(self, served: ServedCall) -> None:
        super().__init__(served)
        self._worker = WorkerStep(self)
        self._ahead = _BatchesAhead()
        self._transfers = transfers_of(served.backend)

    def orders(self) -> FollowedOrders:
        """Create the shards of all servers, and return the orders that they follow."""
        served, plain = self.served, self.served.options.max_staleness == 0
        servers = range(self.tasks.servers)
        variables = {server: ServedVariables(self.backend, copies=True, plain=plain) for server in servers}
        self.add_variables(variables, served.update, served.shards, served.tables.variables)
        return followed_orders(self, variables, self)

    def one_ahead(self, batches: Iterator[Any], count: int | None) -> Iterator[Any]:
        """Yield batches. Steps may already have read some of them."""
        yield from super().one_ahead(self._ahead.through(batches), count)

    def pull(self, servers: Servers, server: int, attempt: Attempt, part: int) -> tuple[Pull, list[Array]]:
        """Return the question of a worker to a server, for the rows that its batch looks up in tables."""
        if attempt.batch is None and (batch := self._ahead.batch(attempt.step)) is not None:
            data = read_batch(batch)
            with self._worker.rows:
                attempt.batch = data, self._worker.look_up(data)
        # Without a batch, this is a pull of a lost worker that did not continue, so its rows do not matter.
        none = dict.fromkeys(self.served.tables.variables, NO_ROWS)
        return servers.pull_of(server, attempt.step, none if attempt.batch is None else attempt.batch[1])

    def compute(self, attempt: Attempt, pulled: list[Answered]) -> DoneWork:
        """Compute a step as a worker does. The chief's values of the model do not change."""
        step, (data, rows) = attempt.step, attempt.batch
        states = random_states()
        with self._worker.rows, self._values_kept():
            self._worker.look_up(data)
            self._worker.make_room(step, data)
            weights, _ = self._servers.pulled(pulled)
            # A backend may use the arrays in place.
            layers = {
                name: np.array(array)
                for name, array in zip(attempt.assigned.names, attempt.layers, strict=True)
            }
            done = self._worker.compute(step, data, rows, weights, layers)
        set_random_states(states)
        return done

    def completed(self, step: int) -> None:
        """Forget the batch of a step that is complete."""
        self._ahead.forget(step)

    @contextmanager
    def _values_kept(self) -> Iterator[None]:
        """Within the block, steps may change variables of the model; these get their values back."""
        if self._worker.state is not None:
            yield
            return
        rooms = {id(self.model.trainable_variables[table]) for table in self.served.tables.variables}
        variables = (*self.model.variables, *self.model.metrics_variables)
        kept_variables = [v for v in {id(v): v for v in variables}.values() if id(v) not in rooms]
        values = self._transfers.read(kept_variables)
        try:
            yield
        finally:
            self._transfers.assign(kept_variables, values)

    def _next_step(self, state: Any, batch: Any) -> tuple[Any, Any]:
        self._worker.state = state
        return super()._next_step(state, batch)


class _BatchesAhead:
    """The batches of Keras's loop. Steps may need a batch before the loop reaches it."""

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
        """Return the batch of a step, counted over all passes, or None if it was forgotten.

        Raises:
            DisagreementError: the pass ends before this batch.
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
