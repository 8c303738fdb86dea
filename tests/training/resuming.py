"""A program with several calls, callbacks that decide, and a custom one that counts.

    resuming.py FOLDER [HOW WHERE]

In the first run, all its workers end at WHERE: "fit 1 step 17" is after step 17 of the call `fit 1`. HOW is
"killed", or "stopped": then the command receives SIGTERM. The program writes a table to FOLDER, and prints
the exact results.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import psutil

import lockstep
from lockstep.keras.state import resumable_calls
from lockstep.worker import job

TABLE = Path(sys.argv.pop(1)) / "table.csv"
# Each skipped step is reported, as if it took long.
resumable_calls.SKIPPING_EVERY = 0.0
HOW, WHERE = (sys.argv[1], " ".join(sys.argv[2:])) if sys.argv[1:] else ("", "")


def kill_at(where: str) -> None:
    """End all workers, if this is the place and the first time."""
    if where != WHERE or job.current().checkpoints.resumed is not None:
        return
    if HOW == "killed":
        scheduler = job.current().checkpoints.scheduler
        # The checkpoints that the chief has taken are on disk.
        assert scheduler is None or scheduler.close(30)
        os.kill(os.getpid(), signal.SIGKILL)
    elif lockstep.is_chief():
        agent = psutil.Process().parent()
        assert agent is not None
        os.kill(agent.ppid(), signal.SIGTERM)


class Counting(keras.callbacks.Callback):  # type: ignore[misc]
    """Counts steps, and epochs in a list."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.call, self.steps, self.epochs = call, 0, list[float]()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        kill_at(f"fit {self.call} step {self.steps}")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs.append(float(logs["loss"]))
        kill_at(f"fit {self.call} epoch {epoch}")


def main() -> None:
    layers = keras.layers
    keras.utils.set_random_seed(5)
    with lockstep.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential(
            [
                layers.Dense(16, activation="relu"),
                layers.BatchNormalization(),
                layers.Dropout(0.3),
                layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.Adam(1e-2), "mse", metrics=["mae"])
        other = keras.Sequential([layers.Input((6,)), layers.Dense(1)])
        other.compile("sgd", "mse", metrics=["mae"])
    random = np.random.default_rng(0)
    x = random.normal(size=(110, 6)).astype("float32")
    y = x[:, :1] * 2 + random.normal(size=(110, 1)).astype("float32")
    # Builds its metrics, with a batch of the data; later calls need none.
    other.evaluate(x, y, verbose=0)
    first, second = Counting(1), Counting(2)
    stopping = keras.callbacks.EarlyStopping(patience=1, restore_best_weights=True)
    slower = keras.callbacks.ReduceLROnPlateau(patience=0, factor=0.5)
    options: dict[str, Any] = {"validation_data": (x[:40], y[:40]), "verbose": 0}
    table = keras.callbacks.CSVLogger(TABLE, append=True)
    backup = keras.callbacks.BackupAndRestore(TABLE.with_name("backup"))
    watching = [slower, first, stopping, table, backup]
    history = model.fit(x, y, epochs=6, batch_size=24, callbacks=watching, **options)
    print("weights 1", lockstep.digest(model))
    print("fit 1", first.steps, first.epochs, history.epoch, history.history)
    figures = model.evaluate(x, y, batch_size=30, verbose=0)
    print("evaluate", [float(figure).hex() for figure in figures])
    # A script's own random numbers between calls.
    noise = np.random.normal(size=y.shape).astype("float32") * 0.1
    history = model.fit(x, y + noise, epochs=3, batch_size=24, callbacks=[second, table], **options)
    print("weights 2", lockstep.digest(model))
    print("fit 2", second.steps, second.epochs, history.epoch, history.history)
    print("predict", float(model.predict(x, batch_size=50, verbose=0).sum()).hex())
    history = other.fit(x, y, batch_size=24, callbacks=[], verbose=0)
    print("weights 3", lockstep.digest(other))
    print("fit 3", history.history)
    for number in range(6):
        loss = model.train_on_batch(x[number * 10 : number * 10 + 10], y[number * 10 : number * 10 + 10])
        kill_at(f"batch {number}")
        print("batch", [float(figure).hex() for figure in np.atleast_1d(loss)])
    print("table", TABLE.read_bytes())
    print("end", lockstep.digest(model), lockstep.digest(other), np.random.random())


if __name__ == "__main__":
    main()
