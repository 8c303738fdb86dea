"""The functions that a program schedules with a `ClusterCoordinator`, in one process of a job.

All processes run the script and make the same calls: `schedule`, `join`, `done`, `fetch`. The chief makes
each call first, and the others make it with the same result. `schedule` does not wait. Workers run functions
while they wait for the chief at a call. Each call except `schedule` gives all processes the present values of
the variables, so the script computes the same everywhere.

How a process makes a call depends on its task: see `function_chief.py`, `function_worker.py` and
`function_server.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lockstep.errors import DisagreementError, InputError
from lockstep.keras.assignments import observed_by
from lockstep.keras.backends.adapter import adapter
from lockstep.keras.backends.multi_update import Update
from lockstep.keras.numbered_calls import NumberedCall
from lockstep.keras.parameter_server.function_joining import FunctionJoining
from lockstep.keras.parameter_server.function_results import name_of, raise_failure, unpack_results
from lockstep.keras.parameter_server.function_run import FunctionRunner, ScopeVariables
from lockstep.keras.parameter_server.process import ServerOptions, TaskProcess
from lockstep.keras.parameter_server.script_reads import ScriptReads
from lockstep.keras.parameter_server.served_optimizers import place_weights
from lockstep.keras.parameter_server.server_tables import ServerTables, server_table, tables_of_job
from lockstep.keras.seeds import seed_of
from lockstep.keras.worker_exchange import agree, state_facts
from lockstep.parameter_server.partitioners import Shard
from lockstep.parameter_server.tasks import TaskType
from lockstep.protocol.parameter_server import FunctionFailure, Passed
from lockstep.worker.job import Job

Array = npt.NDArray[Any]
CallKind = Literal["schedule", "join", "done", "fetch", "close"]

MOST_KEPT = 4096
"""Results that all processes keep when the calls end."""


@dataclass(frozen=True)
class Scheduled:
    """A function with its arguments.

    Attributes:
        function: the function.
        worker_arguments: returns its arguments in the worker that runs it.
        trial_arguments: returns its arguments for a trial run, which does not change them.
    """

    function: Callable[..., Any]
    worker_arguments: Callable[[], tuple[Sequence[Any], Mapping[str, Any]]]
    trial_arguments: Callable[[], tuple[Sequence[Any], Mapping[str, Any]]]


@dataclass(frozen=True)
class ScheduleContext:
    """The program whose calls these are, in one process.

    Attributes:
        job: the job of the process.
        scope: the variables that the program has created in the scope of its strategy.
        options: the options of the strategy.
        number: numbers the calls of the program.
        joining: returns how workers join while the functions run that were numbered last.
        ended: receives the outcome of a call: its name, the number of functions so far, and the variables.
        trained: returns the number of training steps of the job before these calls.
    """

    job: Job
    scope: ScopeVariables
    options: ServerOptions
    number: Callable[[], NumberedCall]
    joining: Callable[[], FunctionJoining]
    ended: Callable[[str, int, Mapping[str, Any]], None]
    trained: Callable[[], int]

    @property
    def task(self) -> TaskType:
        """The type of this process's task."""
        tasks, process = self.job.context.tasks, self.job.process
        # A worker that joins does not have a task yet.
        return "worker" if process >= tasks.processes else tasks.of(process)[0]


