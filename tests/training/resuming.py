"""A program with several calls, callbacks that decide, and one of its own that counts.

    resuming.py FOLDER [HOW WHERE]

The first time, all its workers die WHERE: "fit 1 step 17" is in the call of that number, after so many steps.
HOW is "killed", or "stopped": then the command gets SIGTERM. It writes a table to FOLDER, and prints what
came out, exactly.
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
from lockstep.worker import job

TABLE = Path(sys.argv.pop(1)) / "table.csv"
HOW, WHERE = (sys.argv[1], " ".join(sys.argv[2:])) if sys.argv[1:] else ("", "")


def perhaps_die(where: str) -> None:
    """Die, with all other workers, if this is the place and the first time."""
    if where != WHERE or job.current().checkpoints.resumed is not None:
        return
    if HOW == "killed":
        scheduler = job.current().checkpoints.scheduler
        # What the chief has taken is on disk.
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
        perhaps_die(f"fit {self.call} step {self.steps}")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs.append(float(logs["loss"]))
        perhaps_die(f"fit {self.call} epoch {epoch}")


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
    random = np.random.default_rng(0)
    x = random.normal(size=(110, 6)).astype("float32")
    y = x[:, :1] * 2 + random.normal(size=(110, 1)).astype("float32")
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
    for number in range(6):
        loss = model.train_on_batch(x[number * 10 : number * 10 + 10], y[number * 10 : number * 10 + 10])
        perhaps_die(f"batch {number}")
        print("batch", [float(figure).hex() for figure in np.atleast_1d(loss)])
    print("table", TABLE.read_bytes())
    print("end", lockstep.digest(model), np.random.random())


if __name__ == "__main__":
    main()
