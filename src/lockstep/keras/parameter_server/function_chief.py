"""The chief in the calls of a `ClusterCoordinator`: decides on each call, and lets workers join."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.keras import assignments
from lockstep.keras.backends.multi_update import Update
from lockstep.keras.parameter_server.chief import Chief
from lockstep.keras.parameter_server.followed_orders import FollowedOrders
from lockstep.keras.parameter_server.function_calls import (
    MOST_KEPT,
    CallKind,
    FunctionCalls,
    ScheduleContext,
    Scheduled,
)
from lockstep.keras.parameter_server.function_log import CallOutcome, of_scope, of_servers
from lockstep.keras.parameter_server.process import TaskProcess
from lockstep.keras.parameter_server.served_optimizers import slots_of_all
from lockstep.keras.parameter_server.server_tables import server_table
from lockstep.keras.parameter_server.servers import same_bits
from lockstep.parameter_server.partitioners import Shard
from lockstep.protocol.parameter_server import FunctionFailure, FunctionResult, Passed

Array = npt.NDArray[Any]


class ChiefCalls(FunctionCalls):
    """The calls of the chief, which decides on them."""

    def __init__(self, program: ScheduleContext) -> None:
        super().__init__(program)
        self._process = TaskProcess(self._job, self._call, "chief")
        self._chief: Chief | None = None
        self._others: dict[int, Array] = {}
        self._learned = True
        self._assigned = self._measured = 0
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
        if self._chief is not None:
            self._chief.dispatcher.forget(step)

    def _end(self) -> None:
        """End the calls, when none of their functions is running."""
        self._reads.end()
        if self._chief is None:
            return
        self._ending = True
        self._chief.dispatcher.wait_until_learned()
        self._chief.end()
        self._process.close()
        self._chief.close()

    def _leave(self) -> None:
        if self._chief is not None:
            self._chief.dispatcher.leave()

    def _open(self) -> None:
        self._chief = Chief(
            self._process, self._program.options.max_staleness, self._orders(), scheduled=True
        )
        self._chief.begin()
        dispatcher = self._chief.dispatcher
        if self._process.recorded is None:
            dispatcher.begin()
        dispatcher.look = self._look
        dispatcher.when_completed = self._measure_completed

    def _orders(self) -> FollowedOrders | None:
        """Return the orders that this process follows, if it also runs the functions; see `Chief`."""
        return None

    def _look(self) -> None:
        """Let workers join that replace lost ones, while the chief is at a call."""
        dispatcher, network = self._begun.dispatcher, self._job.peers
        if self._process.recorded is not None:
            self._job.joiners.admit_none("a replay has the processes of its run")
            return
        if self._handed is not None:
            view, lost, old_workers = self._handed
            number, workers = network.announced()
            if number > view:
                self._handed = None
                dispatcher.expect(dict(zip(lost, sorted({*workers} - old_workers), strict=False)))
        if expected := dispatcher.expected:
            dispatcher.expect_no_longer(network.lost_workers(expected.values()))
        if self._handed is not None or self._ending:
            return
        self._note_reads()
        if self._joining.log is not None:
            self._joining.log.below = dispatcher.completed_below
        sent_peers: list[dict[str, Any]] = []

        def send_peers() -> dict[str, Any]:
            sent_peers.append(self._peers())
            return sent_peers[-1]

        if (joined := self._joining.admit(send_peers)) is not None:
            (peers,) = sent_peers
            self._handed = joined, peers["lost"], frozenset(peers["workers"].values())
            dispatcher.hold(peers["lost"])

    def _peers(self) -> dict[str, Any]:
        """Return the facts about the processes that a joiner needs."""
        expected, peers = self._begun.dispatcher.expected, self._process.mesh.peers()
        peers["workers"] |= expected
        peers["lost"] = [process for process in peers["lost"] if process not in expected]
        return peers

    def _on_read(self, variable: Any) -> None:
        self._read[id(variable)] = variable

    def _note_reads(self) -> None:
        """Record in the log which variables the script has read since the last call."""
        log = self._joining.log
        if log is None or not self._read:
            return
        scope, served = (
            self._program.scope,
            {id(variable): i for i, variable in enumerate(self._runner.served)},
        )
        for key, variable in self._read.items():
            if key in served:
                log.note_read(of_servers(served[key]))
            if (position := scope.position(variable)) is not None:
                log.note_read(of_scope(position))
        self._read.clear()

    def _note_call(
        self, kind: CallKind, name: str, passed: Passed | None = None, arrays: Sequence[Array] = ()
    ) -> None:
        """Record a call in the log, with its outcome, if it has one."""
        if (log := self._joining.log) is None:
            return
        label = f"schedule of {name}" if kind == "schedule" else kind
        if passed is None:
            log.add(label)
            return
        count = len(self._runner.served) if passed.state else 0
        values = {of_servers(i): array for i, array in enumerate(arrays[:count])}
        values |= {
            of_scope(position): array
            for position, array in zip(passed.variables, arrays[count:], strict=False)
        }
        log.add(label, CallOutcome(passed, arrays[count + len(passed.variables) :], values))
        self._joining.limit_memory()

    def _compare_trial(
        self, label: str, created: Mapping[str, str], shown: Mapping[str, str], state: Mapping[str, Any]
    ) -> None:
        super()._compare_trial(label, created, shown, state)
        if self._joining.log is not None:
            self._joining.log.trials.append({"call": label, **created, **shown})

    def _add(self, update: Update, number: int, shards: Sequence[Shard]) -> None:
        chief = self._begun
        chief.servers.add(shards)
        gone = [self._program.scope.position(variable) for variable in update.changed]
        positions = [position for position in gone if position is not None]
        chief.dispatcher.remove_variables(map(str, positions))
        for position in positions:
            self._others.pop(position, None)
        # These are the slots of all optimizers that the trial has shown. This one may not be the last.
        chief.served_state.slots = [slot for slots in slots_of_all(self._runner.updates) for slot in slots]
        chief.served_state.weights += map(self._array, update.variables)
        chief.served_state.values += map(self._array, update.optimizer.variables)

    def _remember(self, step: int, scheduled: Scheduled) -> None:
        """Do nothing: the chief runs no functions."""

    def _make(
        self, kind: CallKind, steps: Sequence[int] = (), name: str = ""
    ) -> tuple[Passed, Sequence[Array]]:
        dispatcher = self._begun.dispatcher
        self._job.timer.lap("other")
        self._job.timer.begin(self._call.name)
        self._look()
        self._note_reads()
        if self._tables is not None:
            self._tables.within = self._begun.servers.channels
        number, self._calls = self._calls, self._calls + 1
        # Changes that the script makes without Keras's `assign` are found at the next call that is not
        # `schedule`.
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
            until=number + 1,
            kind=kind,
            state=shows,
            variables=positions,
            done=done,
            results=tuple(result for result, _ in results),
            steps=tuple(remaining),
            failures=tuple(failures.items()),
            failure=failure,
        )
        arrays = [*arrays, *(array for _, result_arrays in results for array in result_arrays)]
        dispatcher.publish(number, passed, arrays)
        self._note_call(kind, name, passed if shows else None, arrays)
        return passed, arrays

    def _measure_completed(self) -> None:
        """Measure the functions that were completed since the last time. The chief waits for them."""
        self._job.timer.lap("wait")
        while self._measured < self._begun.dispatcher.completed:
            self._measured += 1
            self._job.timer.end(self._measured, trained=self._trained + self._measured)

    def _state(self, number: int) -> tuple[tuple[int, ...], list[Array]]:
        """Return the variables as they are now: the positions of the chief's variables, and all arrays."""
        chief = self._begun
        others = {int(position): array for position, array in chief.dispatcher.snapshot(number).items()}
        chief.served_state.read(chief.servers, number)
        for variable, digest in chief.servers.digests.items():
            table = server_table(self._runner.served[variable])
            assert table is not None
            position = self._program.scope.position(table.digest_variable)
            assert position is not None
            others[position] = digest.view(np.int32)
        self._others |= others
        self._learned = True
        return tuple(others), [*chief.served_state.weights, *chief.served_state.values, *others.values()]

    def _write_changes(self, number: int) -> None:
        """Give servers and workers the variables that the program has changed since it last learned them."""
        chief = self._begun
        now = [self._eager.to_numpy(variable.value) for variable in self._runner.served]
        weights = len(chief.served_state.weights)
        chief.served_state.write_changes(chief.servers, number, now[:weights], now[weights:])
        arrays = {position: self._array(variable) for position, variable in self._runner.others().items()}
        new = {position: array for position, array in arrays.items() if position not in self._others}
        chief.dispatcher.add_variables({str(position): array for position, array in new.items()})
        written = {
            str(position): array
            for position, array in arrays.items()
            if position not in new and not same_bits(array, self._others[position])
        }
        if written:
            chief.dispatcher.write(number, written)
        self._others = arrays

    @property
    def _begun(self) -> Chief:
        """The chief, after its calls have begun."""
        assert self._chief is not None
        return self._chief

    def _array(self, variable: Any) -> Array:
        return np.array(self._eager.to_numpy(variable.value))
