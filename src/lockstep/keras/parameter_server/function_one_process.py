"""The calls of a `ClusterCoordinator` in one process that repeats a recorded run.

It makes the calls as the chief, and runs the functions as their workers; see `FollowedOrders`.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt

from lockstep.errors import LockstepError
from lockstep.keras.backends.multi_update import Update
from lockstep.keras.parameter_server.followed_orders import Answered, Attempt, FollowedOrders, Gradients
from lockstep.keras.parameter_server.function_calls import ScheduleContext, Scheduled
from lockstep.keras.parameter_server.function_chief import ChiefCalls
from lockstep.keras.parameter_server.function_dispatcher import FunctionDispatcher
from lockstep.keras.parameter_server.function_results import pack_result, report_failure
from lockstep.keras.parameter_server.function_worker import FunctionPulls
from lockstep.keras.parameter_server.served_variables import ServedVariables
from lockstep.keras.parameter_server.server_process import ServerShards
from lockstep.keras.parameter_server.servers import Servers
from lockstep.keras.seeds import seed_of
from lockstep.parameter_server.partitioners import Shard
from lockstep.protocol.parameter_server import FunctionReturned, Pull

Array = npt.NDArray[Any]


class OneProcessCalls(ChiefCalls):
    """The calls of the chief, which also runs the functions, and has the shards of all servers."""

    unit = "function"

    def __init__(self, program: ScheduleContext) -> None:
        super().__init__(program)
        self._orders: FollowedOrders | None = None
        self._variables: list[ServedVariables] = []
        self._added: Sequence[Shard] = ()
        self._pulls = FunctionPulls.of(())
        self._kept: dict[int, Scheduled] = {}

    def pull(self, servers: Servers, server: int, attempt: Attempt, part: int) -> tuple[Pull, list[Array]]:
        """Return what a worker asks a server for, to run a function."""
        return servers.pull_with_common_of(server, attempt.step, part, self._pulls.tables)

    def compute(self, attempt: Attempt, pulled: list[Answered]) -> tuple[Answered, Gradients | None]:
        """Run a function as a worker does; what the script sees of the variables stays as it is."""
        job, scope = self._job, self._program.scope.variables
        changed = [*self._runner.pulled, *(scope[int(name)] for name in attempt.assigned.names)]
        shown = [(variable, self._eager.saved_value(variable)) for variable in changed]
        self._runner.transfers.assign(changed, [*self._values(pulled), *attempt.layers])
        job.process, job.replacement = attempt.worker, attempt.assigned.replacement
        try:
            return self._run(attempt)
        finally:
            job.process, job.replacement = 0, -1
            for variable, value in shown:
                variable.assign(value)

    def completed(self, step: int) -> None:
        """Forget a function that is complete."""
        del self._kept[step]

    def _run(self, attempt: Attempt) -> tuple[Answered, Gradients | None]:
        assert self._orders is not None
        orders, step, scheduled = self._orders, attempt.step, self._kept[attempt.step]
        lookups, parts = itertools.count(), itertools.count()
        refused: list[LockstepError] = []

        def pull_rows(number: int, rows: Array) -> Array:
            return orders.rows(attempt, number, rows, next(lookups))

        def exchange(number: int, gradients: Mapping[int, Array]) -> list[Array]:
            first = self._runner.first_of(number)
            whole = {first + position: gradient for position, gradient in gradients.items()}
            try:
                return self._values(orders.exchange(attempt, Gradients(whole, {}, (number,), next(parts))))
            except LockstepError as error:
                # TensorFlow raises another error for it.
                refused.append(error)
                raise

        def run() -> Any:
            args, kwargs = scheduled.own()
            return scheduled.function(*args, **kwargs)

        self._runner.pull_rows = pull_rows
        seed = seed_of(self._call.seed, "function", step)
        try:
            ran = self._runner.run(scheduled.function, run, step, seed, exchange)
            result, own = pack_result(ran.result)
        except Exception as raised:
            if refused:
                raise refused[0] from None
            # TensorFlow raises another error for that of a lookup.
            worker = attempt.assigned.replacement if attempt.assigned.replacement >= 0 else attempt.worker
            failure = report_failure(self._runner.failure or raised, step, scheduled.function, worker)
            return (FunctionReturned(0, self._scheduled, step, failure=failure), []), None
        changes = ran.changes.values()
        arrays = [*(start for start, _ in changes), *(end for _, end in changes), *own]
        returned = FunctionReturned(0, self._scheduled, step, tuple(ran.changes), 0, result)
        gradients = Gradients(ran.gradients, ran.rows, ran.updates) if ran.updates else None
        return (returned, arrays), gradients

    def _values(self, answers: Sequence[Answered]) -> list[Array]:
        """Return the values of the variables that a function reads from the servers."""
        assert self._orders is not None
        return self._pulls.values(*self._orders.servers.whole_with_common(answers))

    def _open(self) -> None:
        process, servers = self._process, []
        process.live = tuple(process.tasks.workers)
        for server in range(process.tasks.servers):
            self._variables.append(ServedVariables(self._backend, own=True))
            writer, order = process.order(f"ps-{server}")
            assert order is not None
            answers = None if self._tables is None else self._tables.answers_of(server)
            servers.append((ServerShards(self._variables[server], writer, order, None, answers), order))
        self._orders = FollowedOrders(self._call.name, servers, (), self)
        self._servers = self._orders.servers
        dispatched = process.dispatched(self._program.options.max_staleness, self._orders)
        self._dispatcher = FunctionDispatcher(dispatched)

    def _end(self) -> None:
        super()._end()
        if self._orders is not None:
            self._orders.close()

    def _add_shards(self, shards: Sequence[Shard]) -> None:
        super()._add_shards(shards)
        self._added = shards

    def _add(self, update: Update, number: int) -> None:
        super()._add(update, number)
        if self._tables is not None:
            self._tables.note_optimizer(update.optimizer)
        first = self._runner.first_of(number)
        tables = frozenset(first + position for position in self._runner.tables_of(number))
        for server, variables in enumerate(self._variables):
            variables.add(update, [one for one in self._added if one.server == server], tables)
        self._pulls = FunctionPulls.of(self._runner.updates)
        self._runner.pulled = self._pulls.variables

    def _remember(self, step: int, scheduled: Scheduled) -> None:
        self._kept[step] = scheduled
