"""A training with checkpoints, in which workers end as the arguments say; prints the digest of the model.

    keeping_on_hosts.py [die:WORKER:EPOCH] [fail:EPOCH] [checkpoint:FOLDER] [csv] [backup] [import]

`die` kills a worker at the end of an epoch, `fail` raises in all of them, and `checkpoint` saves checkpoints
with a callback. `csv` writes log.csv, `backup` saves backups, and `import` imports the module `own`.
"""

import importlib
import os
import signal
import sys

import keras
import numpy as np

import lockstep
from lockstep.worker import job


class Faults(keras.callbacks.Callback):
    """Ends workers at the end of epochs."""

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        if f"die:{job.current().worker}:{epoch}" in sys.argv:
            os.kill(os.getpid(), signal.SIGKILL)
        if f"fail:{epoch}" in sys.argv:
            raise RuntimeError(f"epoch {epoch} fails")


def main() -> None:
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
    if "backup" in sys.argv:
        callbacks.append(keras.callbacks.BackupAndRestore("backup"))
    if "import" in sys.argv:
        importlib.import_module("own")
    model.fit(x, y, batch_size=16, epochs=6, verbose=0, callbacks=callbacks)
    print("digest", lockstep.digest(model))


main()
