"""A worker's run of a scheduled function. `worker_step.py` is the counterpart for a step of `fit`."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from lockstep.keras.backends.multi_update import Update
from lockstep.keras.parameter_server.function_calls import Scheduled
from lockstep.keras.parameter_server.function_results import pack_result, report_failure
from lockstep.keras.parameter_server.function_run import FunctionRunner
from lockstep.keras.parameter_server.served_optimizers import slots_of_all
from lockstep.keras.parameter_server.server_tables import server_table
from lockstep.keras.parameter_server.servers import Gradients
from lockstep.keras.parameter_server.table_rows import NO_ROWS
from lockstep.keras.parameter_server.worker import DoneWork
from lockstep.keras.seeds import seed_of
from lockstep.protocol.parameter_server import AtCall, Slot, WorkDone

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class FunctionPulls:
    """The variables that functions read from the servers.

    Attributes:
        whole: the numbers of the variables over all optimizers, without tables that only servers have.
        rows: no rows of each of these tables, because functions look up rows while they run.
        common: the slots that do not belong to a variable.
        variables: the variables of `whole`, and then those of the optimizers for `common`.
    """

    whole: tuple[int, ...]
    rows: Mapping[int, Array]
    common: tuple[Slot, ...]
    variables: list[Any]

    @classmethod
    def of(cls, updates: Sequence[Update]) -> "FunctionPulls":
        """Return the variables that functions with these optimizers read."""
        slots = [slot for slots_of_optimizer in slots_of_all(updates) for slot in slots_of_optimizer]
        slot_variables = [variable for update in updates for variable in update.optimizer.variables]
        common = {slot: v for slot, v in zip(slots, slot_variables, strict=True) if slot[0] < 0}
        trained = [variable for update in updates for variable in update.variables]
        whole = {i: variable for i, variable in enumerate(trained) if server_table(variable) is None}
        rows = {i: NO_ROWS for i in range(len(trained)) if i not in whole}
        return cls(tuple(whole), rows, tuple(common), [*whole.values(), *common.values()])

    def values(self, weights: Sequence[Array], common: Mapping[Slot, Array]) -> list[Array]:
        """Return the values of `variables`, given the result of `Servers.pull`."""
        return [*(weights[i] for i in self.whole), *(common[slot] for slot in self.common)]


class WorkerFunction:
    """One run of a scheduled function.

    Args:
        runner: the runner that runs it.
        scheduled: the function.
        step: its number.
        seed: the seed of all functions of the calls.
        pull_rows: reads rows of a table that only servers have, given the number of its variable, the numbers
            of the rows, and the number of the lookup in the function.
        exchange: gives gradients to the servers while the function runs; returns the values of
            `FunctionRunner.pulled` after that.
    """

    def __init__(
        self,
        runner: FunctionRunner,
        scheduled: Scheduled,
        step: int,
        seed: int,
        pull_rows: Callable[[int, Array, int], Array],
        exchange: Callable[[Gradients], Sequence[Array]],
    ) -> None:
        self._runner, self._scheduled, self._step, self._seed = runner, scheduled, step, seed
        self._pull, self._give_gradients = pull_rows, exchange
        self._lookups, self._parts = itertools.count(), itertools.count()
        self._errors: list[BaseException] = []

    def attach(self) -> None:
        """From now on, let the runner look up rows, and exchange gradients, for this function."""
        self._runner.pull_rows, self._runner.exchange = self._pull_rows, self._exchange

    def run(self, at: AtCall, worker: int) -> DoneWork:
        """Run the function, and return its results.

        Args:
            at: the call at which the worker waits afterwards.
            worker: the worker, for messages.

        Raises:
            LockstepError: `pull_rows` or `exchange` raised it.
        """
        function, step = self._scheduled.function, self._step

        def call() -> Any:
            args, kwargs = self._scheduled.worker_arguments()
            return function(*args, **kwargs)

        self.attach()
        seed = seed_of(self._seed, "function", step)
        try:
            ran = self._runner.run(function, call, step, seed, self._exchange)
            result, result_arrays = pack_result(ran.result)
        except Exception as raised:
            # If an error of Lockstep passes through a graph, TensorFlow raises another error instead.
            if self._errors:
                raise self._errors[0] from None
            failure = report_failure(self._runner.failure or raised, step, function, worker)
            return DoneWork(WorkDone(at, step, failure=failure), [], None)
        changes = ran.changes.values()
        arrays = [*(start for start, _ in changes), *(end for _, end in changes), *result_arrays]
        gradients = Gradients(ran.gradients, ran.rows, ran.updates) if ran.updates else None
        return DoneWork(WorkDone(at, step, tuple(map(str, ran.changes)), result=result), arrays, gradients)

    def _pull_rows(self, number: int, rows: Array) -> Array:
        try:
            return self._pull(number, rows, next(self._lookups))
        except BaseException as error:
            self._errors.append(error)
            raise

    def _exchange(self, number: int, gradients: Mapping[int, Array]) -> list[Array]:
        first = self._runner.first_of(number)
        whole = {first + position: gradient for position, gradient in gradients.items()}
        try:
            return list(self._give_gradients(Gradients(whole, {}, (number,), next(self._parts))))
        except BaseException as error:
            self._errors.append(error)
            raise
