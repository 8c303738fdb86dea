"""A program whose job succeeds, and trains for more steps in a later run.

    finishing.py EPOCHS BATCHES [killed]

With "killed", the chief is lost when it has written half of a checkpoint. A callback changes weights after
each step, and stops the `fit` at step 12; another changes them at the end of each epoch. Between the last
step and the end, the program changes weights itself.
"""

import os
import signal
import sys
from typing import Any

import keras
import numpy as np

import lockstep
import lockstep.checkpoint.checkpoint_files

EPOCHS, BATCHES = map(int, sys.argv[1:3])
if sys.argv[3:]:
    # The manifest is written last.
    lockstep.checkpoint.checkpoint_files.write_file = lambda path, data: os.kill(os.getpid(), signal.SIGKILL)


class Changing(keras.callbacks.Callback):  # type: ignore[misc]
    """Changes weights where no step does."""

    steps = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        self.change(1.01)
        self.model.stop_training = self.steps == 12

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.change(0.5)

    def change(self, factor: float) -> None:
        bias = self.model.layers[0].bias
        bias.assign(bias * factor)


def main() -> None:
    keras.utils.set_random_seed(5)
    with lockstep.MultiWorkerMirroredStrategy().scope():
        layers = keras.layers
        model = keras.Sequential([layers.Dense(16, activation="relu"), layers.Dropout(0.3), layers.Dense(1)])
        model.compile(keras.optimizers.Adam(1e-2), "mse", metrics=["mae"])
    random = np.random.default_rng(0)
    x = random.normal(size=(110, 6)).astype("float32")
    y = x[:, :1] * 2
    changing = Changing()
    stopping = keras.callbacks.EarlyStopping(patience=5, restore_best_weights=True)
    history = model.fit(
        x,
        y,
        epochs=EPOCHS,
        batch_size=24,
        validation_data=(x[:40], y[:40]),
        callbacks=[changing, stopping],
        verbose=0,
    )
    print("fit", changing.steps, history.history)
    for number in range(BATCHES):
        model.train_on_batch(x[number * 10 : number * 10 + 10], y[number * 10 : number * 10 + 10])
    print("end of training", lockstep.digest(model), np.random.random())
    changing.set_model(model)
    changing.change(0.5)
    print("evaluate", [float(figure).hex() for figure in model.evaluate(x, y, verbose=0)])
    print("end", lockstep.digest(model), np.random.random())


if __name__ == "__main__":
    main()
