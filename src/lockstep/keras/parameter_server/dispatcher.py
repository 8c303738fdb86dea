"""The chief's side of the workers: hands out work, and collects their results other than gradients.

A unit of work is a step of `fit`, or a scheduled function. A thread answers the workers, so they never wait
for the chief's own work. The layers' state, and other variables that functions change, live here. Each
assignment carries their present values, and each completed unit changes them.

All processes make the same calls in the same order. The chief makes each call first. The others wait for it,
and learn its result. Workers work while they wait. In `fit`, the calls are its beginning and the ends of its
epochs. Between two of them, a worker waits whenever it needs a step, so the chief schedules as many steps as
the data has.

Two threads use a `Dispatcher`, under one lock (`_changed`):

* The chief's main thread makes calls: `schedule`, `join`, `publish`, and so on. It waits in `_wait` until a
  condition holds, and checks there for lost processes and for the time limit.
* The dispatcher's own thread (`_run`) processes arrivals: questions of workers, and the ends of their
  connections.

A question that cannot be answered yet is *parked*, at most one for each process, because a process does not
ask anything else while it waits. `_pump` answers all parked questions that can be answered now. Every event
that may make an answer possible calls it: an arrival, a new function, a passed call, an opened epoch. A
process gets one of three answers (`_answer`): the call is over, a unit of work, or the result of the call at
which it waits.

Without a recorded order, work is assigned as workers ask for it. With one (a replay), the same thread follows
the order: a completed unit that is early waits in `_arrived`, and a worker whose assignment is not due stays
parked. Actions of the main thread, such as reading variables or raising an exception, are also in the order,
so `_in_turn` waits for their turn. In a replay in one process there are no workers and no second
thread: `_wait` itself processes the next record (`_compute_next`) until its condition holds.

A result of a call stays in `_calls` until all processes that need it have learned it (`_learners`). These
include processes that are to join: from the moment at which the chief has given a joiner its log, until the
joiner connects, the results since then are kept for it. Until the view that admits it is announced, it has no
worker id, so the process that it will replace is *held*. Afterwards it is *expected*.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from lockstep.errors import DisagreementError, PeerLostError, PeerStuckError
from lockstep.parameter_server.assignments import Assignments
from lockstep.parameter_server.order import OrderWriter, Record, RecordedOrder, RecordKind
from lockstep.parameter_server.tasks import Tasks
from lockstep.protocol.parameter_server import (
    Assigned,
    AtCall,
    FunctionFailure,
    FunctionResult,
    Passed,
    WorkDone,
)
from lockstep.system.notes import note
from lockstep.transport.array_channel import QuestionArrival

Array = npt.NDArray[Any]
Answered = tuple[Any, list[Array]]
Result = TypeVar("Result")

MAX_WAITING = 256
"""Functions of each worker that may wait before `schedule` waits."""

_REPORT_EVERY = 5.0
"""Seconds between two notes on what the chief waits for."""

_LOOK_EVERY = 1.0
"""Seconds between two checks for lost processes."""

_ANSWERS_WITHIN = 5.0
"""Seconds for a server to answer that it runs, once the chief has waited too long."""

_SHOWN = "`w` in lockstep top shows what a worker does"


class ComputedHere(Protocol):
    """Computes the steps of a recorded call in this process, without workers; see `FollowedOrders`."""

    def assign(self, worker: int, assigned: Assigned, layers: Sequence[Array]) -> None:
        """Assign a step to a worker, with the layers' state."""

    def done(self, worker: int, step: int) -> QuestionArrival:
        """Compute a step, and return the message that its worker sent to the chief at its end."""


