"""A worker in the calls of a `ClusterCoordinator`: runs functions while it waits for the chief."""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import msgspec
import numpy.typing as npt

from lockstep.errors import DisagreementError
from lockstep.keras import assignments
from lockstep.keras.backends.multi_update import Update
from lockstep.keras.parameter_server.function_calls import CallKind, FunctionCalls, ScheduleContext, Scheduled
from lockstep.keras.parameter_server.function_log import AT_BEGIN, CallOutcome, of_scope, of_servers
from lockstep.keras.parameter_server.process import TaskProcess
from lockstep.keras.parameter_server.servers import Gradients, same_bits
from lockstep.keras.parameter_server.worker import Worker
from lockstep.keras.parameter_server.worker_function import FunctionPulls, WorkerFunction
from lockstep.parameter_server.partitioners import Shard
from lockstep.protocol.parameter_server import AtCall, Passed, WorkDone

Array = npt.NDArray[Any]


class WorkerCalls(FunctionCalls):
    """The calls of a worker, which runs functions while it waits for the chief."""

    def __init__(self, program: ScheduleContext) -> None:
        super().__init__(program)
        self._process = TaskProcess(self._job, self._call, "")
        self._worker = Worker(self._process, self._trained)
        self._until = 0
        self._shown: dict[int, tuple[Any, Any]] = {}
        self._pulls = FunctionPulls.of(())
        self._first: dict[int, Array] = {}
        self._ahead: frozenset[int] = frozenset()
        self._assigned = -1
        self._trials = 0
        self._unknown: dict[int, Any] = {}
        self._shown_at = 0
        self._refusal: DisagreementError | None = None
        if self._joining.replays:
            self._reads.begin()
            assert self._joining.log is not None
            if (outcome := self._joining.log.outcome_of(AT_BEGIN)) is not None:
                with self._unobserved():
                    self._assign_shown(outcome, 0)

    def _end(self) -> None:
        """End the calls, when none of their functions is running."""
        self._reads.end()
        self._process.close()

    def _open(self) -> None:
        if not self._joining.replays:
            self._process.meet()
            self._worker.connect(())

    def _repeated(self, label: str, number: int) -> tuple[Passed, Sequence[Array]] | None:
        """Return the recorded outcome of a call that the chief made before this worker joined.

        Returns None if this worker has arrived at the present call of the chief, and takes part from now on.

        Raises:
            DisagreementError: the chief has made a different call.
        """
        log = self._joining.log
        assert log is not None
        if number == log.count and number == (log := self._joining.join()).count:
            peers = self._joining.arrive(f"call {number} of {self._call.name}")
            self._reads.end()
            self._unknown.clear()
            self._process.mesh.replace_lost_worker(self._call.number, peers)
            self._worker.connect(self._shards)
            return None
        if label != (recorded := log.label(number)):
            self._refuse(
                f"call {number + 1} of the ClusterCoordinator is {label} in this worker, which joins, but "
                f"was {recorded} in the chief: base decisions of the script on values that are equal in all "
                "processes"
            )
        if (outcome := log.outcome_of(number)) is None:
            return Passed(number + 1), []
        if outcome.passed.state:
            self._assign_shown(outcome, number + 1)
        if outcome.passed.failure is not None:
            self._worker.kept.clear()
        return msgspec.structs.replace(outcome.passed, state=False, variables=()), outcome.results

    def _assign_shown(self, outcome: CallOutcome, number: int) -> None:
        """Assign the variables that a call has shown, and note those whose values the chief has not kept.

        Args:
            outcome: the outcome of the call.
            number: the number of the call, from 1; 0 for the beginning.
        """
        served, scope = self._runner.served, self._program.scope.variables
        named = {of_servers(i): variable for i, variable in enumerate(served)}
        named |= {of_scope(i): variable for i, variable in enumerate(scope)}
        for key, value in outcome.values.items():
            if key not in named or tuple(named[key].shape) != value.shape:
                self._refuse(
                    f"{self._call.name}: this worker, which joins, has created different variables in the "
                    "scope of the strategy from the chief: build models before fit and evaluate, for "
                    "example with keras.Input"
                )
            named[key].assign(value)
        assigned = {id(named[key]) for key in outcome.values}
        shown = [*served, *(named[of_scope(i)] for i in outcome.passed.variables if of_scope(i) in named)]
        self._unknown = {id(variable): variable for variable in shown if id(variable) not in assigned}
        self._shown_at = number

    def _on_read(self, variable: Any) -> None:
        if id(variable) in self._unknown:
            self._refuse(
                f"the script reads {variable.path!r} after call {self._shown_at} of {self._call.name}, and "
                "the chief has not kept its value for this worker, which joins"
            )

    def _refuse(self, why: str) -> NoReturn:
        """Raise DisagreementError, now and at all further calls, because the script may catch it."""
        self._refusal = DisagreementError(why)
        raise self._refusal

    def _compare_trial(
        self, label: str, created: Mapping[str, str], shown: Mapping[str, str], state: Mapping[str, Any]
    ) -> None:
        if not self._joining.replays:
            super()._compare_trial(label, created, shown, state)
            return
        number, self._trials = self._trials, self._trials + 1
        assert self._joining.log is not None
        trials = self._joining.log.trials
        chief_trial = trials[number] if number < len(trials) else {"call": "none"}
        trial = {"call": label, **created, **shown}
        for name in trial:
            if trial[name] != chief_trial.get(name):
                self._refuse(
                    f"{label}: {name}: {trial[name]} in this worker, which joins, and "
                    f"{chief_trial.get(name)} in the chief"
                )

    def _add(self, update: Update, number: int, shards: Sequence[Shard]) -> None:
        if not self._joining.replays:
            self._worker.servers.add(shards)
        self._pulls = FunctionPulls.of(self._runner.updates)
        self._runner.pulled = self._pulls.variables

    def _remember(self, step: int, scheduled: Scheduled) -> None:
        log = self._joining.log
        if log is None or step >= log.below:
            self._worker.kept[step] = scheduled

    def _make(
        self, kind: CallKind, steps: Sequence[int] = (), name: str = ""
    ) -> tuple[Passed, Sequence[Array]]:
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
        passed = self._worker.ask(AtCall(number, self._scheduled))
        while passed is None:
            passed = self._worker.ask(*self._run(number))
        answer, arrays = passed
        self._until = self._compared(kind, answer).until
        if not answer.state:
            # The script sees the variables of the last call that has shown variables.
            for variable, value in self._shown.values():
                variable.assign(value)
        self._shown.clear()
        if answer.failure is not None:
            self._worker.kept.clear()
        self._assigned = assignments.count()
        return answer, arrays

    def _note_changes(self) -> None:
        """Note the variables that the script has changed since the first call.

        The chief may not have reached this call yet. So a function must not see these changes: in a function,
        variables that the chief does not send with it have their first values.
        """
        others = self._runner.others()
        values = dict(zip(others, self._runner.transfers.read(list(others.values())), strict=True))
        self._first = values | self._first
        self._ahead = frozenset(k for k, value in values.items() if not same_bits(value, self._first[k]))
        self._assigned = assignments.count()

    def _run(self, call: int) -> tuple[WorkDone, Sequence[Array]]:
        """Run the assigned function, and return the message to the chief, with its arrays."""
        worker, scope = self._worker, self._program.scope.variables
        assigned = worker.assigned
        assert assigned is not None
        self._job.replacement = assigned.replacement
        scheduled = worker.kept[assigned.step]
        sent = [int(name) for name in assigned.names]
        unsent = sorted(self._ahead.difference(sent))
        changed = [*self._runner.pulled, *(scope[position] for position in (*sent, *unsent))]
        values = [
            *self._pulled(0),
            *worker.values.values(),
            *(self._first[position] for position in unsent),
        ]
        for variable in changed:
            if id(variable) not in self._shown:
                self._shown[id(variable)] = variable, self._eager.saved_value(variable)
        self._runner.transfers.assign(changed, values)

        def pull_rows(number: int, rows: Array, lookup: int) -> Array:
            return worker.servers.pull_rows(assigned.step, number, rows, lookup)

        def exchange(gradients: Gradients) -> list[Array]:
            worker.push(gradients)
            return self._pulled(gradients.part + 1)

        compilations = self._compilations(scheduled.function)
        run = WorkerFunction(self._runner, scheduled, assigned.step, self._call.seed, pull_rows, exchange)
        done = run.run(AtCall(call, self._scheduled), self._job.worker)
        return worker.end(done, compiled=self._compilations(scheduled.function) != compilations)

    def _compilations(self, function: Any) -> int:
        """Return how many functions were compiled for a scheduled function so far, if Lockstep knows them.

        On TensorFlow, these are the graphs of a `tf.function`, without those of functions that it calls.
        """
        graphs = getattr(function, "experimental_get_tracing_count", None)
        return self._backend.compilations() if graphs is None else graphs()

    def _pulled(self, part: int) -> list[Array]:
        """Return the values of the variables that the assigned function reads from the servers."""
        return self._pulls.values(*self._worker.pull(self._pulls.rows, common=True, part=part))
