"""The functions that a program schedules with a `ClusterCoordinator`, in one process of a job.

All processes run the script and make the same calls: `schedule`, `join`, `done`, `fetch`. The chief makes
each call first, and the others make it with the same result. `schedule` waits for nothing; workers run
functions while they wait for the chief at a call. Each call but `schedule` gives all processes the variables
as they are then, so the script computes the same everywhere.
"""

import contextlib
import itertools
import queue
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from lockstep.checkpoint import values
from lockstep.errors import DisagreementError, FunctionError, InputError, ModelError, PeerError
from lockstep.keras import assignments
from lockstep.keras.assignments import observed_by
from lockstep.keras.backends.adapter import adapter
from lockstep.keras.backends.multi_update import Update
from lockstep.keras.numbered_calls import NumberedCall
from lockstep.keras.parameter_server.function_dispatcher import FunctionDispatcher
from lockstep.keras.parameter_server.function_joining import FunctionJoining
from lockstep.keras.parameter_server.function_run import FunctionRunner, ScopeVariables
from lockstep.keras.parameter_server.process import ServerOptions, TaskProcess
from lockstep.keras.parameter_server.script_reads import ScriptReads
from lockstep.keras.parameter_server.served_variables import (
    ServedVariables,
    Slot,
    place_weights,
    slots_of_all,
)
from lockstep.keras.parameter_server.server_process import ServerProcess
from lockstep.keras.parameter_server.server_tables import (
    ServerTables,
    server_table,
    tables_of_job,
)
from lockstep.keras.parameter_server.servers import Servers
from lockstep.keras.seeds import seed_of
from lockstep.keras.state.function_log import AT_BEGIN, FoundByCall, of_scope, of_servers
from lockstep.keras.worker_exchange import agree, state_facts
from lockstep.parameter_server.partitioners import Shard
from lockstep.protocol.parameter_server import (
    Assigned,
    AtCall,
    FunctionFailure,
    FunctionResult,
    FunctionReturned,
    Passed,
    Question,
)
from lockstep.system.notes import note
from lockstep.system.prose import count
from lockstep.transport.array_channel import AskingChannel
from lockstep.worker.job import Job

Array = npt.NDArray[Any]
Kind = Literal["schedule", "join", "done", "fetch", "close"]

MOST_KEPT = 4096
"""Results that all processes keep when the calls end."""


@dataclass(frozen=True)
class Scheduled:
    """A function with its arguments.

    Attributes:
        function: the function.
        own: returns its arguments in the worker that runs it.
        fresh: returns its arguments for a trial run, which changes none of them.
    """

    function: Callable[..., Any]
    own: Callable[[], tuple[Sequence[Any], Mapping[str, Any]]]
    fresh: Callable[[], tuple[Sequence[Any], Mapping[str, Any]]]


@dataclass(frozen=True)
class ScheduleContext:
    """What the calls belong to.

    Attributes:
        job: of the process.
        scope: the variables that the program has created in the scope of its strategy.
        options: of the strategy.
        number: numbers a call of the program.
        joining: returns how workers join in the functions that were numbered last.
        ended: takes what a call has found: its name, the number of functions so far, and the variables.
        trained: returns the number of training steps of the job before these calls.
    """

    job: Job
    scope: ScopeVariables
    options: ServerOptions
    number: Callable[[], NumberedCall]
    joining: Callable[[], FunctionJoining]
    ended: Callable[[str, int, Mapping[str, Any]], None]
    trained: Callable[[], int]


