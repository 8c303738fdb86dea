"""One worker that trains a model through Lockstep and reports the time of each part of its steps.

    budget_keras.py PROGRAM MODEL BATCH TURNS STEPS

Wrapped functions of Lockstep delimit the parts. Each part finishes before the next one starts: otherwise
work in the background of another part would be charged to that part.
"""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

from lockstep.worker import job
from turns import Turns, pin

NAME, MODEL = sys.argv[1:3]
BATCH, TURNS, STEPS = map(int, sys.argv[3:])
WORKER = job.current().worker
pin(WORKER)

import keras  # noqa: E402

import lockstep  # noqa: E402
from budget_ledger import (  # noqa: E402
    APPLYING,
    CALLBACKS,
    CHECKING,
    COMPUTING,
    INPUT,
    KERAS,
    LOCKSTEP,
    PUBLISHING,
    SUMMING,
    WAITING_TO_ENTER,
    WAITING_TO_RETURN,
    WAITING_TO_SUM,
    Ledger,
)
from lockstep.collectives.shared.barrier import Barrier  # noqa: E402
from lockstep.collectives.shared.communicator import SharedCommunicator  # noqa: E402
from lockstep.collectives.shared.packed_reduce import PackedReduce  # noqa: E402
from lockstep.collectives.shared.slice_reduce import SliceReduce  # noqa: E402
from lockstep.keras.fit.global_step import GlobalStep  # noqa: E402
from lockstep.keras.input.fit_inputs import GlobalInput  # noqa: E402
from models import MODELS  # noqa: E402

ledger = Ledger(KERAS)


def replace(owner: Any, method: Callable[..., Any], wrapped: Callable[[Any], Any]) -> None:
    setattr(owner, method.__name__, wrapped(method))


def wrap_input(batches: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(self: Any) -> Any:
        for batch in ledger.drawn(INPUT, batches(self)):
            parts = {"read": ledger.timed(INPUT, batch.read), "check": ledger.timed(CHECKING, batch.check)}
            yield dataclasses.replace(batch, **parts)

    return wrapped


def wrap_exchange(original: Callable[..., None]) -> Callable[..., None]:
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        backend, program = self._backend, self._program
        compute, apply = program.compute, program.apply

        def computed(*given: Any) -> Any:
            partial = compute(*given)
            for value in partial.values():
                backend.to_numpy(value)
            return partial

        def applied(*given: Any) -> Any:
            result = apply(*given)
            backend.settle()
            return result

        program.compute = ledger.timed(COMPUTING, computed)
        program.apply = ledger.timed(APPLYING, applied)

    return wrapped


class ReduceParts:
    """Charges the parts of a reduce: publishing, summing, and the waits at its barriers."""

    def __init__(self) -> None:
        self._wait: str | None = None

    def reduce(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self._wait = WAITING_TO_ENTER
            try:
                return original(*args, **kwargs)
            finally:
                self._wait = None

        return wrapped

    def publish(self, original: Callable[..., Any]) -> Callable[..., Any]:
        return self._charged(original, PUBLISHING, WAITING_TO_SUM)

    def sum(self, original: Callable[..., Any]) -> Callable[..., Any]:
        return self._charged(original, SUMMING, WAITING_TO_RETURN)

    def barrier(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self._wait is None:
                return original(*args, **kwargs)
            with ledger.within(self._wait):
                return original(*args, **kwargs)

        return wrapped

    def _charged(self, original: Callable[..., Any], part: str, wait: str) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with ledger.within(part):
                original(*args, **kwargs)
            self._wait = wait

        return wrapped


class Turn(keras.callbacks.Callback):
    """Waits before each epoch except the first, which compiles, and reports the parts after it."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: Turns | None = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch:
            self.turns = self.turns or Turns(NAME, WORKER)
            self.turns.wait()
        ledger.begin()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        ledger.charge()
        if self.turns is not None:
            self.turns.send({"parts": {part: s / STEPS for part, s in ledger.seconds.items()}})


for kind in GlobalInput.__subclasses__():
    replace(kind, kind.batches, wrap_input)
replace(GlobalStep, GlobalStep.__init__, wrap_exchange)
replace(GlobalStep, GlobalStep.take, lambda take: ledger.timed(LOCKSTEP, take))
parts = ReduceParts()
replace(SharedCommunicator, SharedCommunicator.reduce, parts.reduce)
for wait in (Barrier.arrive_and_compare, Barrier.arrive_and_wait):
    replace(Barrier, wait, parts.barrier)
for reduce in (SliceReduce, PackedReduce):
    replace(reduce, reduce.publish, parts.publish)
    replace(reduce, reduce.sum, parts.sum)
for call in (
    keras.callbacks.CallbackList.on_train_batch_begin,
    keras.callbacks.CallbackList.on_train_batch_end,
):
    replace(keras.callbacks.CallbackList, call, lambda call: ledger.timed(CALLBACKS, call))

strategy = lockstep.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(1)
measured = MODELS[MODEL]
with strategy.scope():
    model = measured.compiled(keras)
replicas = strategy.num_replicas_in_sync
x, y = measured.examples(STEPS * BATCH * replicas)
options = {"shuffle": False, "verbose": 0, "callbacks": [Turn()]}
model.fit(x, y, batch_size=BATCH * replicas, epochs=TURNS + 1, **options)
