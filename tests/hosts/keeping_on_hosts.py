"""A training with checkpoints, in which workers end as the arguments say; prints the digest and the losses.

    keeping_on_hosts.py [die:WORKER:EPOCH] [fail:EPOCH] [hold:EPOCH] [checkpoint:FOLDER] [lose:WORKER:PART]
                        [slow] [csv] [best] [backup] [import]

`die` kills a worker at the end of an epoch, `fail` raises in all of them, and with `hold` worker 0 writes the
file `held` and waits to be killed. `checkpoint` saves checkpoints with a callback. While this callback copies
a checkpoint, `lose` kills a worker, and with `slow` a disk does nothing until the workers have met three
times. `csv` writes log.csv, `best` keeps the best epoch in best.keras and reads it in the end, `backup` saves
backups, and `import` imports the module `own`.
"""

import importlib
import os
import signal
import sys
import threading
from pathlib import Path

import keras
import numpy as np

import lockstep
from lockstep.checkpoint import hand_over
from lockstep.keras.state.checkpoint_callback import ScriptCheckpoints
from lockstep.worker import job


class Faults(keras.callbacks.Callback):
    """Ends workers at the end of epochs."""

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        if f"die:{job.current().worker}:{epoch}" in sys.argv:
            os.kill(os.getpid(), signal.SIGKILL)
        if f"fail:{epoch}" in sys.argv:
            raise RuntimeError(f"epoch {epoch} fails")
        if f"hold:{epoch}" in sys.argv and job.current().worker == 0:
            Path("held").touch()
            threading.Event().wait()


def lose_at(part: int) -> None:
    """End this worker before it gives or takes a part of a checkpoint, counted from 0."""
    left, exchange = iter(range(part)), ScriptCheckpoints._from_any

    def lost(self: ScriptCheckpoints, what: str, blob: bytes) -> bytes:
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return exchange(self, what, blob)

    ScriptCheckpoints._from_any = lost  # type: ignore[method-assign]


def slow_down() -> None:
    """Let the disk of this worker wait until the workers have met."""
    met, exchange, sync = threading.Semaphore(0), ScriptCheckpoints._from_any, hand_over.sync

    def meet(self: ScriptCheckpoints, what: str, blob: bytes) -> bytes:
        met.release()
        return exchange(self, what, blob)

    def slow(path: Path) -> None:
        while met.acquire(blocking=False):
            pass
        for _ in range(3):
            assert met.acquire(timeout=120.0)
        hand_over.sync = sync
        sync(path)

    ScriptCheckpoints._from_any = meet  # type: ignore[method-assign]
    hand_over.sync = slow


def main() -> None:
    if "slow" in sys.argv:
        slow_down()
    for argument in sys.argv[1:]:
        if argument.startswith(f"lose:{job.current().worker}:"):
            lose_at(int(argument.rpartition(":")[2]))
    keras.utils.set_random_seed(7)
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(64, 8)).astype("float32")
    y = x.sum(1, keepdims=True)
    strategy = lockstep.MultiWorkerMirroredStrategy()
    with strategy.scope():
        layers = [keras.Input((8,)), keras.layers.Dense(16, "tanh"), keras.layers.Dropout(0.2)]
        model = keras.Sequential([*layers, keras.layers.Dense(1)])
        model.compile("adam", "mse")
    callbacks: list[keras.callbacks.Callback] = [Faults()]
    for argument in sys.argv[1:]:
        if argument.startswith("checkpoint:"):
            folder = argument.partition(":")[2]
            callbacks.append(lockstep.callbacks.Checkpoint(folder, every=2))
    if "csv" in sys.argv:
        callbacks.append(keras.callbacks.CSVLogger("log.csv"))
    if "best" in sys.argv:
        callbacks.append(keras.callbacks.ModelCheckpoint("best.keras", monitor="loss", save_best_only=True))
    if "backup" in sys.argv:
        callbacks.append(keras.callbacks.BackupAndRestore("backup"))
    if "import" in sys.argv:
        importlib.import_module("own")
    history = model.fit(x, y, batch_size=16, epochs=6, verbose=0, callbacks=callbacks).history["loss"]
    if "best" in sys.argv:
        with strategy.scope():
            model = keras.models.load_model("best.keras")
        model.fit(x, y, batch_size=16, verbose=0)
    print("digest", lockstep.digest(model), *map(float.hex, history), sep="-")


main()