class FunctionCalls(ABC):
    """The calls of one process, from the first function that is scheduled to `close`.

    Args:
        program: to which they belong.
    """

    _process: TaskProcess

    def __init__(self, program: ScheduleContext) -> None:
        self._program, self._job = program, program.job
        self._call = program.number()
        self._trained = program.trained()
        self._measured = 0
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
        """Schedule a function; return its number.

        Raises:
            Exception: of an earlier function.
            ModelError: parameter servers do not support what the function changes.
        """
        with self._own():
            if self._runner.is_new(scheduled.function):
                if self._opened:
                    # A replay's functions in work may need a process that waits for others in there.
                    self._learn("join", *self._make("join"))
                self._introduce(scheduled)
            step = self._scheduled
            self._remember(step, scheduled)
            self._scheduled += 1
            if self._tables is not None:
                self._tables.closed = "call join before"
            passed, arrays = self._make("schedule", name=_name(scheduled.function))
            if passed.failure is not None:
                self._scheduled = step
            self._learn("schedule", passed, arrays)
        return step

    def join(self) -> None:
        """Wait until all functions are complete.

        Raises:
            Exception: of one of them.
        """
        if self._opened:
            with self._own():
                self._learn("join", *self._make("join"))

    def done(self) -> bool:
        """Whether all functions are complete."""
        if not self._opened:
            return True
        with self._own():
            return self._learn("done", *self._make("done")).done

    def fetch(self, steps: Sequence[int]) -> list[Any]:
        """Wait for functions; return their results, with arrays of NumPy.

        Raises:
            Exception: of one of them.
        """
        if self._kept_results is not None:
            return [self._kept_result(step) for step in steps]
        with self._own():
            passed, arrays = self._make("fetch", steps)
            results = self._results_in(passed, arrays)
            self._learn("fetch", passed, arrays)
        return results

    def forget(self, step: int) -> None:  # noqa: B027
        """Forget the result of a function that the program does not need any more."""

    def close(self) -> int:
        """Wait until all functions are complete, and end the calls; return the number of functions.

        Raises:
            Exception: of a function.
        """
        self._leave()
        # What the script has done since its last call belongs to no function.
        self._job.timer.stop()
        if self._opened:
            with self._own():
                passed, arrays = self._make("close")
            self._kept_results = dict(zip(passed.steps, self._results_in(passed, arrays), strict=True))
            self._kept_failures = dict(passed.failures)
            try:
                with self._own():
                    self._learn("close", passed, arrays)
            finally:
                # The script may catch the exception of a function and continue.
                self._end()
                if self._tables is not None:
                    self._tables.scheduling, self._tables.closed = False, ""
        return self._scheduled

    @contextmanager
    def _own(self) -> Iterator[None]:
        """Within the block, what this process reads and assigns is not what the script does."""
        with observed_by(None), self._reads.paused():
            yield

    def _on_read(self, variable: Any) -> None:  # noqa: B027
        """Note that the script reads a variable."""

    def _leave(self) -> None:  # noqa: B027
        """Expect that other processes end their calls."""

    @abstractmethod
    def _end(self) -> None:
        """End the calls, of whose functions none is in work."""

    @abstractmethod
    def _open(self) -> None:
        """Exchange addresses with the other processes, and connect."""

    @abstractmethod
    def _add(self, update: Update, number: int) -> None:
        """Use a further optimizer, whose variables are placed."""

    @abstractmethod
    def _remember(self, step: int, scheduled: Scheduled) -> None:
        """Keep a function until it is complete, if this process may run it."""

    @abstractmethod
    def _make(self, kind: Kind, steps: Sequence[int] = (), name: str = "") -> tuple[Passed, Sequence[Array]]:
        """Make the next call; return its result.

        Args:
            kind: of the call.
            steps: of which it wants the results.
            name: of the function that it schedules.
        """

    def _results_in(self, passed: Passed, arrays: Sequence[Array]) -> list[Any]:
        """Return the results of functions that a call has found."""
        served = len(self._runner.served) if passed.state else 0
        rest = list(arrays[served + len(passed.variables) :])
        found = []
        for result in passed.results:
            own, rest = rest[: len(result.names)], rest[len(result.names) :]
            packed = msgspec.json.decode(result.packed)
            found.append(values.unpack(packed, dict(zip(result.names, own, strict=True))))
        return found

    def _kept_result(self, step: int) -> Any:
        """Return the result of a function of calls that have ended."""
        assert self._kept_results is not None
        if step in self._kept_failures:
            _raise(self._kept_failures[step])
        if step not in self._kept_results:
            raise InputError(
                f"the result of function {step + 1} of {self.name} is gone: only the last {MOST_KEPT} are "
                "kept when fit, or the script, ends them; fetch it before"
            )
        return self._kept_results[step]

    def _compared(self, kind: Kind, passed: Passed) -> Passed:
        """Check that the chief has made the same call.

        Raises:
            DisagreementError: it has made another one.
        """
        if passed.kind != kind:
            own, of_chief = ("the end" if one == "close" else one for one in (kind, passed.kind))
            raise DisagreementError(
                f"call {self._calls} of the ClusterCoordinator is {own} in this process and {of_chief} in "
                "the chief: all processes of the job make the same calls, so make none of them, such as "
                "fetch, only if lockstep.is_chief()"
            )
        return passed

    def _introduce(self, scheduled: Scheduled) -> None:
        """Try a function out in all processes, and place the variables that it trains."""
        # The trial is no part of any function.
        self._job.timer.stop()
        known = len(self._runner.updates)
        seed = seed_of(self._call.seed, "trial", self._calls)

        def call() -> None:
            args, kwargs = scheduled.fresh()
            scheduled.function(*args, **kwargs)

        self._runner.try_out(scheduled.function, call, seed)
        new = self._runner.updates[known:]
        what = f"the first call of {_name(scheduled.function)}"
        state = {
            f"{variable.path} ({number}/{i})": variable.value
            for number, update in enumerate(new)
            for i, variable in enumerate(update.changed)
        }
        facts = {
            "variables of the scope": str(len(self._program.scope.variables)),
            "variables of the optimizers": str([len(update.changed) for update in new]),
        }
        self._compare_trial(what, facts, self._runner.shown_by(scheduled.function), state)
        tasks = self._job.context.tasks
        assert tasks is not None
        if not self._opened:
            self._opened = True
            self._meet(what)
            self._open()
        placed = place_weights(self._runner.updates, tasks.servers, self._program.options.partitioner)
        added, self._shards = placed[len(self._shards) :], placed
        for number, update in enumerate(new, known):
            first = self._runner.first_of(number)
            own = [one for one in added if first <= one.variable < first + len(update.variables)]
            self._add_shards(own)
            self._add(update, number)

    def _meet(self, what: str) -> None:
        """Compare the tables that only servers have, and connect to these."""
        tables = [t for one in self._program.scope.variables if (t := server_table(one)) is not None]
        self._runner.met = frozenset(tables)
        if not tables:
            return
        reason = "its functions look up rows of a ServerEmbedding, which a worker that joins could not repeat"
        if self._joining.replays:
            raise ModelError(f"this worker cannot join the job: {reason}")
        if self._job.is_chief:
            self._joining.close(reason)
        self._tables = self._process.tables = tables_of_job(self._job)
        for table, digest in zip(tables, self._tables.meet(tables, what), strict=True):
            table.digest_variable.assign(digest.view(np.int32))
        self._tables.scheduling = True

    def _compare_trial(
        self, what: str, facts: Mapping[str, str], shown: Mapping[str, str], state: Mapping[str, Any]
    ) -> None:
        """Check that a trial run was equal in all processes.

        Args:
            what: names it.
            facts: on what it has created.
            shown: what it has shown of the function.
            state: the variables of the optimizers that it has applied first.
        """
        agree(self._job, what, {**facts, **state_facts(self._eager.to_numpy, state)})

    @abstractmethod
    def _add_shards(self, shards: Sequence[Shard]) -> None:
        """Use the shards of a further optimizer."""

    def _learn(self, kind: Kind, passed: Passed, arrays: Sequence[Array]) -> Passed:
        """Take over what a call has found.

        Raises:
            Exception: of a function.
        """
        if passed.state:
            others = [self._program.scope.variables[position] for position in passed.variables]
            for variable, array in zip([*self._runner.served, *others], arrays, strict=False):
                variable.assign(array)
            known = [*self._runner.served, *self._runner.others().values()]
            named = {f"{variable.path} ({i})": variable for i, variable in enumerate(known)}
            self._program.ended(f"{kind} {self._calls} of {self._call.name}", self._scheduled, named)
        if passed.failure is not None:
            _raise(passed.failure)
        if self._tables is not None and (passed.done or kind in ("join", "close")):
            self._tables.closed = ""
        return passed


