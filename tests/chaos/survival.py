"""A training that loses workers at named points of the protocol.

survival.py FOLDER WORKER:STEP:POINT...
"""

import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
from chaos_faults import Fault, Faults, prepare

import lockstep
from lockstep.worker import job

FOLDER = Path(sys.argv[1])


def fault(text: str) -> Fault:
    worker, step, point = text.split(":")
    return Fault(int(worker), int(step), point)


FAULTS = Faults([one for one in map(fault, sys.argv[2:]) if one.worker == job.current().worker])
prepare(FAULTS)


class Steps(keras.callbacks.Callback):  # type: ignore[misc]
    """Counts steps, and passes the points outside of the exchange."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        FAULTS.step += 1
        FAULTS.passing("before publishing")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        FAULTS.passing("after apply")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        FAULTS.passing("end of an epoch")


def spread(y: Any, p: Any) -> Any:
    """Compares the examples of a batch, so each step also gathers the rows of all replicas."""
    return keras.ops.mean(keras.ops.square(y - p)) + keras.ops.std(y - p)


def largest(y: Any, p: Any) -> Any:
    """A metric that compares them: its rows travel with the sum."""
    return keras.ops.max(keras.ops.abs(y - p))


def main() -> None:
    layers = keras.layers
    keras.utils.set_random_seed(5)
    with lockstep.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential(
            [
                layers.Input((6,)),
                layers.Dense(64, activation="relu"),
                layers.BatchNormalization(),
                layers.Dropout(0.3),
                layers.Dense(1),
            ]
        )
        model.compile("adam", spread, metrics=["mae", largest])
    x = np.random.default_rng(0).normal(size=(110, 6)).astype("float32")
    callbacks = [
        Steps(),
        keras.callbacks.ModelCheckpoint(FOLDER / "{epoch}.weights.h5", save_weights_only=True),
        keras.callbacks.CSVLogger(FOLDER / "log.csv"),
        # It adds the rate to the logs that the callbacks before it have got.
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate),
    ]
    data = {"validation_data": (x[:40], x[:40, :1]), "callbacks": callbacks, "verbose": 0}
    model.fit(x, x[:, :1], epochs=4, batch_size=24, **data)
    figures = model.evaluate(x, x[:, :1], verbose=0)
    rows = model.predict(x, batch_size=30, verbose=0)
    print("result", lockstep.digest(model), [float(f).hex() for f in figures], float(rows.sum()).hex())


if __name__ == "__main__":
    main()
