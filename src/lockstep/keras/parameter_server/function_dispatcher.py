"""The chief's side of scheduled functions: which worker runs which, their results, and what all processes
learn.

All processes make the calls of their `ClusterCoordinator` in the same order. The chief makes each call first;
the others wait for it, and learn its result. Workers run functions while they wait.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from lockstep.errors import PeerLostError
from lockstep.keras.parameter_server.dispatcher import Answered, DispatchedCall, Dispatcher
from lockstep.parameter_server.order import Record, RecordKind
from lockstep.protocol.parameter_server import (
    AtCall,
    FunctionFailure,
    FunctionResult,
    FunctionReturned,
    Passed,
)
from lockstep.transport.array_channel import Asked

Array = npt.NDArray[Any]
Found = TypeVar("Found")

MAX_WAITING = 256
"""Functions of each worker that may wait before `schedule` waits."""


def combined(value: Array, start: Array, end: Array) -> Array:
    """Return the value of a variable after a function that has changed it from `start` to `end`.

    If no other function has changed it meanwhile, that is `end`; otherwise the difference is added. What is
    not a finite number has no difference.
    """
    if value.tobytes() == start.tobytes() or value.dtype == np.bool_:
        return end
    if value.dtype.kind not in "iu" and not (np.isfinite(start).all() and np.isfinite(end).all()):
        return end
    return np.asarray(value + (end - start))


@dataclass
class _CallResult:
    """The result of a call, for the processes that have not learned it.

    Attributes:
        passed: the message, of which `until` is not known yet.
        arrays: the arrays of the message.
        takers: the processes that have it.
    """

    passed: Passed
    arrays: Sequence[Array]
    takers: set[int] = field(default_factory=set)


class FunctionDispatcher(Dispatcher):
    """Answers the workers and the servers between calls of the `ClusterCoordinator`; see `Dispatcher`."""

    def __init__(self, call: DispatchedCall) -> None:
        self._passed = 0
        self._calls: dict[int, _CallResult] = {}
        self._results: dict[int, tuple[FunctionResult, list[Array]]] = {}
        self._unwanted: deque[int] = deque()
        self._forgotten: set[int] = set()
        self._failures: dict[int, FunctionFailure] = {}
        self._dropped: dict[int, FunctionFailure] = {}
        self._delivered: set[int] = set()
        self._raised: FunctionFailure | None = None
        self._changed_variables: set[str] = set()
        self._servers = set(map(call.tasks.id_of_server, range(call.tasks.servers)))
        self._expected: dict[int, int] = {}
        self._held: set[int] = set()
        super().__init__(call, "function")
        self._assignments.stop = 0

    def keep(self, processes: Iterable[int]) -> None:
        """Expect only these processes: the others were lost before they could connect."""
        super().keep(processes)
        with self._changed:
            self._servers &= set(processes)

    def begin(self) -> None:
        """Note which workers have taken the place of a lost one since the last functions."""
        with self._changed:
            for process, worker in sorted(self._workers.items()):
                if process in self._live and self._replacements.get(process, process) != worker:
                    self._replace(process, worker)

    @property
    def completed_below(self) -> int:
        """All functions before this one are complete, or dropped."""
        with self._changed:
            return self._assignments.completed_below

    @property
    def expected(self) -> Mapping[int, int]:
        """The workers that have joined and not connected yet, by the processes whose place they take."""
        with self._changed:
            return dict(self._expected)

    def hold(self, processes: Iterable[int]) -> None:
        """Keep what calls find from now on for workers that take the place of these processes."""
        with self._changed:
            self._held = set(processes)

    def expect(self, joined: Mapping[int, int]) -> None:
        """Keep it from now on for workers that have joined, and for no others.

        Args:
            joined: their worker ids, by the processes whose place they take.
        """
        with self._changed:
            self._held.clear()
            new = {process: one for process, one in joined.items() if self._worker(process) != one}
            self._expected.update(new)

    def expect_no_longer(self, lost: Collection[int]) -> None:
        """Expect workers no longer that are lost before they have connected."""
        with self._changed:
            for process, worker in list(self._expected.items()):
                if worker in lost:
                    del self._expected[process]

    def schedule(self, call: int) -> FunctionFailure | None:
        """Add a function, unless an earlier one has failed: then return why.

        Waits while too many functions wait.
        """
        if self._recorded is not None:
            raises = self._recorded.has(Record(RecordKind.RAISE, 0, call))
        else:
            self._wait(lambda: self._raised is not None or self._unfinished() < MAX_WAITING * len(self._live))
            raises = self._raised is not None
        if raises:
            return self._fail(call)
        with self._changed:
            assert self._assignments.stop is not None
            self._assignments.stop += 1
            self._passed = call + 1
            self._pump()
        return None

    def join(self, call: int) -> FunctionFailure | None:
        """Wait until all functions are complete; return why one has failed."""
        if self._recorded is None:
            self._wait(lambda: self._raised is not None or not self._unfinished())
            raises = self._raised is not None
        else:
            raises = self._recorded.has(Record(RecordKind.RAISE, 0, call))
            self._wait(lambda: raises or not self._unfinished())
        return self._fail(call) if raises else None

    def done(self, call: int) -> tuple[bool, FunctionFailure | None]:
        """Return whether all functions are complete, and why one has failed."""
        with self._changed:
            if self._recorded is None and self._raised is None:
                done = not self._unfinished()
                self._writer.add(RecordKind.POLL, int(done), call)
                return done, None
        if self._recorded is None or self._recorded.has(Record(RecordKind.RAISE, 0, call)):
            return False, self._fail(call)
        done = self._recorded.has(Record(RecordKind.POLL, 1, call))
        return self._in_turn(Record(RecordKind.POLL, int(done), call), lambda: (done, None))

    def results(
        self, call: int, steps: Sequence[int]
    ) -> tuple[list[tuple[FunctionResult, list[Array]]], FunctionFailure | None]:
        """Wait for functions; return their results, or why one has failed or was dropped."""

        def known() -> bool:
            return all(step in self._results or self._why(step) for step in steps)

        if self._recorded is None:
            self._wait(lambda: known() or self._raised is not None)
            with self._changed:
                fails = not known()
        else:
            fails = self._recorded.has(Record(RecordKind.RAISE, 0, call))
            self._wait(lambda: fails or known())
        if fails:
            return [], self._fail(call)
        with self._changed:
            failed = next((why for step in steps if (why := self._why(step))), None)
            if failed is not None:
                self._delivered.add(failed.step)
            return ([] if failed else [self._results[step] for step in steps]), failed

    def was_delivered(self, failure: FunctionFailure) -> bool:
        """Whether `results` has returned this failure before."""
        return failure.step in self._delivered

    def remaining(
        self, most: int
    ) -> tuple[dict[int, tuple[FunctionResult, list[Array]]], dict[int, FunctionFailure]]:
        """Return the last results that the program may still need, and why others have none."""
        with self._changed:
            self._forget()
            failures = self._dropped | self._failures
            steps, failed = (sorted(found)[-most:] for found in (self._results, failures))
            return {step: self._results[step] for step in steps}, {step: failures[step] for step in failed}

    def forget(self, step: int) -> None:
        """Forget the result of a function that the program does not need any more.

        The garbage collector calls this, perhaps while this thread changes what the lock protects.
        """
        self._unwanted.append(step)

    def snapshot(self, call: int) -> dict[str, Array]:
        """Return the variables of the chief that functions, or the program, have changed, as they are now."""

        def changed() -> dict[str, Array]:
            assert self._layers is not None
            return {name: self._layers[name] for name in sorted(self._changed_variables, key=int)}

        return self._in_turn(Record(RecordKind.READ, 0, call), changed)

    def add_variables(self, values: Mapping[str, Array]) -> None:
        """Add variables that no process has changed."""
        with self._changed:
            self._layers = {**values, **(self._layers or {})}

    def remove_variables(self, names: Iterable[str]) -> None:
        """Remove variables that are on the servers from now on."""
        with self._changed:
            for name in names:
                self._changed_variables.discard(name)
                if self._layers is not None:
                    self._layers.pop(name, None)

    def write(self, call: int, values: Mapping[str, Array]) -> None:
        """Set variables that the program has changed before a call."""

        def write() -> None:
            self._changed_variables |= values.keys()
            self._layers = {**(self._layers or {}), **values}

        self._in_turn(Record(RecordKind.WRITE, 0, call), write)

    def publish(self, call: int, passed: Passed, arrays: Sequence[Array]) -> None:
        """Let the other processes pass a call with a result."""
        with self._changed:
            if self._here is None:
                self._calls[call] = _CallResult(passed, arrays)
            self._passed = call + 1
            self._pump()

    def leave(self) -> None:
        """Expect that workers leave when they have passed the next call."""
        with self._changed:
            self._ended = True

    def wait_until_taken(self) -> None:
        """Wait until all processes have learned the results of all calls."""
        self._wait(lambda: not self._untaken(), leaving=True)

    def _untaken(self) -> bool:
        return any(self._takers() - one.takers for one in self._calls.values())

    def _takers(self) -> set[int]:
        """Return the processes that take the results of calls."""
        return self._live | self._servers | self._held | self._expected.keys()

    def _why(self, step: int) -> FunctionFailure | None:
        """Return why a function has no result; None if it has, or may still have one."""
        return self._failures.get(step) or self._dropped.get(step)

    def _unfinished(self) -> int:
        assert self._assignments.stop is not None
        return self._assignments.stop - len(self._dropped) - self._assignments.completed

    def _fail(self, call: int) -> FunctionFailure:
        """End the functions in work, and drop those that wait; return what has failed."""

        def fail() -> FunctionFailure:
            failed = self._raised
            if failed is None:
                raise PeerLostError(
                    f"{self._what}: a function has failed in the recorded run, and not in this one"
                )
            self._dropped |= dict.fromkeys(self._assignments.cancel(), failed)
            self._raised = None
            self._assigns = True
            return failed

        if self._recorded is None:
            self._wait(lambda: not self._assignments.in_work())
        return self._in_turn(Record(RecordKind.RAISE, 0, call), fail)

    def _in_turn(self, record: Record, act: Callable[[], Found]) -> Found:
        """Return what `act` returns: at once, or at its turn in the recorded order."""
        recorded = self._recorded
        with self._changed:
            if recorded is not None:
                self._wait(lambda: recorded.awaited() == record)
            self._writer.add(*record)
            found = act()
            if recorded is not None:
                recorded.advance()
            # What comes after it sees what it has done.
            self._pump()
            return found

    def _admit(self, asked: Asked) -> None:
        super()._admit(asked)
        if self._expected.get(asked.process) == asked.worker:
            del self._expected[asked.process]

    def _lose(self, process: int) -> None:
        self._servers.discard(process)
        super()._lose(process)

    def _handle(self, asked: Asked) -> None:
        if isinstance(asked.message, FunctionReturned):
            self._receive(asked, asked.message.step)
        self._parked[asked.process] = asked

    def _take(self, asked: Asked) -> None:
        returned = asked.message
        assert isinstance(returned, FunctionReturned)
        if not self._complete(asked.process, returned.step, returned.staleness):
            return
        assert self._layers is not None
        names = [str(position) for position in returned.changed]
        before, after = asked.arrays[: len(names)], asked.arrays[len(names) : 2 * len(names)]
        for name, start, end in zip(names, before, after, strict=True):
            # A new array: the values of an assignment may still be on their way.
            self._layers[name] = combined(self._layers[name], start, end)
        self._changed_variables |= set(names)
        if returned.failure is not None:
            self._failures[returned.step] = returned.failure
            self._raised = self._raised or returned.failure
            self._assigns = False
        elif returned.result is not None:
            self._results[returned.step] = returned.result, asked.arrays[2 * len(names) :]
        self._forget()

    def _forget(self) -> None:
        while self._unwanted:
            self._forgotten.add(self._unwanted.popleft())
        for step in self._forgotten & self._results.keys():
            self._forgotten.remove(step)
            del self._results[step]

    def _answer(self, process: int, asked: Asked) -> Answered | None:
        message = asked.message
        assert isinstance(message, AtCall | FunctionReturned)
        if self._passed <= message.call:
            return None if process in self._servers else self._assign(process)
        found = self._calls.get(message.call)
        if found is not None and found.passed.kind == "done" and not found.passed.done:
            # A program that polls is always ahead of its workers.
            assigned = None if process in self._servers else self._assign(process, message.scheduled)
            if assigned is not None:
                return assigned
        return self._pass(process, message.call)

    def _pass(self, process: int, call: int) -> Answered:
        later = [number for number in self._calls if number > call]
        until = min(later, default=self._passed)
        if (found := self._calls.get(call)) is None:
            return Passed(until), []
        found.takers.add(process)
        for number, one in list(self._calls.items()):
            if not self._takers() - one.takers:
                del self._calls[number]
        return msgspec.structs.replace(found.passed, until=until), list(found.arrays)

    def _may_assign(self, turn: Record) -> bool:
        asked = self._parked.get(turn.worker)
        if asked is None or self._layers is None:
            return False
        assert self._assignments.stop is not None
        message = asked.message
        assert isinstance(message, AtCall | FunctionReturned)
        held = (
            isinstance(message, FunctionReturned)
            and Record(RecordKind.DONE, turn.worker, message.step) in self._arrived
        )
        return not held and turn.step < min(message.scheduled, self._assignments.stop)

    def _layers_for(self, worker: int) -> tuple[tuple[str, ...], list[Array]]:
        """Return the variables that differ from those at the beginning; in a replay in one process, all."""
        assert self._layers is not None
        names = tuple(self._changed_variables if self._here is None else self._layers)
        return names, [self._layers[name] for name in names]