class ChiefCalls(FunctionCalls):
    """The calls of the chief, which decides on them."""

    def __init__(self, program: ScheduleContext) -> None:
        super().__init__(program)
        self._process = TaskProcess(self._job, self._call, "chief")
        self._dispatcher: FunctionDispatcher | None = None
        self._servers: Servers | None = None
        self._slots: list[Slot] = []
        self._known: list[Array] = []
        self._others: dict[int, Array] = {}
        self._learned = True
        self._assigned = 0
        self._reading = ExitStack()
        self._read: dict[int, Any] = {}
        self._handed: tuple[int, list[int], frozenset[int]] | None = None
        self._ending = False
        if self._joining.log is not None:
            if self._joining.follows_training:
                variables = dict(enumerate(map(self._array, program.scope.variables)))
                self._joining.log.begin(variables, self._joining.values_of_models())
            self._reads.begin()

    def forget(self, step: int) -> None:
        """Forget the result of a function that the program does not need any more."""
        if self._dispatcher is not None:
            self._dispatcher.forget(step)

    def _end(self) -> None:
        """End the calls, of whose functions none is in work."""
        self._reads.end()
        if self._dispatcher is None:
            return
        assert self._servers is not None
        dispatcher = self._dispatcher
        self._ending = True
        dispatcher.wait_until_taken()
        dispatcher.finish()
        self._servers.end_call()
        self._process.writer.end()
        if stale := dispatcher.staleness:
            note(
                f"{self._call.name}: staleness {np.mean(stale):.1f} on average, at most {max(stale)}, over "
                f"{len(stale)} functions of {count(len(self._process.live), 'worker')}"
            )
        self._reading.close()
        dispatcher.close()
        self._process.close()

    def _leave(self) -> None:
        if self._dispatcher is not None:
            self._dispatcher.leave()

    def _open(self) -> None:
        process = self._process
        self._dispatcher = FunctionDispatcher(process.dispatched(self._program.options.max_staleness))
        self._addresses = process.addresses(self._dispatcher.end)
        self._dispatcher.keep(self._addresses)
        if process.recorded is None:
            self._dispatcher.begin()
        self._dispatcher.look = self._look
        self._dispatcher.when_completed = self._measure_completed
        self._servers = process.connect_servers(self._addresses, ())

    def _look(self) -> None:
        """Let workers join that take the places of lost ones, while the chief is at a call."""
        assert self._dispatcher is not None
        dispatcher, membership = self._dispatcher, self._job.membership
        if self._process.recorded is not None:
            self._job.admit_none("a replay has the processes of its run")
            return
        if self._handed is not None:
            view, lost, known = self._handed
            number, workers = membership.announced()
            if number > view:
                self._handed = None
                dispatcher.expect(dict(zip(lost, sorted({*workers} - known), strict=False)))
        if expected := dispatcher.expected:
            dispatcher.expect_no_longer(membership.lost_workers(expected.values()))
        if self._handed is not None or self._ending:
            return
        self._note_reads()
        if self._joining.log is not None:
            self._joining.log.below = dispatcher.completed_below
        given: list[dict[str, Any]] = []

        def servers() -> dict[str, Any]:
            given.append(self._facts())
            return given[-1]

        if (joined := self._joining.admit(servers)) is not None:
            (facts,) = given
            self._handed = joined, facts["lost"], frozenset(facts["workers"].values())
            dispatcher.hold(facts["lost"])

    def _facts(self) -> dict[str, Any]:
        """Return what a worker that joins has to know of the processes."""
        assert self._dispatcher is not None
        expected, facts = self._dispatcher.expected, self._process.facts(self._addresses)
        facts["workers"] |= expected
        facts["lost"] = [process for process in facts["lost"] if process not in expected]
        return facts

    def _on_read(self, variable: Any) -> None:
        self._read[id(variable)] = variable

    def _note_reads(self) -> None:
        """Note in the log which variables the script has read since the last call."""
        log = self._joining.log
        if log is None or not self._read:
            return
        scope, served = self._program.scope, {id(one): i for i, one in enumerate(self._runner.served)}
        for key, variable in self._read.items():
            if key in served:
                log.note_read(of_servers(served[key]))
            if (position := scope.position(variable)) is not None:
                log.note_read(of_scope(position))
        self._read.clear()

    def _note_call(
        self, kind: Kind, name: str, passed: Passed | None = None, arrays: Sequence[Array] = ()
    ) -> None:
        """Note a call in the log, with what it has found, if that is not nothing."""
        if (log := self._joining.log) is None:
            return
        label = f"schedule of {name}" if kind == "schedule" else kind
        if passed is None:
            log.add(label)
            return
        count = len(self._runner.served) if passed.state else 0
        values = {of_servers(i): array for i, array in enumerate(arrays[:count])}
        values |= {of_scope(one): array for one, array in zip(passed.variables, arrays[count:], strict=False)}
        log.add(label, FoundByCall(passed, arrays[count + len(passed.variables) :], values))
        self._joining.limit_memory()

    def _compare_trial(
        self, what: str, facts: Mapping[str, str], shown: Mapping[str, str], state: Mapping[str, Any]
    ) -> None:
        super()._compare_trial(what, facts, shown, state)
        if self._joining.log is not None:
            self._joining.log.trials.append({"call": what, **facts, **shown})

    def _add_shards(self, shards: Sequence[Shard]) -> None:
        assert self._servers is not None
        self._servers.add(shards)

    def _add(self, update: Update, number: int) -> None:
        gone = [self._program.scope.position(one) for one in update.changed]
        positions = [position for position in gone if position is not None]
        assert self._dispatcher is not None
        self._dispatcher.remove_variables(map(str, positions))
        for position in positions:
            self._others.pop(position, None)
        before = len(self._known) - len(self._slots)
        self._slots = [slot for slots in slots_of_all(self._runner.updates) for slot in slots]
        weights, slots = self._known[:before], self._known[before:]
        weights += [self._array(one) for one in update.variables]
        self._known = [*weights, *slots, *(self._array(one) for one in update.optimizer.variables)]

    def _remember(self, step: int, scheduled: Scheduled) -> None:
        """Do nothing: the chief runs no functions."""

    def _make(self, kind: Kind, steps: Sequence[int] = (), name: str = "") -> tuple[Passed, Sequence[Array]]:
        dispatcher = self._dispatcher
        assert dispatcher is not None
        self._job.timer.lap("other")
        self._job.timer.begin(self._call.name)
        self._look()
        self._note_reads()
        if self._tables is not None:
            assert self._servers is not None
            if not self._tables.is_within:
                self._reading.enter_context(self._tables.within(self._servers.channels))
        number, self._calls = self._calls, self._calls + 1
        # A change that the script makes by other means than Keras is found at the next call but `schedule`.
        if self._learned or kind != "schedule" or assignments.count() != self._assigned:
            self._write_changes(number)
            self._learned, self._assigned = False, assignments.count()
        failure, done = None, False
        results: list[tuple[FunctionResult, list[Array]]] = []
        remaining: dict[int, tuple[FunctionResult, list[Array]]] = {}
        failures: dict[int, FunctionFailure] = {}
        match kind:
            case "schedule":
                if (failure := dispatcher.schedule(number)) is None:
                    self._measure_completed()
                    self._note_call(kind, name)
                    return Passed(number + 1), []
            case "join":
                failure = dispatcher.join(number)
            case "close":
                failure = dispatcher.join(number)
                if failure is not None and dispatcher.was_delivered(failure):
                    failure = None
                remaining, failures = dispatcher.remaining(MOST_KEPT)
                results = list(remaining.values())
            case "done":
                done, failure = dispatcher.done(number)
            case "fetch":
                results, failure = dispatcher.results(number, steps)
        self._measure_completed()
        shows = kind != "done" or done or failure is not None
        positions, arrays = self._state(number) if shows else ((), [])
        self._job.timer.lap("exchange")
        passed = Passed(
            number + 1,
            kind,
            shows,
            positions,
            done,
            tuple(result for result, _ in results),
            tuple(remaining),
            tuple(failures.items()),
            failure,
        )
        arrays = [*arrays, *(array for _, own in results for array in own)]
        dispatcher.publish(number, passed, arrays)
        self._note_call(kind, name, passed if shows else None, arrays)
        return passed, arrays

    def _measure_completed(self) -> None:
        """Measure the functions that were completed since the last time; the chief waits for them."""
        assert self._dispatcher is not None
        self._job.timer.lap("wait")
        while self._measured < self._dispatcher.completed:
            self._measured += 1
            self._job.timer.end(self._measured, trained=self._trained + self._measured)

    def _state(self, number: int) -> tuple[tuple[int, ...], list[Array]]:
        """Return the variables as they are now: the positions of those of the chief, and the arrays of
        all."""
        assert self._dispatcher is not None
        assert self._servers is not None
        others = {int(position): array for position, array in self._dispatcher.snapshot(number).items()}
        before = len(self._known) - len(self._slots)
        known = self._known[:before], self._known[before:]
        weights, slots = self._servers.read(number, self._slots, known)
        for variable, digest in self._servers.digests.items():
            table = server_table(self._runner.served[variable])
            assert table is not None
            position = self._program.scope.position(table.digest_variable)
            assert position is not None
            others[position] = digest.view(np.int32)
        served = [*weights, *slots]
        self._known = served
        self._others |= others
        self._learned = True
        return tuple(others), [*served, *others.values()]

    def _write_changes(self, number: int) -> None:
        """Give the servers and workers what the program has changed since it has last learned the
        variables."""
        assert self._dispatcher is not None
        assert self._servers is not None
        served, others = self._runner.served, self._runner.others()
        now = [self._array(variable) for variable in served]
        changed = [
            i for i, (old, new) in enumerate(zip(self._known, now, strict=True)) if not _same(old, new)
        ]
        weights = len(served) - len(self._slots)
        if changed:
            self._servers.write(
                number,
                {i: now[i] for i in changed if i < weights},
                {self._slots[i - weights]: now[i] for i in changed if i >= weights},
            )
        self._known = now
        arrays = {position: self._array(variable) for position, variable in others.items()}
        new = {position: array for position, array in arrays.items() if position not in self._others}
        self._dispatcher.add_variables({str(position): array for position, array in new.items()})
        written = {
            str(position): array
            for position, array in arrays.items()
            if position not in new and not _same(array, self._others[position])
        }
        if written:
            self._dispatcher.write(number, written)
        self._others = arrays

    def _array(self, variable: Any) -> Array:
        return np.array(self._eager.to_numpy(variable.value))


