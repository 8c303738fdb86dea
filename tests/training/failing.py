"""A program that catches errors of its calls and continues. At the end, its workers kill themselves, once."""

import os
import signal
from typing import Any

import keras
import numpy as np

import lockstep
from lockstep.worker import job

x = np.linspace(-1, 1, 48, dtype="float32").reshape(12, 4)
y = x.sum(axis=1)


class Enough(Exception):
    """An error whose arguments are not its text."""

    def __init__(self, *, step: int) -> None:
        super().__init__(f"enough at step {step}")
        self.step = step


class Ends(keras.callbacks.Callback):  # type: ignore[misc]
    """Counts batches, and ends a `fit` with an error."""

    batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches += 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            raise Enough(step=self.batches)


def main() -> None:
    keras.utils.set_random_seed(3)
    with lockstep.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.1), "mse")
    try:
        model.evaluate(x, y[:5], verbose=0)
    except ValueError as error:
        print(f"caught {error!s:.60}")
    print("figure", float(model.evaluate(x, y, verbose=0)).hex())
    ends = Ends()
    try:
        model.fit(x, y, batch_size=4, epochs=4, callbacks=[ends], verbose=0)
    except Enough as error:
        print(f"caught {error} {error.step} {ends.batches} {np.random.random()}")
    history = model.fit(x, y, batch_size=4, epochs=2, verbose=0)
    print("figure", [loss.hex() for loss in history.history["loss"]])
    print("figure", lockstep.digest(model), np.random.random())
    entered = job.current()
    if entered.checkpoints.resumed is None:
        assert entered.checkpoints.scheduler is None or entered.checkpoints.scheduler.close(30)
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
