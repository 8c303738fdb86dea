"""The calls of a `ClusterCoordinator` in one process that repeats a recorded run.

It makes the calls as the chief, and runs the functions as their workers; see `FollowedOrders`.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt

from lockstep.keras.backends.multi_update import Update
from lockstep.keras.parameter_server.dispatcher import Answered
from lockstep.keras.parameter_server.followed_orders import (
    Attempt,
    FollowedOrders,
    followed_orders,
)
from lockstep.keras.parameter_server.function_calls import ScheduleContext, Scheduled
from lockstep.keras.parameter_server.function_chief import ChiefCalls
from lockstep.keras.parameter_server.server_shards import ServedVariables
from lockstep.keras.parameter_server.servers import Gradients, Servers
from lockstep.keras.parameter_server.worker import DoneWork
from lockstep.keras.parameter_server.worker_function import FunctionPulls, WorkerFunction
from lockstep.parameter_server.partitioners import Shard
from lockstep.protocol.parameter_server import AtCall, Pull

Array = npt.NDArray[Any]
Computed = DoneWork | Gradients
"""The results of a function, or the gradients that it gives the servers before it pulls again."""


class OneProcessCalls(ChiefCalls):
    """The calls of the chief, which also runs the functions, and has the shards of all servers."""

    unit = "function"

    def __init__(self, program: ScheduleContext) -> None:
        super().__init__(program)
        servers = range(self._process.tasks.servers)
        self._variables = {server: ServedVariables(self._backend, copies=True) for server in servers}
        self._pulls = FunctionPulls.of(())
        self._kept: dict[int, Scheduled] = {}
        self._threads: dict[tuple[int, int], _FunctionThread] = {}

    def pull(self, servers: Servers, server: int, attempt: Attempt, part: int) -> tuple[Pull, list[Array]]:
        """Return the question of a worker to a server, to run a function."""
        return servers.pull_of(server, attempt.step, self._pulls.rows, common=True, part=part)

    def compute(self, attempt: Attempt, pulled: list[Answered]) -> Computed:
        """Run a function as a worker does, and restore the script's variables.

        A function that exchanges gradients runs in a thread, which waits for new weights while other
        functions run.
        """
        values = self._pulls.values(*self._begun.servers.pulled(pulled))
        key, put_back = (attempt.worker, attempt.step), self._runner.keep_shared()
        try:
            if not self._runner.exchanges(self._kept[attempt.step].function):
                return self._run(attempt, values, None)
            if key not in self._threads:
                self._threads[key] = _FunctionThread(
                    lambda thread, values: self._run(attempt, values, thread)
                )
            computed = self._threads[key].resume(values)
            if isinstance(computed, DoneWork):
                del self._threads[key]
            return computed
        finally:
            self._job.process, self._job.replacement = 0, -1
            put_back()

    def completed(self, step: int) -> None:
        """Forget a function that is complete."""
        del self._kept[step]

    def _run(self, attempt: Attempt, values: Sequence[Array], thread: "_FunctionThread | None") -> DoneWork:
        """Run a function with the values of the variables that it has pulled."""
        job, orders, scope = self._job, self._begun.orders, self._program.scope.variables
        assert orders is not None
        replacement = attempt.assigned.replacement

        def pull_rows(number: int, rows: Array, lookup: int) -> Array:
            return orders.rows(attempt, number, rows, lookup)

        def exchange(gradients: Gradients) -> Sequence[Array]:
            assert thread is not None
            put_back = self._runner.keep_shared()
            new = thread.exchange(gradients)
            put_back()
            act_as_worker()
            return new

        def act_as_worker() -> None:
            job.process, job.replacement = attempt.worker, replacement
            run.attach()

        scheduled = self._kept[attempt.step]
        run = WorkerFunction(self._runner, scheduled, attempt.step, self._call.seed, pull_rows, exchange)
        act_as_worker()
        others = [scope[int(name)] for name in attempt.assigned.names]
        self._runner.transfers.assign([*self._runner.pulled, *others], [*values, *attempt.layers])
        worker = replacement if replacement >= 0 else attempt.worker
        return run.run(AtCall(0, self._scheduled), worker)

    def _orders(self) -> FollowedOrders:
        return followed_orders(self._process, self._variables, self)

    def _end(self) -> None:
        # The functions of lost workers have not reached their ends.
        for thread in self._threads.values():
            put_back = self._runner.keep_shared()
            thread.end()
            self._job.process, self._job.replacement = 0, -1
            put_back()
        self._threads.clear()
        super()._end()

    def _add(self, update: Update, number: int, shards: Sequence[Shard]) -> None:
        super()._add(update, number, shards)
        self._process.add_variables(self._variables, update, shards, self._runner.numbers_of_tables(number))
        self._pulls = FunctionPulls.of(self._runner.updates)
        self._runner.pulled = self._pulls.variables

    def _remember(self, step: int, scheduled: Scheduled) -> None:
        self._kept[step] = scheduled


class _RunEnds(BaseException):
    """Ends a function that a lost worker has not completed."""


class _FunctionThread:
    """Runs a function that exchanges gradients. No other thread computes meanwhile.

    Args:
        run: runs it in the thread, with the values that it has pulled.
    """

    def __init__(self, run: "Callable[[_FunctionThread, Sequence[Array]], Computed]") -> None:
        self._run = run
        self._values: queue.SimpleQueue[Sequence[Array] | None] = queue.SimpleQueue()
        self._computed: queue.SimpleQueue[Computed | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._compute, name="lockstep-function", daemon=True)
        self._thread.start()

    def resume(self, values: Sequence[Array]) -> Computed:
        """Continue with pulled values to the function's end, or to its next exchange; return the results."""
        self._values.put(values)
        computed = self._computed.get()
        if isinstance(computed, BaseException):
            raise computed
        return computed

    def exchange(self, gradients: Gradients) -> Sequence[Array]:
        """In the thread, give gradients to the servers; wait for the new values, and return them."""
        self._computed.put(gradients)
        if (values := self._values.get()) is None:
            raise _RunEnds
        return values

    def end(self) -> None:
        """End the thread."""
        self._values.put(None)
        self._thread.join()

    def _compute(self) -> None:
        values = self._values.get()
        assert values is not None
        try:
            self._computed.put(self._run(self, values))
        except BaseException as error:
            self._computed.put(error)
