"""The chief's side of the workers: hands out steps, and collects what they compute besides gradients.

A thread answers the workers, so that what the chief itself does delays none. The layers' state lives here:
each assignment carries its present values, and each completed step adds its changes.
"""

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy.typing as npt

from lockstep.errors import DisagreementError, PeerLostError, PeerStuckError
from lockstep.parameter_server.assignments import Assignments
from lockstep.parameter_server.order import OrderWriter, Record, RecordedOrder, RecordKind
from lockstep.parameter_server.tasks import Tasks
from lockstep.protocol.parameter_server import Assigned
from lockstep.system.notes import note
from lockstep.transport.array_channel import Asked

Array = npt.NDArray[Any]
Answered = tuple[Any, list[Array]]

_REPORT_EVERY = 5.0
"""Seconds between two notes on what the chief waits for."""

_LOOK_EVERY = 1.0
"""Seconds between two looks whether processes are lost."""

_ANSWERS_WITHIN = 5.0
"""Seconds in which a server answers that it runs, once the chief has waited too long."""

_SHOWN = "`w` in lockstep top shows what a worker does"


class ComputedHere(Protocol):
    """Computes the steps of a recorded call in this process; see `FollowedOrders`."""

    def assign(self, worker: int, assigned: Assigned, layers: Sequence[Array]) -> None:
        """Assign a step to a worker, with the layers' state."""

    def done(self, worker: int, step: int) -> Asked:
        """Return what a worker has told the chief of a step that it has completed."""


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