class WorkerCalls(FunctionCalls):
    """The calls of a worker, which runs functions while it waits for the chief."""

    def __init__(self, program: ScheduleContext) -> None:
        super().__init__(program)
        self._process = TaskProcess(self._job, self._call, "")
        self._chief: AskingChannel | None = None
        self._servers: Servers | None = None
        self._until = 0
        self._kept: dict[int, Scheduled] = {}
        self._shown: dict[int, tuple[Any, Any]] = {}
        self._common: tuple[Slot, ...] = ()
        self._whole: tuple[int, ...] = ()
        self._partial: frozenset[int] = frozenset()
        self._first: dict[int, Array] = {}
        self._ahead: frozenset[int] = frozenset()
        self._assigned = -1
        self._trials = 0
        self._unknown: dict[int, Any] = {}
        self._of_call = 0
        self._refusal: DisagreementError | None = None
        if self._joining.replays:
            self._reads.begin()
            assert self._joining.log is not None
            if (found := self._joining.log.found_by(AT_BEGIN)) is not None:
                with self._own():
                    self._take_values(found, 0)

    def _end(self) -> None:
        """End the calls, of whose functions none is in work."""
        self._reads.end()
        self._process.close()

    def _open(self) -> None:
        if not self._joining.replays:
            self._connect(self._process.addresses(), ())

    def _connect(self, addresses: Mapping[int, bytes], shards: Sequence[Shard]) -> None:
        self._chief = self._process.connect(addresses, 0)
        # The chief does what the program does between two calls, while workers wait.
        self._chief.be_patient()
        self._servers = self._process.connect_servers(addresses, shards)

    def _repeated(self, label: str, number: int) -> tuple[Passed, Sequence[Array]] | None:
        """Return what a call has found that the chief has made before this worker joins.

        Returns None if this worker has arrived at the present call of the chief, and takes part from now on.

        Raises:
            DisagreementError: the chief has made another call.
        """
        log = self._joining.log
        assert log is not None
        if number == log.count and number == (log := self._joining.join()).count:
            facts = self._joining.arrive(f"call {number} of {self._call.name}")
            self._reads.end()
            self._unknown.clear()
            self._connect(self._process.take_place(facts), self._shards)
            return None
        if label != (recorded := log.label(number)):
            self._refuse(
                f"call {number + 1} of the ClusterCoordinator is {label} in this worker, which joins, and "
                f"was {recorded} in the chief: let the script decide by what is equal in all processes"
            )
        if (found := log.found_by(number)) is None:
            return Passed(number + 1), []
        if found.passed.state:
            self._take_values(found, number + 1)
        if found.passed.failure is not None:
            self._kept.clear()
        return msgspec.structs.replace(found.passed, state=False, variables=()), found.results

    def _take_values(self, found: FoundByCall, number: int) -> None:
        """Take over the variables that a call has shown, and note which of them the chief has not kept.

        Args:
            found: what the call has found.
            number: of the call, from 1; 0 for the beginning.
        """
        served, scope = self._runner.served, self._program.scope.variables
        named = {of_servers(i): one for i, one in enumerate(served)}
        named |= {of_scope(i): one for i, one in enumerate(scope)}
        for key, value in found.values.items():
            if key not in named or tuple(named[key].shape) != value.shape:
                self._refuse(
                    f"{self._call.name}: this worker, which joins, has created other variables in the scope "
                    "of the strategy than the chief: build models before fit and evaluate, for example with "
                    "keras.Input"
                )
            named[key].assign(value)
        known = {id(named[key]) for key in found.values}
        shown = [*served, *(named[of_scope(i)] for i in found.passed.variables if of_scope(i) in named)]
        self._unknown = {id(one): one for one in shown if id(one) not in known}
        self._of_call = number

    def _on_read(self, variable: Any) -> None:
        if id(variable) in self._unknown:
            self._refuse(
                f"the script reads {variable.path!r} after call {self._of_call} of {self._call.name}, and "
                "the chief has not kept its value for this worker, which joins"
            )

    def _refuse(self, why: str) -> NoReturn:
        """Raise DisagreementError, now and at all further calls: the script may catch it."""
        self._refusal = DisagreementError(why)
        raise self._refusal

    def _compare_trial(
        self, what: str, facts: Mapping[str, str], shown: Mapping[str, str], state: Mapping[str, Any]
    ) -> None:
        if not self._joining.replays:
            super()._compare_trial(what, facts, shown, state)
            return
        number, self._trials = self._trials, self._trials + 1
        assert self._joining.log is not None
        trials = self._joining.log.trials
        chiefs = trials[number] if number < len(trials) else {"call": "none"}
        own = {"call": what, **facts, **shown}
        for name in own:
            if own[name] != chiefs.get(name):
                self._refuse(
                    f"{what}: {name}: {own[name]} in this worker, which joins, and {chiefs.get(name)} in the "
                    "chief"
                )

    def _add_shards(self, shards: Sequence[Shard]) -> None:
        if self._servers is not None:
            self._servers.add(shards)

    def _add(self, update: Update, number: int) -> None:
        slots = [slot for one in slots_of_all(self._runner.updates) for slot in one]
        variables = [one for each in self._runner.updates for one in each.optimizer.variables]
        common = {slot: one for slot, one in zip(slots, variables, strict=True) if slot[0] < 0}
        trained = [variable for each in self._runner.updates for variable in each.variables]
        self._common = tuple(common)
        whole = {i: one for i, one in enumerate(trained) if server_table(one) is None}
        self._whole, self._partial = tuple(whole), frozenset(range(len(trained))) - whole.keys()
        self._runner.pulled = [*whole.values(), *common.values()]

    def _remember(self, step: int, scheduled: Scheduled) -> None:
        log = self._joining.log
        if log is None or step >= log.below:
            self._kept[step] = scheduled

    def _make(self, kind: Kind, steps: Sequence[int] = (), name: str = "") -> tuple[Passed, Sequence[Array]]:
        number, self._calls = self._calls, self._calls + 1
        self._job.timer.lap("other")
        if kind != "schedule" or assignments.count() != self._assigned:
            self._note_changes()
        if self._joining.replays:
            if self._refusal is not None:
                raise self._refusal
            label = f"schedule of {name}" if kind == "schedule" else kind
            if (repeated := self._repeated(label, number)) is not None:
                return repeated
        if number < self._until:
            return self._compared(kind, Passed(self._until)), []
        assert self._chief is not None
        question: Question = AtCall(number, self._scheduled)
        given: Sequence[Array] = ()
        while True:
            answer, arrays = self._chief.ask(question, given)
            self._job.timer.lap("wait")
            if isinstance(answer, Passed):
                break
            assert isinstance(answer, Assigned)
            question, given = self._run(answer, arrays, number)
        self._until = self._compared(kind, answer).until
        if not answer.state:
            # The script sees the variables of the last call that has shown them.
            for variable, value in self._shown.values():
                variable.assign(value)
        self._shown.clear()
        if answer.failure is not None:
            self._kept.clear()
        self._assigned = assignments.count()
        return answer, arrays

    def _note_changes(self) -> None:
        """Note which variables the script has changed.

        In a function, these have the values that the chief knows, which may not have come to this call yet:
        those from the beginning, if it sends none.
        """
        others = self._runner.others()
        values = dict(zip(others, self._runner.transfers.read(list(others.values())), strict=True))
        self._first = values | self._first
        self._ahead = frozenset(k for k, value in values.items() if not _same(value, self._first[k]))
        self._assigned = assignments.count()

    def _run(
        self, assigned: Assigned, arrays: Sequence[Array], call: int
    ) -> tuple[FunctionReturned, list[Array]]:
        """Run a function; return what the chief gets."""
        assert self._servers is not None
        timer = self._job.timer
        timer.begin(self._call.name)
        servers, step = self._servers, assigned.step
        self._job.replacement = assigned.replacement
        complete = [k for k in self._kept if k < step and k not in assigned.incomplete]
        for k in complete:
            del self._kept[k]
        scheduled = self._kept[step]
        scope = self._program.scope.variables
        known = [int(name) for name in assigned.names]
        unknown = sorted(self._ahead.difference(known))
        changed = [*self._runner.pulled, *(scope[position] for position in (*known, *unknown))]
        given = [*self._pulled(step, 0), *arrays, *(self._first[position] for position in unknown)]
        for variable in changed:
            if id(variable) not in self._shown:
                self._shown[id(variable)] = variable, self._eager.saved_value(variable)
        self._runner.transfers.assign(changed, given)
        timer.lap("exchange")

        lost: list[PeerError] = []
        staleness, part, lookups = 0, 0, itertools.count()

        def pull_rows(number: int, rows: Array) -> Array:
            return servers.pull_rows(step, number, rows, next(lookups))

        def exchange(number: int, gradients: Mapping[int, Array]) -> list[Array]:
            nonlocal staleness, part
            timer.lap("compute")
            first = self._runner.first_of(number)
            whole = {first + position: gradient for position, gradient in gradients.items()}
            try:
                found = servers.push(step, whole, (number,), part)
                part += 1
                staleness = max(staleness, found)
                pulled = self._pulled(step, part)
                timer.lap("exchange")
                return pulled
            except PeerError as error:
                # TensorFlow raises another error for it.
                lost.append(error)
                raise

        def run() -> Any:
            args, kwargs = scheduled.own()
            return scheduled.function(*args, **kwargs)

        seed = seed_of(self._call.seed, "function", step)
        self._runner.pull_rows = pull_rows
        compilations = self._compilations(scheduled.function)
        try:
            ran = self._runner.run(scheduled.function, run, step, seed, exchange)
            kept, named = _packed(ran.result)
        except Exception as raised:
            # TensorFlow raises another error for that of a lookup.
            error = lost[0] if lost else self._runner.failure or raised
            if isinstance(error, PeerError):
                raise error from None
            print(f"function {step + 1} ({_name(scheduled.function)}) raises an exception:", file=sys.stderr)
            traceback.print_exception(error)
            return FunctionReturned(
                call, self._scheduled, step, failure=_described(error, step, self._job.worker)
            ), []
        self._job.note_step()
        timer.lap("compute")
        if ran.updates:
            staleness = servers.push(step, ran.gradients, ran.updates, rows=ran.rows)
            timer.lap("exchange")
        self._measured += 1
        timer.end(
            self._measured,
            trained=self._trained + step + 1,
            replicas=1,
            compiled=self._compilations(scheduled.function) != compilations,
            staleness=staleness,
        )
        result = FunctionResult(kept, tuple(named))
        changes = ran.changes.values()
        return FunctionReturned(call, self._scheduled, step, tuple(ran.changes), staleness, result), [
            *(start for start, _ in changes),
            *(end for _, end in changes),
            *named.values(),
        ]

    def _compilations(self, function: Any) -> int:
        """Return how many functions were compiled for a scheduled function so far, as far as that is known.

        On TensorFlow, these are the graphs of a `tf.function`, without those of functions that it calls.
        """
        graphs = getattr(function, "experimental_get_tracing_count", None)
        return self._backend.compilations() if graphs is None else graphs()

    def _pulled(self, step: int, part: int) -> list[Array]:
        """Return the values of the variables that a function reads from the servers."""
        assert self._servers is not None
        weights, common = self._servers.pull_with_common(step, part, self._partial)
        return [*(weights[i] for i in self._whole), *(common[slot] for slot in self._common)]