@dataclass(frozen=True)
class DispatchedCall:
    """A call whose steps the chief hands out.

    Attributes:
        tasks: the tasks of the job.
        name: the name of the call in messages.
        max_staleness: see `Assignments`.
        writer: records the order.
        recorded: the order to follow; None for the order of arrival.
        timeout: seconds without a completed step after which a worker counts as stuck.
        drop: ends the connections of a worker id that is lost.
        lost: returns the processes that the coordinator has announced as lost.
        workers: the worker ids of the call's processes, which others replace.
        replacements: see `Job`.
        here: computes the steps in a replay; None if workers do.
    """

    tasks: Tasks
    name: str
    max_staleness: int | None
    writer: OrderWriter
    recorded: RecordedOrder | None
    timeout: float
    drop: Callable[[int], object] = lambda _: None
    lost: Callable[[], frozenset[int]] = frozenset
    workers: dict[int, int] = field(default_factory=dict)
    replacements: dict[int, int] = field(default_factory=dict)
    here: ComputedHere | None = None


def combined(value: Array, start: Array, end: Array) -> Array:
    """Return the value of a variable after a function that has changed it from `start` to `end`.

    If no other function has changed the variable meanwhile, the value is `end`. Otherwise the difference is
    added. Values that are not finite do not have a difference, so the last value counts.
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
        passed: the message. Its `until` is set when it is sent.
        arrays: the arrays of the message.
        learned_by: the processes that have it.
    """

    passed: Passed
    arrays: Sequence[Array]
    learned_by: set[int] = field(default_factory=set)


