"""The chief's side of the workers: hands out steps, and collects what they compute besides gradients.

A thread answers the workers, so that callbacks and evaluations do not delay them. The layers' state lives
here: each assignment carries its present values, and each completed step adds its changes.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.errors import PeerLostError, PeerStuckError
from lockstep.parameter_server.assignments import Assignments
from lockstep.parameter_server.order import Kind, OrderWriter, Record, RecordedOrder
from lockstep.parameter_server.tasks import Tasks
from lockstep.protocol.parameter_server import Assigned, Begin, Done, Ended, Enter, EpochDone, Next, Opened
from lockstep.system.notes import note
from lockstep.transport.array_channel import AnsweringEnd, Asked

Array = npt.NDArray[Any]

_REPORT_EVERY = 5.0
"""Seconds between two notes on what the chief waits for."""


class StepDispatcher:
    """Answers the workers of one call of `fit`.

    Args:
        tasks: of the job.
        workers: the ids of the workers that are alive.
        what: names the call in messages.
        max_staleness: see `Assignments`.
        writer: records the order.
        recorded: the order to follow; None for the order of arrival.
        timeout: seconds without a completed step after which a worker counts as stuck.

    Attributes:
        staleness: of the completed steps, in their order.
    """

    def __init__(
        self,
        tasks: Tasks,
        workers: tuple[int, ...],
        what: str,
        max_staleness: int | None,
        writer: OrderWriter,
        recorded: RecordedOrder | None,
        timeout: float,
    ) -> None:
        self.staleness: list[int] = []
        self._tasks, self._what, self._timeout = tasks, what, timeout
        self._live = set(workers)
        self._assignments = Assignments(max_staleness)
        self._writer, self._recorded = writer, recorded
        self._inbox: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()
        self._end = AnsweringEnd(self._inbox.put)
        self.address = self._end.address
        self._changed = threading.Condition()
        self._parked: dict[int, Asked] = {}
        self._arrived: dict[Record, Asked] = {}
        self._results: list[Mapping[str, Array]] = []
        self._checks: dict[int, tuple[int, bytes]] = {}
        self._layers: dict[str, Array] | None = None
        self._first: int | None = None
        self._opened = -1
        self._assigns = True
        self._ended = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="lockstep-coordinator", daemon=True)
        self._thread.start()

    def open(self, epoch: int) -> None:
        """Let workers begin an epoch."""
        with self._changed:
            self._first = epoch if self._first is None else self._first
            self._opened = epoch
            self._pump()

    def keep(self, workers: Iterable[int]) -> None:
        """Expect only these workers: the others were lost before they could connect."""
        with self._changed:
            self._live &= set(workers)

    def set_layers(self, layers: Mapping[str, Array]) -> None:
        """Set values of the layers' state; steps are assigned from the first call on."""
        with self._changed:
            self._layers = {**(self._layers or {}), **layers}
            self._pump()

    @property
    def layers(self) -> Mapping[str, Array]:
        """The present values of the layers' state."""
        with self._changed:
            return dict(self._layers or {})

    def result(self, number: int) -> Mapping[str, Array]:
        """Wait for the completed step of this number in the order of completion, from 0; return its arrays.

        Raises:
            PeerLostError: no worker is left.
            PeerStuckError: no step was completed in time.
        """
        self._wait(lambda: len(self._results) > number)
        return self._results[number]

    def take_check(self, step: int) -> tuple[int, bytes] | None:
        """Return the worker that has computed a step, and its hash of the batch, once; None before."""
        with self._changed:
            return self._checks.pop(step, None)

    def drain(self) -> None:
        """Assign no more steps, and wait until those in work are complete, or lost with their worker."""
        with self._changed:
            self._assigns = False
        recorded = self._recorded
        if recorded is not None:
            # What a lost worker had in work then is not in the order.
            self._wait(lambda: recorded.awaited() is None)
        else:
            self._wait(lambda: not self._assignments.in_work())

    def finish(self) -> None:
        """End the call for the workers, and wait until they have left."""
        with self._changed:
            self._ended = True
            self._pump()
        self._wait(lambda: not self._live, leaving=True)

    def close(self) -> None:
        """Close the connections and end the thread."""
        self._end.close()
        self._inbox.put(None)
        self._thread.join()
        self._writer.close()

    def _wait(self, over: Callable[[], bool], *, leaving: bool = False) -> None:
        with self._changed:
            begun = reported = time.monotonic()
            before = len(self._results)
            while not over():
                if self._failure is not None:
                    raise self._failure
                if not self._live:
                    raise PeerLostError(
                        f"{self._what}: no worker is left to compute gradients; their logs say why"
                    )
                if len(self._results) > before:
                    before, begun, reported = len(self._results), time.monotonic(), time.monotonic()
                now = time.monotonic()
                if leaving and now - begun > self._timeout:
                    raise PeerStuckError(
                        f"{self._what} has ended, but {self._left()} for {self._timeout:g} s; lockstep "
                        "stack shows what they do, and --timeout sets the limit"
                    )
                if now - begun > self._timeout:
                    raise PeerStuckError(
                        f"{self._what}: no step was completed for {self._timeout:g} s; {self._in_work()}; "
                        "lockstep stack shows what they do, and --timeout sets the limit"
                    )
                if now - reported > _REPORT_EVERY:
                    reported = now + (now - begun)
                    late = self._left() if leaving else f"no step completed; {self._in_work()}"
                    note(f"{self._what}, after {now - begun:.0f} s: {late}")
                self._changed.wait(min(_REPORT_EVERY, self._timeout))

    def _left(self) -> str:
        return f"{', '.join(self._tasks.name(worker) for worker in sorted(self._live))} did not leave it"

    def _in_work(self) -> str:
        steps = [
            f"worker {worker} computes step {step + 1}"
            for step, worker in self._assignments.in_work().items()
        ]
        if self._recorded is not None and (turn := self._recorded.awaited()) is not None:
            steps.append(f"step {turn.step + 1} of worker {turn.worker} is next in the recorded order")
        return ", ".join(steps) or "no worker has begun a step"

    def _run(self) -> None:
        while (asked := self._inbox.get()) is not None:
            with self._changed:
                try:
                    self._handle(asked)
                    self._pump()
                except Exception as error:
                    self._failure = error
                self._changed.notify_all()

    def _handle(self, asked: Asked) -> None:
        worker = asked.process
        match asked.message:
            case None:
                self._lose(worker)
                return
            case Done(step) as done:
                record = Record(Kind.DONE, worker, step)
                if self._recorded is None:
                    self._complete(done, worker, asked.arrays)
                elif self._recorded.has(record):
                    self._arrived[record] = asked
            case EpochDone():
                self._assignments.give_back(worker)
        self._parked[worker] = asked

    def _lose(self, worker: int) -> None:
        self._parked.pop(worker, None)
        if worker not in self._live:
            return
        self._live.discard(worker)
        lost = self._assignments.give_back(worker)
        if not self._ended:
            steps = f"; another worker computes step {', '.join(str(s + 1) for s in lost)}" if lost else ""
            note(f"{self._what}: worker {worker} has ended{steps}")

    def _complete(self, done: Done, worker: int, arrays: list[Array]) -> None:
        if not self._assignments.complete(worker, done.step):
            return
        self._writer.add(Kind.DONE, worker, done.step)
        named = dict(zip(done.names, arrays, strict=True))
        assert self._layers is not None
        for name in self._layers.keys() & named.keys():
            # A new array: the values of an assignment may still be on their way.
            self._layers[name] = self._layers[name] + named.pop(name)
        self.staleness.append(done.staleness)
        self._checks[done.step] = worker, done.check
        self._results.append(named)

    def _pump(self) -> None:
        """Answer everything that can be answered."""
        if self._recorded is not None:
            self._follow(self._recorded)
        for worker, asked in list(self._parked.items()):
            if (answer := self._answer(worker, asked)) is not None:
                del self._parked[worker]
                asked.answer(*answer)

    def _answer(self, worker: int, asked: Asked) -> tuple[Any, list[Array]] | None:
        message = asked.message
        if self._ended:
            return Ended(), []
        if isinstance(message, Enter):
            return (Begin(self._first), []) if self._first is not None else None
        if isinstance(message, EpochDone):
            if self._opened > message.epoch:
                return Opened(self._opened), []
            if not self._assignments.returned_below(message.steps):
                return None
        if self._layers is None or not self._assigns or self._recorded is not None:
            return None
        step = self._assignments.assign(worker)
        return None if step is None else self._assigned(worker, step)

    def _assigned(self, worker: int, step: int) -> tuple[Any, list[Array]]:
        assert self._layers is not None
        self._writer.add(Kind.ASSIGN, worker, step)
        incomplete = tuple(self._assignments.incomplete_below(step))
        return Assigned(step, incomplete, tuple(self._layers)), list(self._layers.values())

    def _follow(self, recorded: RecordedOrder) -> None:
        """Process what has its turn in the recorded order."""
        while (turn := recorded.awaited()) is not None:
            if turn.kind is Kind.DONE:
                asked = self._arrived.pop(turn, None)
                if asked is None:
                    return
                assert isinstance(asked.message, Done)
                self._complete(asked.message, turn.worker, asked.arrays)
            elif not self._may_assign(turn):
                return
            else:
                self._assignments.follow(turn.worker, turn.step)
                self._parked.pop(turn.worker).answer(*self._assigned(turn.worker, turn.step))
            recorded.advance()

    def _may_assign(self, turn: Record) -> bool:
        asked = self._parked.get(turn.worker)
        if asked is None or self._layers is None or self._ended:
            return False
        message = asked.message
        if isinstance(message, EpochDone):
            return turn.step < message.steps
        return (
            isinstance(message, Next | Done)
            and Record(Kind.DONE, turn.worker, _step(message)) not in self._arrived
        )


def _step(message: Next | Done) -> int:
    return message.step if isinstance(message, Done) else -1


def as_arrays(values: Mapping[str, Any], to_numpy: Any) -> dict[str, Array]:
    """Return copies of values of the backend as arrays of NumPy."""
    return {name: np.array(to_numpy(value)) for name, value in values.items()}
