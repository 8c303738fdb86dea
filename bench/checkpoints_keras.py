"""One process that trains a large model in Keras on JAX and writes a checkpoint in each turn.

    checkpoints_keras.py PROGRAM KIND MODEL PROCESS TURNS FOLDER

KIND is `lockstep`, with Lockstep's own checkpoints (PROCESS -1 takes the worker's number from its job), or
`plain`: Keras in one process, with a callback that calls `model.save`.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from turns import Turns, pin

NAME, KIND, MODEL = sys.argv[1:4]
PROCESS, TURNS = map(int, sys.argv[4:6])
FOLDER = Path(sys.argv[6])
LOCKSTEP = KIND == "lockstep"
if PROCESS < 0:
    PROCESS = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
pin(PROCESS)

import jax  # noqa: E402
import keras  # noqa: E402

import lockstep  # noqa: E402
from checkpoint_cost import AT, PATIENCE_SECONDS, STEPS, figures  # noqa: E402
from large_model import BATCH, examples, keras_model  # noqa: E402
from lockstep.checkpoint.scheduler import CheckpointScheduler  # noqa: E402
from lockstep.worker import job  # noqa: E402


def timed(write: Callable[..., None]) -> Callable[..., None]:
    """Return a `CheckpointScheduler.after_step` that measures its time if a checkpoint is due."""

    def after_step(scheduler: CheckpointScheduler, taken: int, *rest: Any) -> None:
        if taken % STEPS == 0:
            turn.call = seconds(lambda: write(scheduler, taken, *rest))
        else:
            write(scheduler, taken, *rest)

    return after_step


def seconds(act: Callable[[], object]) -> float:
    """Return how long `act` takes, without the computation of the step in the background."""
    jax.block_until_ready(jax.live_arrays())
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


class Turn(keras.callbacks.Callback):
    """Waits before each epoch except the first, and reports the cost of its checkpoint after it."""

    def __init__(self) -> None:
        super().__init__()
        self._turns: Turns | None = None
        self._times: list[float] = []
        self._taken = STEPS - AT
        self.call = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            self._turns = Turns(NAME, PROCESS)
        if self._turns is not None:
            self._turns.wait()
        self._times = [time.perf_counter()]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._times.append(time.perf_counter())
        if batch + 1 == AT and not LOCKSTEP:
            self.call = seconds(lambda: self.model.save(FOLDER / "model.keras"))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._taken += STEPS
        if job.is_chief() and LOCKSTEP:
            scheduler = job.current().checkpoints.scheduler
            if scheduler is None or not scheduler.close(PATIENCE_SECONDS):
                sys.exit("the checkpoint is not on the disk")
        if self._turns is not None:
            self._turns.send(figures(self._times, self.call, self._bytes()))

    def _bytes(self) -> int:
        """Return the bytes that this process has written in this epoch."""
        if not LOCKSTEP:
            return (FOLDER / "model.keras").stat().st_size
        if not job.is_chief():
            return 0
        state = FOLDER / f"step-{self._taken - STEPS + AT:012}" / "state.safetensors"
        return state.stat().st_size


strategy = lockstep.MultiWorkerMirroredStrategy() if LOCKSTEP else None
replicas = strategy.num_replicas_in_sync if strategy else 1
keras.utils.set_random_seed(1)
with strategy.scope() if strategy else contextlib.nullcontext():
    model = keras_model(keras, MODEL)
x, y = examples(STEPS * BATCH * replicas)
turn = Turn()
CheckpointScheduler.after_step = timed(CheckpointScheduler.after_step)  # type: ignore[method-assign]
options = {"batch_size": BATCH * replicas, "shuffle": False, "verbose": 0}
# Checkpoints are due every STEPS steps: this call moves them to the middle of the following epochs.
model.fit(x, y, steps_per_epoch=STEPS - AT, **options)
model.fit(x, y, epochs=TURNS + 1, callbacks=[turn], **options)