class Dispatcher:
    """Answers the workers of one call of `fit`, or the workers and servers of scheduled functions.

    Args:
        call: the call.
        scheduled: whether the work consists of functions that the program schedules.

    Attributes:
        unit: the name of a unit of work in messages.
        staleness: the staleness of the completed steps, in their order.
        when_completed: called by the waiting thread when steps have been completed.
        look: called every second while the chief waits.
        silent: returns the names of the servers that do not answer within some seconds, if the call fails.
    """

    def __init__(self, call: DispatchedCall, *, scheduled: bool = False) -> None:
        self.staleness: list[int] = []
        self.when_completed: Callable[[], object] = lambda: None
        self.look: Callable[[], object] = lambda: None
        self.silent: Callable[[float], Sequence[str]] = lambda _: ()
        self._tasks, self._call_name, self._timeout = call.tasks, call.name, call.timeout
        self.unit = "function" if scheduled else "step"
        self._live, self._lost, self._workers = set(call.tasks.workers), call.lost, call.workers
        self._replacements = call.replacements
        self._assignments = Assignments(call.max_staleness, 0 if scheduled else None)
        self._writer, self._recorded, self._here = call.writer, call.recorded, call.here
        self._inbox: queue.SimpleQueue[QuestionArrival | None] = queue.SimpleQueue()
        self._drop = call.drop
        self._changed = threading.Condition()
        self._parked: dict[int, QuestionArrival] = {}
        self._arrived: dict[Record, QuestionArrival] = {}
        self._followed: dict[int, Answered] = {}
        self._layers: dict[str, Array] | None = None
        self._assigns = True
        self._ended = self._over = False
        self._passed = 0
        self._first: int | None = None
        self._logs: deque[Mapping[str, Array]] = deque()
        self._checks: dict[int, tuple[int, bytes]] = {}
        servers = map(call.tasks.id_of_server, range(call.tasks.servers))
        self._servers = set(servers) if scheduled else set[int]()
        self._calls: dict[int, _CallResult] = {}
        self._results: dict[int, tuple[FunctionResult, list[Array]]] = {}
        self._unwanted: deque[int] = deque()
        self._forgotten: set[int] = set()
        self._failures: dict[int, FunctionFailure] = {}
        self._dropped: dict[int, FunctionFailure] = {}
        self._delivered: set[int] = set()
        self._raised: FunctionFailure | None = None
        self._changed_variables: set[str] = set()
        self._expected: dict[int, int] = {}
        self._held: set[int] = set()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="lockstep-coordinator", daemon=True)

    def start(self) -> None:
        """Answer workers from now on."""
        self._thread.start()

    def put(self, arrival: QuestionArrival) -> None:
        """Receive a question of a worker, or the end of its questions."""
        self._inbox.put(arrival)

    def keep(self, processes: Iterable[int]) -> None:
        """Expect only these processes: the others were lost before they could connect."""
        with self._changed:
            self._live &= set(processes)
            self._servers &= set(processes)

    def set_layers(self, layers: Mapping[str, Array]) -> None:
        """Set values of the layers' state. Steps are assigned from the first call of this method on."""
        with self._changed:
            self._layers = {**(self._layers or {}), **layers}
            self._changed_variables |= layers.keys()
            self._pump()

    @property
    def completed(self) -> int:
        """The number of completed steps."""
        return self._assignments.completed

    @property
    def layers(self) -> Mapping[str, Array]:
        """The present values of the layers' state."""
        with self._changed:
            return dict(self._layers or {})

    def finish(self) -> None:
        """End the call for the workers, and wait until they have left."""
        with self._changed:
            self._ended = self._over = True
            self._pump()
        self._wait(lambda: not self._live, leaving=True)

    def close(self) -> None:
        """End the thread."""
        if self._thread.is_alive():
            self._inbox.put(None)
            self._thread.join()
        self._writer.close()

    def open(self, epoch: int) -> None:
        """Let workers begin an epoch."""
        with self._changed:
            self._passed = epoch + 1
            self._first = self._passed if self._first is None else self._first
            self._pump()

    def result(self) -> Mapping[str, Array]:
        """Wait for the next completed step, in the order of completion, and return its arrays.

        Raises:
            PeerLostError: no worker is left.
            PeerStuckError: no step was completed in time.
        """
        self._wait(lambda: bool(self._logs))
        return self._logs.popleft()

    def pop_check(self, step: int) -> tuple[int, bytes] | None:
        """Return the worker that has computed a step and its hash of the batch, and forget them, or None."""
        with self._changed:
            return self._checks.pop(step, None)

    def drain(self) -> None:
        """Assign no more steps, and wait until those in progress are complete, or lost with their worker."""
        with self._changed:
            self._assigns = False
        recorded = self._recorded
        if recorded is not None:
            # Steps that are lost with a worker then are not in the order.
            self._wait(lambda: recorded.awaited() is None)
        else:
            self._wait(lambda: not self._assignments.in_work())

    def begin(self) -> None:
        """Record which workers have replaced lost ones since the last functions."""
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
        """The workers that have joined but not yet connected, by the processes that they replace."""
        with self._changed:
            return dict(self._expected)

    def hold(self, processes: Iterable[int]) -> None:
        """From now on, keep the results of calls for workers that will replace these processes."""
        with self._changed:
            self._held = set(processes)

    def expect(self, joined: Mapping[int, int]) -> None:
        """From now on, keep results for workers that have joined, instead of the processes of `hold`.

        Args:
            joined: the ids of these workers, by the processes that they replace.
        """
        with self._changed:
            self._held.clear()
            new = {process: worker for process, worker in joined.items() if self._worker(process) != worker}
            self._expected.update(new)

    def expect_no_longer(self, lost: Collection[int]) -> None:
        """Stop expecting workers that were lost before they connected."""
        with self._changed:
            for process, worker in list(self._expected.items()):
                if worker in lost:
                    del self._expected[process]

    def schedule(self, call: int) -> FunctionFailure | None:
        """Add a function. If an earlier one has failed, return its failure instead.

        This waits while too many functions wait.
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
        """Wait until all functions are complete, and return the failure of one, if one has failed."""
        if self._recorded is None:
            self._wait(lambda: self._raised is not None or not self._unfinished())
            raises = self._raised is not None
        else:
            raises = self._recorded.has(Record(RecordKind.RAISE, 0, call))
            self._wait(lambda: raises or not self._unfinished())
        return self._fail(call) if raises else None

    def done(self, call: int) -> tuple[bool, FunctionFailure | None]:
        """Return whether all functions are complete, and the failure of one, if one has failed."""
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
        """Wait for functions, and return their results, or why one has failed or was dropped."""

        def ready() -> bool:
            return all(step in self._results or self._why(step) for step in steps)

        if self._recorded is None:
            self._wait(lambda: ready() or self._raised is not None)
            with self._changed:
                fails = not ready()
        else:
            fails = self._recorded.has(Record(RecordKind.RAISE, 0, call))
            self._wait(lambda: fails or ready())
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
        """Return the last results that the program may still need, and the failures of other functions."""
        with self._changed:
            self._forget()
            failures = self._dropped | self._failures
            steps, failed = (sorted(numbers)[-most:] for numbers in (self._results, failures))
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

    def wait_until_learned(self) -> None:
        """Wait until all processes have learned the results of all calls."""
        self._wait(lambda: not self._unlearned(), leaving=True)

    def _unlearned(self) -> bool:
        return any(self._learners() - result.learned_by for result in self._calls.values())

    def _learners(self) -> set[int]:
        """Return the processes that need the results of calls."""
        return self._live | self._servers | self._held | self._expected.keys()

    def _why(self, step: int) -> FunctionFailure | None:
        """Return why a function will never have a result, or None if it may have one."""
        return self._failures.get(step) or self._dropped.get(step)

    def _unfinished(self) -> int:
        assert self._assignments.stop is not None
        return self._assignments.stop - len(self._dropped) - self._assignments.completed

    def _fail(self, call: int) -> FunctionFailure:
        """Wait for the functions in progress, and drop those that wait; return the failure."""

        def fail() -> FunctionFailure:
            failed = self._raised
            if failed is None:
                raise DisagreementError(
                    f"{self._call_name}: a function has failed in the recorded run, and not in the new one: "
                    "the script, its data or its libraries have changed"
                )
            self._dropped |= dict.fromkeys(self._assignments.cancel(), failed)
            self._raised = None
            self._assigns = True
            return failed

        if self._recorded is None:
            self._wait(lambda: not self._assignments.in_work())
        return self._in_turn(Record(RecordKind.RAISE, 0, call), fail)

    def _in_turn(self, record: Record, act: Callable[[], Result]) -> Result:
        """Return what `act` returns: at once, or at its turn in the recorded order."""
        recorded = self._recorded
        with self._changed:
            if recorded is not None:
                self._wait(lambda: recorded.awaited() == record)
            self._writer.add(*record)
            result = act()
            if recorded is not None:
                recorded.advance()
            # Everything that follows in the order sees the effects of `act`.
            self._pump()
            return result

    def _wait(self, over: Callable[[], bool], *, leaving: bool = False) -> None:
        if self._here is not None:
            # There are no workers that could leave.
            while not leaving and not over():
                self._compute_next()
            return
        with self._changed:
            begun = reported = time.monotonic()
            before = self._assignments.completed
            while not over():
                if self._failure is not None:
                    raise self._failure
                if not self._live and not leaving:
                    raise PeerLostError(self._without_workers())
                if self._assignments.completed > before:
                    before = self._assignments.completed
                    begun = reported = time.monotonic()
                    self.when_completed()
                now = time.monotonic()
                if now - begun > self._timeout:
                    limit, silent = f"for {self._timeout:g} s", self._silent()
                    if leaving:
                        late = f" has ended, but {silent}{self._left()} {limit}"
                    else:
                        late = f": no {self.unit} was completed {limit}; {silent}{self._in_work()}"
                    raise PeerStuckError(f"{self._call_name}{late}; {_SHOWN}, and --timeout sets the limit")
                if now - reported > _REPORT_EVERY:
                    reported = now + (now - begun)
                    late = self._left() if leaving else f"no {self.unit} completed; {self._in_work()}"
                    note(f"{self._call_name}, after {now - begun:.0f} s: {late}")
                for process in self._lost():
                    worker = self._worker(process)
                    self._drop(worker)
                    # It may have been lost before it connected.
                    self._inbox.put(QuestionArrival(process, None, worker=worker))
                self.look()
                self._changed.wait(min(_LOOK_EVERY, self._timeout))

    def _without_workers(self) -> str:
        # Workers end when a server is lost. The coordinator announces the loss of the server a moment later.
        self._changed.wait_for(lambda: False, _LOOK_EVERY)
        tasks = self._tasks
        servers = [tasks.name(process) for process in sorted(self._lost()) if tasks.of(process)[0] == "ps"]
        lost = f"{' and '.join(servers)} ended, and " if servers else ""
        left = f"{lost}{self._silent()}no worker is left to compute gradients"
        return f"{self._call_name}: {left}; their logs say why"

    def _silent(self) -> str:
        """Return a part of a message: the servers that do not answer, for which the chief may be waiting."""
        names = self.silent(_ANSWERS_WITHIN)
        return f"{' and '.join(names)} do{'es' * (len(names) == 1)} not answer; " if names else ""

    def _left(self) -> str:
        workers = [f"worker {self._worker(process)}" for process in sorted(self._live)]
        return f"{', '.join(workers)} did not leave it"

    def _in_work(self) -> str:
        steps = [
            f"worker {self._worker(process)} computes {self.unit} {step + 1}"
            for step, process in self._assignments.in_work().items()
        ]
        if self._recorded is not None and (turn := self._recorded.awaited()) is not None:
            steps.append(f"{self.unit} {turn.step + 1} of worker {turn.worker} is next in the recorded order")
        return ", ".join(steps) or f"no worker has begun a {self.unit}"

    def _run(self) -> None:
        while (arrival := self._inbox.get()) is not None:
            with self._changed:
                try:
                    if arrival.message is not None:
                        self._admit(arrival)
                        self._handle(arrival)
                    elif arrival.worker == self._worker(arrival.process):
                        self._lose(arrival.process)
                    self._pump()
                except Exception as error:
                    self._failure = error
                self._changed.notify_all()

    def _handle(self, arrival: QuestionArrival) -> None:
        """Process a question of a worker, and park it until it can be answered."""
        process = arrival.process
        match arrival.message:
            case WorkDone(step=step):
                followed = self._followed.get(process)
                if followed is not None and followed[0].step == step:
                    del self._followed[process]
                record = Record(RecordKind.DONE, process, step)
                if self._recorded is None:
                    self._process_done(arrival)
                elif self._recorded.has(record):
                    self._arrived[record] = arrival
            case AtCall(scheduled=scheduled) if scheduled > 0 and not self._is_ahead(process):
                self._assignments.give_back(process, scheduled)
        self._parked[process] = arrival

    def _is_ahead(self, process: int) -> bool:
        """Whether a worker that follows a recorded order keeps a step of an epoch that it has not begun.

        In the recorded run, the step belonged to a worker that had replaced a lost one and was further ahead.
        If the next record of that worker is not another assignment, it completed the step, or was lost with
        it. So this worker has to keep the step. Otherwise it gives the step back, as in the recorded run.
        Other workers may already have computed the step here.
        """
        if self._recorded is None or process not in self._followed:
            return False
        following = self._recorded.next_of(process)
        return following is None or following.kind is not RecordKind.ASSIGN

    def _process_done(self, arrival: QuestionArrival) -> None:
        """Process a completed unit of work."""
        done = arrival.message
        assert isinstance(done, WorkDone)
        if not self._complete(arrival.process, done.step, done.staleness):
            return
        assert self._layers is not None
        # New arrays are necessary, because the values of an assignment may still be on their way.
        count = len(done.changed)
        before, after, others = (
            arrival.arrays[:count],
            arrival.arrays[count : 2 * count],
            arrival.arrays[2 * count :],
        )
        for name, start, end in zip(done.changed, before, after, strict=True):
            self._layers[name] = combined(self._layers[name], start, end)
        self._changed_variables |= set(done.changed)
        if done.failure is not None:
            self._failures[done.step] = done.failure
            self._raised = self._raised or done.failure
            self._assigns = False
        elif done.result is not None:
            self._results[done.step] = done.result, others
        else:
            logs = dict(zip(done.names, others, strict=True))
            for name in self._layers.keys() & logs.keys():
                self._layers[name] = self._layers[name] + logs.pop(name)
            self._checks[done.step] = arrival.process, done.check
            self._logs.append(logs)
        self._forget()

    def _forget(self) -> None:
        while self._unwanted:
            self._forgotten.add(self._unwanted.popleft())
        for step in self._forgotten & self._results.keys():
            self._forgotten.remove(step)
            del self._results[step]

    def _answer(self, process: int, arrival: QuestionArrival) -> Answered | None:
        """Return the answer to a parked question, or None if it has to wait."""
        at = _call_of(arrival)
        if self._over:
            return Passed(0, kind="close"), []
        if at.call < 0 or self._passed <= at.call:
            if process in self._servers:
                return None
            if isinstance(arrival.message, AtCall) and at.call < 0 and self._is_ahead(process):
                return self._followed[process]
            return self._assign(process, at.scheduled)
        result = self._calls.get(at.call)
        if result is not None and result.passed.kind == "done" and not result.passed.done:
            # The chief of a program that polls `done` is always a call ahead, so its workers would never
            # work.
            assigned = None if process in self._servers else self._assign(process, at.scheduled)
            if assigned is not None:
                return assigned
        return self._pass(process, at.call)

    def _pass(self, process: int, call: int) -> Answered:
        if self._first is not None and not call:
            return Passed(self._first, completed=self._assignments.completed_below), []
        later = [number for number in self._calls if number > call]
        until = min(later, default=self._passed)
        if (result := self._calls.get(call)) is None:
            return Passed(until), []
        result.learned_by.add(process)
        for number, other in list(self._calls.items()):
            if not self._learners() - other.learned_by:
                del self._calls[number]
        return msgspec.structs.replace(result.passed, until=until), list(result.arrays)

    def _may_assign(self, turn: Record) -> bool:
        """Whether the worker of a recorded assignment waits for it."""
        arrival = self._parked.get(turn.worker)
        if arrival is None or self._layers is None or self._over:
            return False
        message, at = arrival.message, _call_of(arrival)
        if (
            isinstance(message, WorkDone)
            and Record(RecordKind.DONE, turn.worker, message.step) in self._arrived
        ):
            return False
        bounds = [at.scheduled] if at.scheduled >= 0 else []
        if self._assignments.stop is not None:
            bounds.append(self._assignments.stop)
        return all(turn.step < bound for bound in bounds)

    def _worker(self, process: int) -> int:
        """Return the worker id of a process."""
        return self._workers.get(process, process)

    def _admit(self, arrival: QuestionArrival) -> None:
        """Accept a worker that replaces a lost one."""
        process, worker = arrival.process, arrival.worker
        # At the beginning of a call, a worker may connect before the worker ids of the processes are known.
        if worker not in (self._worker(process), self._replacements.get(process)):
            replaced, self._workers[process] = self._worker(process), worker
            self._live.add(process)
            self._replace(process, worker)
            note(f"{self._call_name}: worker {worker} replaces worker {replaced}")
        if self._expected.get(process) == worker:
            del self._expected[process]

    def _replace(self, process: int, worker: int) -> None:
        """Record that a worker has replaced a lost one."""
        self._replacements[process] = worker
        self._writer.add(RecordKind.JOINED, process, worker)

    def _lose(self, process: int) -> None:
        self._parked.pop(process, None)
        self._servers.discard(process)
        lost = self._assignments.lose(process)
        was_live = process in self._live
        self._live.discard(process)
        if was_live and not self._ended:
            numbers = ", ".join(str(step + 1) for step in lost)
            steps = f"; another worker computes {self.unit} {numbers}" if lost else ""
            note(f"{self._call_name}: worker {self._worker(process)} has ended{steps}")
            step = self._assignments.lost_with_all(self._tasks.workers)
            if step is not None and self._live:
                raise PeerLostError(
                    f"{self._call_name}: each worker that has computed {self.unit} {step + 1} has ended with "
                    "it; their logs say why"
                )

    def _complete(self, worker: int, step: int, staleness: int) -> bool:
        """Complete a step; return False if another worker computes it."""
        if not self._assignments.complete(worker, step):
            return False
        self._writer.add(RecordKind.DONE, worker, step)
        self.staleness.append(staleness)
        return True

    def _pump(self) -> None:
        """Answer everything that can be answered."""
        while self._here is None and self._take_turn():
            pass
        for process, arrival in list(self._parked.items()):
            if (answer := self._answer(process, arrival)) is not None:
                del self._parked[process]
                arrival.answer(*answer)

    def _assign(self, worker: int, below: int) -> Answered | None:
        """Assign a unit of work below a number, unless that is -1, to a worker that waits for one."""
        if self._layers is None or not self._assigns or self._recorded is not None:
            return None
        step = self._assignments.assign(worker, below if below >= 0 else None)
        return None if step is None else self._assigned(worker, step)

    def _assigned(self, worker: int, step: int) -> Answered:
        self._writer.add(RecordKind.ASSIGN, worker, step)
        incomplete = tuple(self._assignments.incomplete_below(step))
        assert self._layers is not None
        # Workers have the other variables from the beginning. A replay in one process also changes the
        # variables that it would have from the beginning, so it needs all of them.
        layers = {k: v for k, v in self._layers.items() if self._here or k in self._changed_variables}
        replacement = self._replacements.get(worker, -1)
        return Assigned(step, incomplete, tuple(layers), replacement), list(layers.values())

    def _compute_next(self) -> None:
        """Process the next record of the recorded order, whose work this process computes.

        Raises:
            DisagreementError: no work is left.
        """
        with self._changed:
            if not self._take_turn():
                raise DisagreementError(
                    f"{self._call_name}: the new run needs another {self.unit}, which the recorded one did "
                    "not compute at this point: the script, its data or its libraries have changed"
                )

    def _take_turn(self) -> bool:
        """Process the next record of the recorded order, and return whether it was due."""
        recorded, here = self._recorded, self._here
        turn = None if recorded is None else recorded.awaited()
        if recorded is None or turn is None:
            return False
        match turn.kind:
            case RecordKind.JOINED:
                self._replace(turn.worker, turn.step)
            case RecordKind.ASSIGN if here is not None or self._may_assign(turn):
                self._assignments.follow(turn.worker, turn.step)
                answer = self._assigned(turn.worker, turn.step)
                if here is not None:
                    here.assign(turn.worker, *answer)
                else:
                    self._followed[turn.worker] = answer
                    self._parked.pop(turn.worker).answer(*answer)
            case RecordKind.DONE if here is not None or turn in self._arrived:
                self._process_done(
                    self._arrived.pop(turn) if here is None else here.done(turn.worker, turn.step)
                )
            case _:
                return False
        recorded.advance()
        return True


def _call_of(arrival: QuestionArrival) -> AtCall:
    """Return the call at which the process of a question waits."""
    message = arrival.message
    assert isinstance(message, AtCall | WorkDone)
    return message.at if isinstance(message, WorkDone) else message


def as_arrays(values: Mapping[str, Any], to_numpy: Any) -> dict[str, Array]:
    """Return copies of a backend's values as arrays of NumPy."""
    return {name: np.array(to_numpy(value)) for name, value in values.items()}
