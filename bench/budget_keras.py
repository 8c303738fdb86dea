"""One worker that trains a model through Lockstep, and tells what each part of its steps takes.

    budget_keras.py PROGRAM MODEL BATCH TURNS STEPS

The parts are found by wrapping Lockstep's own seams. Each is waited for before the next begins: what runs in
the background of another part would be charged to that.
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
from budget_parts import (  # noqa: E402
    APPLYING,
    CALLBACKS,
    CHECKING,
    COMPUTING,
    INPUT,
    KERAS,
    LOCKSTEP,
    PUBLISHING,
    SUMMING,
    WAITING_FIRST,
    WAITING_LAST,
)
from ledger import Ledger  # noqa: E402
from lockstep.collectives.shared.barrier import Barrier  # noqa: E402
from lockstep.collectives.shared.communicator import SharedCommunicator  # noqa: E402
from lockstep.keras.fit.replica_step import ReplicaStep  # noqa: E402
from lockstep.keras.input.global_inputs import GlobalInput  # noqa: E402
from models import MODELS  # noqa: E402

ledger = Ledger(KERAS)


def replace(owner: Any, name: str, wrapped: Callable[[Any], Any]) -> None:
    setattr(owner, name, wrapped(getattr(owner, name)))


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


def wrap_meeting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Charge the meetings of a sum: the first ends the publishing, and the last the sum."""
    waits = {PUBLISHING: WAITING_FIRST, SUMMING: WAITING_LAST}

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        part = waits.get(ledger.innermost)
        if part is None:
            return original(self, *args, **kwargs)
        with ledger.within(part):
            result = original(self, *args, **kwargs)
        ledger.turn(PUBLISHING, SUMMING)
        return result

    return wrapped


class Turn(keras.callbacks.Callback):
    """Waits before each epoch but the first, which compiles, and tells after it what the parts have taken."""

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
    replace(kind, "batches", wrap_input)
replace(ReplicaStep, "__init__", wrap_exchange)
replace(ReplicaStep, "advance", lambda advance: ledger.timed(LOCKSTEP, advance))
replace(SharedCommunicator, "reduce", lambda reduce: ledger.timed(PUBLISHING, reduce))
for meeting in ("meet", "sync"):
    replace(Barrier, meeting, wrap_meeting)
for name in ("on_train_batch_begin", "on_train_batch_end"):
    replace(keras.callbacks.CallbackList, name, lambda call: ledger.timed(CALLBACKS, call))

strategy = lockstep.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(1)
measured = MODELS[MODEL]
with strategy.scope():
    model = measured.compiled(keras)
replicas = strategy.num_replicas_in_sync
x, y = measured.examples(STEPS * BATCH * replicas)
options = {"shuffle": False, "verbose": 0, "callbacks": [Turn()]}
model.fit(x, y, batch_size=BATCH * replicas, epochs=TURNS + 1, **options)
