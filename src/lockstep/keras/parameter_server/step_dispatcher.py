"""The chief's side of the workers in a call of `fit`: epochs, and the results of steps."""

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.keras.parameter_server.dispatcher import Answered, DispatchedCall, Dispatcher
from lockstep.parameter_server.order import Record, RecordKind
from lockstep.protocol.parameter_server import Begin, Done, Ended, Enter, EpochDone, Next, Opened
from lockstep.transport.array_channel import Asked

Array = npt.NDArray[Any]


class StepDispatcher(Dispatcher):
    """Answers the workers of one call of `fit`; see `Dispatcher`."""

    def __init__(self, call: DispatchedCall) -> None:
        self._results: deque[Mapping[str, Array]] = deque()
        self._checks: dict[int, tuple[int, bytes]] = {}
        self._first: int | None = None
        self._opened = -1
        super().__init__(call, "step")

    def open(self, epoch: int) -> None:
        """Let workers begin an epoch."""
        with self._changed:
            self._first = epoch if self._first is None else self._first
            self._opened = epoch
            self._pump()

    def result(self) -> Mapping[str, Array]:
        """Wait for the next completed step, in the order of completion; return its arrays.

        Raises:
            PeerLostError: no worker is left.
            PeerStuckError: no step was completed in time.
        """
        self._wait(lambda: bool(self._results))
        return self._results.popleft()

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

    def _handle(self, asked: Asked) -> None:
        match asked.message:
            case Done(step):
                followed = self._followed.get(asked.process)
                if followed is not None and followed[0].step == step:
                    del self._followed[asked.process]
                self._receive(asked, step)
            case EpochDone() if not self._is_ahead(asked.process):
                self._assignments.give_back(asked.process)
        self._parked[asked.process] = asked

    def _is_ahead(self, process: int) -> bool:
        """Whether a worker that follows a recorded order keeps a step of an epoch that it has not begun.

        There, it was one that had replaced a lost worker, and was further. It has computed the step, or was
        lost with it; otherwise, it has got another one later. Others may already have computed it here.
        """
        if self._recorded is None or process not in self._followed:
            return False
        following = self._recorded.next_of(process)
        return following is None or following.kind is not RecordKind.ASSIGN

    def _take(self, asked: Asked) -> None:
        done = asked.message
        assert isinstance(done, Done)
        assert self._layers is not None
        named = dict(zip(done.names, asked.arrays, strict=True))
        changes = {name: named.pop(name) for name in self._layers.keys() & named.keys()}
        if self._complete(asked.process, done.step, done.staleness):
            for name, change in changes.items():
                # A new array: the values of an assignment may still be on their way.
                self._layers[name] = self._layers[name] + change
            self._checks[done.step] = asked.process, done.check
            self._results.append(named)

    def _answer(self, process: int, asked: Asked) -> Answered | None:
        message = asked.message
        if self._ended:
            return Ended(), []
        if isinstance(message, Enter):
            if self._first is None:
                return None
            return Begin(self._first, self._assignments.completed_below), []
        if isinstance(message, EpochDone):
            if self._opened > message.epoch:
                return Opened(self._opened), []
            return self._assign(process, message.steps)
        if self._recorded is not None and isinstance(message, Next) and self._is_ahead(process):
            return self._followed[process]
        return self._assign(process)

    def _may_assign(self, turn: Record) -> bool:
        asked = self._parked.get(turn.worker)
        if asked is None or self._layers is None or self._ended:
            return False
        message = asked.message
        if isinstance(message, EpochDone):
            return turn.step < message.steps
        return (
            isinstance(message, Next | Done)
            and Record(RecordKind.DONE, turn.worker, _step(message)) not in self._arrived
        )


def _step(message: Next | Done) -> int:
    return message.step if isinstance(message, Done) else -1


def as_arrays(values: Mapping[str, Any], to_numpy: Any) -> dict[str, Array]:
    """Return copies of values of the backend as arrays of NumPy."""
    return {name: np.array(to_numpy(value)) for name, value in values.items()}