class FunctionCalls(ABC):
    """The calls of one process, from the first scheduled function to `close`.

    Args:
        program: the program to which they belong.
    """

    _process: TaskProcess

    def __init__(self, program: ScheduleContext) -> None:
        self._program, self._job = program, program.job
        self._call = program.number()
        self._trained = program.trained()
        self._joining = program.joining()
        self._reads = ScriptReads(self._on_read, lambda: self._joining.in_script)
        self._eager = adapter().functions()
        self._backend = adapter().steps()
        options = program.options
        self._runner = FunctionRunner(program.scope, self._eager, options.partitioner, options.max_staleness)
        self._calls = self._scheduled = 0
        self._shards: tuple[Shard, ...] = ()
        self._opened = False
        self._tables: ServerTables | None = None
        self._kept_results: dict[int, Any] | None = None
        self._kept_failures: dict[int, FunctionFailure] = {}

    @property
    def name(self) -> str:
        """The name of the calls, for messages."""
        return self._call.name

    def schedule(self, scheduled: Scheduled) -> int:
        """Schedule a function, and return its number.

        Raises:
            Exception: an earlier function raised it.
            ModelError: parameter servers do not support a change that the function makes.
        """
        with self._unobserved():
            if self._runner.is_new(scheduled.function):
                if self._opened:
                    # In a replay, running functions may need this process, which waits for others below.
                    self._learn("join", *self._make("join"))
                self._introduce(scheduled)
            step = self._scheduled
            self._remember(step, scheduled)
            self._scheduled += 1
            if self._tables is not None:
                self._tables.closed = "call join before"
            passed, arrays = self._make("schedule", name=name_of(scheduled.function))
            if passed.failure is not None:
                self._scheduled = step
            self._learn("schedule", passed, arrays)
        return step

    def join(self) -> None:
        """Wait until all functions are complete.

        Raises:
            Exception: one of them raised it.
        """
        if self._opened:
            with self._unobserved():
                self._learn("join", *self._make("join"))

    def done(self) -> bool:
        """Whether all functions are complete."""
        if not self._opened:
            return True
        with self._unobserved():
            return self._learn("done", *self._make("done")).done

    def fetch(self, steps: Sequence[int]) -> list[Any]:
        """Wait for functions, and return their results, with arrays of NumPy.

        Raises:
            Exception: one of them raised it.
        """
        if self._kept_results is not None:
            return [self._kept_result(step) for step in steps]
        with self._unobserved():
            passed, arrays = self._make("fetch", steps)
            results = self._results_in(passed, arrays)
            self._learn("fetch", passed, arrays)
        return results

    def forget(self, step: int) -> None:  # noqa: B027
        """Forget the result of a function that the program does not need any more."""

    def close(self) -> int:
        """Wait until all functions are complete, and end the calls; return the number of functions.

        Raises:
            Exception: a function raised it.
        """
        self._leave()
        # The time since the script's last call does not belong to any function.
        self._job.timer.stop()
        if self._opened:
            with self._unobserved():
                passed, arrays = self._make("close")
            self._kept_results = dict(zip(passed.steps, self._results_in(passed, arrays), strict=True))
            self._kept_failures = dict(passed.failures)
            try:
                with self._unobserved():
                    self._learn("close", passed, arrays)
            finally:
                # The script may catch the exception of a function and continue.
                self._end()
                if self._tables is not None:
                    self._tables.scheduling, self._tables.closed = False, ""
        return self._scheduled

    @contextmanager
    def _unobserved(self) -> Iterator[None]:
        """Within the block, reads and assignments do not count as the script's."""
        with observed_by(None), self._reads.paused():
            yield

    def _on_read(self, variable: Any) -> None:  # noqa: B027
        """Note that the script reads a variable."""

    def _leave(self) -> None:  # noqa: B027
        """Expect that other processes end their calls."""

    @abstractmethod
    def _end(self) -> None:
        """End the calls, when none of their functions is running."""

    @abstractmethod
    def _open(self) -> None:
        """Exchange addresses with the other processes, and connect."""

    @abstractmethod
    def _add(self, update: Update, number: int, shards: Sequence[Shard]) -> None:
        """Add an optimizer, whose variables have these shards."""

    @abstractmethod
    def _remember(self, step: int, scheduled: Scheduled) -> None:
        """Keep a function until it is complete, if this process may run it."""

    @abstractmethod
    def _make(
        self, kind: CallKind, steps: Sequence[int] = (), name: str = ""
    ) -> tuple[Passed, Sequence[Array]]:
        """Make the next call, and return its result.

        Args:
            kind: the kind of the call.
            steps: the numbers of the functions whose results it requests.
            name: the name of the function that it schedules.
        """

    def _results_in(self, passed: Passed, arrays: Sequence[Array]) -> list[Any]:
        """Return the results of functions in the outcome of a call."""
        served = len(self._runner.served) if passed.state else 0
        return unpack_results(passed.results, arrays[served + len(passed.variables) :])

    def _kept_result(self, step: int) -> Any:
        """Return the result of a function whose calls have ended."""
        assert self._kept_results is not None
        if step in self._kept_failures:
            raise_failure(self._kept_failures[step])
        if step not in self._kept_results:
            raise InputError(
                f"the result of function {step + 1} of {self.name} is gone: only the last {MOST_KEPT} are "
                "kept when fit, or the script, ends them; fetch it before"
            )
        return self._kept_results[step]

    def _compared(self, kind: CallKind, passed: Passed) -> Passed:
        """Check that the chief has made the same call.

        Raises:
            DisagreementError: it has made a different call.
        """
        if passed.kind != kind:
            here, there = ("the end" if name == "close" else name for name in (kind, passed.kind))
            raise DisagreementError(
                f"call {self._calls} of the ClusterCoordinator is {here} in this process but {there} in "
                "the chief: all processes of the job must make the same calls, so do not guard any of them, "
                "such as fetch, with lockstep.is_chief()"
            )
        return passed

    def _introduce(self, scheduled: Scheduled) -> None:
        """Run a function as a trial in all processes, and place the variables that it trains."""
        # The trial does not belong to any function.
        self._job.timer.stop()
        first_new = len(self._runner.updates)
        seed = seed_of(self._call.seed, "trial", self._calls)

        def call() -> None:
            args, kwargs = scheduled.trial_arguments()
            scheduled.function(*args, **kwargs)

        self._runner.try_out(scheduled.function, call, seed)
        new = self._runner.updates[first_new:]
        label = f"the first call of {name_of(scheduled.function)}"
        state = {
            f"{variable.path} ({number}/{i})": variable.value
            for number, update in enumerate(new)
            for i, variable in enumerate(update.changed)
        }
        created = {
            "variables of the scope": str(len(self._program.scope.variables)),
            "variables of the optimizers": str([len(update.changed) for update in new]),
        }
        self._compare_trial(label, created, self._runner.shown_by(scheduled.function), state)
        if not self._opened:
            self._opened = True
            self._meet(label)
            self._open()
        placed = place_weights(
            self._runner.updates, self._job.context.tasks.servers, self._program.options.partitioner
        )
        added, self._shards = placed[len(self._shards) :], placed
        for number, update in enumerate(new, first_new):
            first = self._runner.first_of(number)
            shards = [shard for shard in added if first <= shard.variable < first + len(update.variables)]
            self._add(update, number, shards)

    def _meet(self, label: str) -> None:
        """Compare the tables that only servers have, and connect to these."""
        tables = [
            table
            for variable in self._program.scope.variables
            if (table := server_table(variable)) is not None
        ]
        self._runner.met = frozenset(tables)
        if not tables:
            return
        self._tables = self._process.tables = tables_of_job(self._job)
        self._tables.scheduling = True
        if self._joining.replays:
            # The chief tells this worker where the rows are. Digests are among the values of the log's calls.
            return
        for table, digest in zip(tables, self._tables.meet(tables, label), strict=True):
            table.digest_variable.assign(digest.view(np.int32))

    def _compare_trial(
        self, label: str, created: Mapping[str, str], shown: Mapping[str, str], state: Mapping[str, Any]
    ) -> None:
        """Check that a trial run was equal in all processes.

        Args:
            label: names the trial run.
            created: the number of variables that it has created.
            shown: the properties of the function, as shown by the trial run.
            state: the variables of the optimizers that it was the first to apply.
        """
        agree(self._job, label, {**created, **state_facts(self._eager.to_numpy, state)})

    def _learn(self, kind: CallKind, passed: Passed, arrays: Sequence[Array]) -> Passed:
        """Apply the outcome of a call to the script's variables.

        Raises:
            Exception: a function raised it.
        """
        if passed.state:
            others = [self._program.scope.variables[position] for position in passed.variables]
            for variable, array in zip([*self._runner.served, *others], arrays, strict=False):
                variable.assign(array)
            variables = [*self._runner.served, *self._runner.others().values()]
            named = {f"{variable.path} ({i})": variable for i, variable in enumerate(variables)}
            self._program.ended(f"{kind} {self._calls} of {self._call.name}", self._scheduled, named)
        if passed.failure is not None:
            raise_failure(passed.failure)
        if self._tables is not None and (passed.done or kind in ("join", "close")):
            self._tables.closed = ""
        return passed