class ServerCalls(FunctionCalls):
    """The calls of a parameter server, which serves while it waits for the chief."""

    _process: ServerProcess

    def __init__(self, program: ScheduleContext) -> None:
        super().__init__(program)
        self._process = ServerProcess(
            self._job, self._call, lambda: ServedVariables(self._backend, own=True), self._trained
        )
        self._chief: AskingChannel | None = None
        self._until = 0
        self._added: Sequence[Shard] = ()

    def _end(self) -> None:
        """End the calls, of whose functions none is in work."""
        if self._opened:
            self._process.serve()
        self._process.close()

    def _open(self) -> None:
        self._chief = self._process.connect(self._process.open(), 0)
        self._chief.be_patient()

    def _add_shards(self, shards: Sequence[Shard]) -> None:
        self._added = shards

    def _add(self, update: Update, number: int) -> None:
        first = self._runner.first_of(number)
        tables = frozenset(first + position for position in self._runner.tables_of(number))
        self._process.add(update, self._added, tables)

    def _remember(self, step: int, scheduled: Scheduled) -> None:
        """Do nothing: servers run no functions."""

    def _make(self, kind: Kind, steps: Sequence[int] = (), name: str = "") -> tuple[Passed, Sequence[Array]]:
        number, self._calls = self._calls, self._calls + 1
        if number < self._until:
            return self._compared(kind, Passed(self._until)), []
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._wait, args=(number, answer), name="lockstep-wait", daemon=True).start()
        self._process.serve()
        passed, arrays = answer.get()
        if isinstance(passed, Exception):
            raise passed
        assert isinstance(passed, Passed)
        self._until = self._compared(kind, passed).until
        return passed, arrays

    def _wait(self, number: int, answer: "queue.SimpleQueue[Any]") -> None:
        assert self._chief is not None
        try:
            answer.put(self._chief.ask(AtCall(number, self._scheduled)))
        except PeerError as error:
            answer.put((error, ()))
        self._process.interrupt()