class Dispatcher(ABC):
    """Answers the workers of one call: what `fit` and scheduled functions have in common.

    Args:
        call: to answer them in.
        unit: names a step in messages.

    Attributes:
        staleness: the staleness of the completed steps, in their order.
        when_completed: called by a thread that waits when steps were completed.
        look: is called every second while the chief waits.
        silent: returns the names of the servers that do not answer within some seconds, once the call fails.
    """

    def __init__(self, call: DispatchedCall, unit: str) -> None:
        self.staleness: list[int] = []
        self.when_completed: Callable[[], object] = lambda: None
        self.look: Callable[[], object] = lambda: None
        self.silent: Callable[[float], Sequence[str]] = lambda _: ()
        self._tasks, self._what, self._unit, self._timeout = call.tasks, call.name, unit, call.timeout
        self._live, self._lost, self._workers = set(call.tasks.workers), call.lost, call.workers
        self._replacements = call.replacements
        self._assignments = Assignments(call.max_staleness)
        self._writer, self._recorded, self._here = call.writer, call.recorded, call.here
        self._inbox: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()
        self._drop = call.drop
        self._changed = threading.Condition()
        self._parked: dict[int, Asked] = {}
        self._arrived: dict[Record, Asked] = {}
        self._followed: dict[int, Answered] = {}
        self._layers: dict[str, Array] | None = None
        self._assigns = True
        self._ended = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="lockstep-coordinator", daemon=True)

    def start(self) -> None:
        """Answer workers from now on."""
        self._thread.start()

    def put(self, asked: Asked) -> None:
        """Take a question of a worker, or its leaving."""
        self._inbox.put(asked)

    def keep(self, processes: Iterable[int]) -> None:
        """Expect only these processes: the others were lost before they could connect."""
        with self._changed:
            self._live &= set(processes)

    def set_layers(self, layers: Mapping[str, Array]) -> None:
        """Set values of the layers' state; steps are assigned from the first call on."""
        with self._changed:
            self._layers = {**(self._layers or {}), **layers}
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
            self._ended = True
            self._pump()
        self._wait(lambda: not self._live, leaving=True)

    def close(self) -> None:
        """End the thread."""
        if self._thread.is_alive():
            self._inbox.put(None)
            self._thread.join()
        self._writer.close()

    @abstractmethod
    def _handle(self, asked: Asked) -> None:
        """Process a question of a worker, and keep it until it can be answered."""

    @abstractmethod
    def _answer(self, process: int, asked: Asked) -> Answered | None:
        """Return the answer to a kept question; None if it has to wait."""

    @abstractmethod
    def _take(self, asked: Asked) -> None:
        """Process a completed step."""

    @abstractmethod
    def _may_assign(self, turn: Record) -> bool:
        """Whether the worker of a recorded assignment waits for it."""

    def _wait(self, over: Callable[[], bool], *, leaving: bool = False) -> None:
        if self._here is not None:
            # No worker has to leave.
            while not leaving and not over():
                self._compute_next(self._here)
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
                        late = f": no {self._unit} was completed {limit}; {silent}{self._in_work()}"
                    raise PeerStuckError(f"{self._what}{late}; {_SHOWN}, and --timeout sets the limit")
                if now - reported > _REPORT_EVERY:
                    reported = now + (now - begun)
                    late = self._left() if leaving else f"no {self._unit} completed; {self._in_work()}"
                    note(f"{self._what}, after {now - begun:.0f} s: {late}")
                for process in self._lost():
                    worker = self._worker(process)
                    self._drop(worker)
                    # It may have been lost before it has connected.
                    self._inbox.put(Asked(process, None, worker=worker))
                self.look()
                self._changed.wait(min(_LOOK_EVERY, self._timeout))

    def _without_workers(self) -> str:
        # The coordinator announces a moment later which server the workers have missed.
        self._changed.wait_for(lambda: False, _LOOK_EVERY)
        tasks = self._tasks
        servers = [tasks.name(process) for process in sorted(self._lost()) if tasks.of(process)[0] == "ps"]
        lost = f"{' and '.join(servers)} ended, and " if servers else ""
        left = f"{lost}{self._silent()}no worker is left to compute gradients"
        return f"{self._what}: {left}; their logs say why"

    def _silent(self) -> str:
        """Return which servers do not answer, for an error; they may be why the chief has waited in vain."""
        names = self.silent(_ANSWERS_WITHIN)
        return f"{' and '.join(names)} do{'es' * (len(names) == 1)} not answer; " if names else ""

    def _left(self) -> str:
        return f"{', '.join(f'worker {self._worker(one)}' for one in sorted(self._live))} did not leave it"

    def _in_work(self) -> str:
        steps = [
            f"worker {self._worker(process)} computes {self._unit} {step + 1}"
            for step, process in self._assignments.in_work().items()
        ]
        if self._recorded is not None and (turn := self._recorded.awaited()) is not None:
            steps.append(
                f"{self._unit} {turn.step + 1} of worker {turn.worker} is next in the recorded order"
            )
        return ", ".join(steps) or f"no worker has begun a {self._unit}"

    def _run(self) -> None:
        while (asked := self._inbox.get()) is not None:
            with self._changed:
                try:
                    if asked.message is not None:
                        self._admit(asked)
                        self._handle(asked)
                    elif asked.worker == self._worker(asked.process):
                        self._lose(asked.process)
                    self._pump()
                except Exception as error:
                    self._failure = error
                self._changed.notify_all()

    def _receive(self, asked: Asked, step: int) -> None:
        """Take a completed step, or hold it until its turn in the recorded order."""
        record = Record(RecordKind.DONE, asked.process, step)
        if self._recorded is None:
            self._take(asked)
        elif self._recorded.has(record):
            self._arrived[record] = asked

    def _worker(self, process: int) -> int:
        """Return the worker id of a process."""
        return self._workers.get(process, process)

    def _admit(self, asked: Asked) -> None:
        """Take in a worker that replaces a lost one."""
        process, worker = asked.process, asked.worker
        # Of a call that begins, a worker may connect before the worker ids of the processes are known.
        if worker not in (self._worker(process), self._replacements.get(process)):
            replaced, self._workers[process] = self._worker(process), worker
            self._live.add(process)
            self._replace(process, worker)
            note(f"{self._what}: worker {worker} takes the place of worker {replaced}")

    def _replace(self, process: int, worker: int) -> None:
        """Note that a worker has taken the place of a lost one."""
        self._replacements[process] = worker
        self._writer.add(RecordKind.JOINED, process, worker)

    def _lose(self, process: int) -> None:
        self._parked.pop(process, None)
        lost = self._assignments.lose(process)
        known = process in self._live
        self._live.discard(process)
        if known and not self._ended:
            numbers = ", ".join(str(step + 1) for step in lost)
            steps = f"; another worker computes {self._unit} {numbers}" if lost else ""
            note(f"{self._what}: worker {self._worker(process)} has ended{steps}")
            step = self._assignments.lost_with_all(self._tasks.workers)
            if step is not None and self._live:
                raise PeerLostError(
                    f"{self._what}: each worker that has computed {self._unit} {step + 1} has ended with it; "
                    "their logs say why"
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
        if self._recorded is not None and self._here is None:
            self._follow(self._recorded)
        for process, asked in list(self._parked.items()):
            if (answer := self._answer(process, asked)) is not None:
                del self._parked[process]
                asked.answer(*answer)

    def _assign(self, worker: int, below: int | None = None) -> Answered | None:
        """Assign a step, perhaps only one below a number, to a worker that waits for one."""
        if self._layers is None or not self._assigns or self._recorded is not None:
            return None
        step = self._assignments.assign(worker, below)
        return None if step is None else self._assigned(worker, step)

    def _assigned(self, worker: int, step: int) -> Answered:
        self._writer.add(RecordKind.ASSIGN, worker, step)
        incomplete = tuple(self._assignments.incomplete_below(step))
        names, arrays = self._layers_for(worker)
        return Assigned(step, incomplete, names, self._replacements.get(worker, -1)), arrays

    def _layers_for(self, worker: int) -> tuple[tuple[str, ...], list[Array]]:
        """Return the layers' state that a worker needs for a step."""
        assert self._layers is not None
        return tuple(self._layers), list(self._layers.values())

    def _compute_next(self, here: ComputedHere) -> None:
        """Process what has its turn in the recorded order, which this process computes.

        Raises:
            DisagreementError: there is no further step.
        """
        recorded = self._recorded
        turn = None if recorded is None else recorded.awaited()
        if (
            recorded is None
            or turn is None
            or turn.kind not in (RecordKind.ASSIGN, RecordKind.DONE, RecordKind.JOINED)
        ):
            raise DisagreementError(
                f"{self._what}: the new run needs a further {self._unit}, which the recorded one has not "
                "computed at this point: the script, its data or its libraries have changed"
            )
        recorded.advance()
        with self._changed:
            if turn.kind is RecordKind.JOINED:
                self._replace(turn.worker, turn.step)
            elif turn.kind is RecordKind.ASSIGN:
                self._assignments.follow(turn.worker, turn.step)
                here.assign(turn.worker, *self._assigned(turn.worker, turn.step))
            else:
                self._take(here.done(turn.worker, turn.step))

    def _follow(self, recorded: RecordedOrder) -> None:
        """Process what has its turn in the recorded order."""
        while (turn := recorded.awaited()) is not None:
            if turn.kind is RecordKind.DONE:
                asked = self._arrived.pop(turn, None)
                if asked is None:
                    return
                self._take(asked)
            elif turn.kind is RecordKind.JOINED:
                self._replace(turn.worker, turn.step)
            elif turn.kind is not RecordKind.ASSIGN or not self._may_assign(turn):
                return
            else:
                self._assignments.follow(turn.worker, turn.step)
                self._followed[turn.worker] = answer = self._assigned(turn.worker, turn.step)
                self._parked.pop(turn.worker).answer(*answer)
            recorded.advance()