def calls_of(program: ScheduleContext) -> FunctionCalls:
    """Return the calls of this process."""
    tasks = program.job.context.tasks
    assert tasks is not None
    # A worker that joins has no task yet.
    task = "worker" if program.job.process >= tasks.processes else tasks.of(program.job.process)[0]
    kinds: dict[str, type[FunctionCalls]] = {"chief": ChiefCalls, "worker": WorkerCalls, "ps": ServerCalls}
    return kinds[task](program)


def _packed(result: Any) -> tuple[bytes, dict[str, Array]]:
    try:
        kept, named = values.pack(result, "result")
    except TypeError as error:
        raise InputError(f"a scheduled function returns a value that cannot be sent: {error}") from None
    return msgspec.json.encode(kept), named


def _same(one: Array, other: Array) -> bool:
    return one is other or (
        one.shape == other.shape
        and np.array_equal(one.reshape(-1).view(np.uint8), other.reshape(-1).view(np.uint8))
    )


def _described(error: Exception, step: int, worker: int) -> FunctionFailure:
    kind, arguments = type(error), b""
    with contextlib.suppress(TypeError):
        packed, arrays = values.pack(list(error.args), "")
        arguments = b"" if arrays else msgspec.json.encode(packed)
    return FunctionFailure(kind.__module__, kind.__qualname__, str(error), arguments, step, worker)


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _raise(failure: FunctionFailure) -> NoReturn:
    """Raise the exception of a function, of its class where this process knows it."""
    kind: Any = sys.modules.get(failure.module)
    for name in failure.name.split("."):
        kind = getattr(kind, name, None)
    error: Exception | None = None
    if isinstance(kind, type) and issubclass(kind, Exception):
        given = msgspec.json.decode(failure.arguments) if failure.arguments else [failure.message]
        # Errors of TensorFlow also have a node and an operation.
        for arguments in (values.unpack(given, {}), (None, None, failure.message)):
            with contextlib.suppress(Exception):
                error = kind(*arguments)
                break
    if error is None:
        error = FunctionError(f"{failure.module}.{failure.name}: {failure.message}")
    error.add_note(
        f"function {failure.step + 1} raised this on worker {failure.worker}, whose log has the traceback"
    )
    raise error
