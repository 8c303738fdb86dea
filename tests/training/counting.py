"""A layer that counts its steps in Python attributes and uses the counts, in a step that runs eagerly.

On TensorFlow, it also keeps a mean of its inputs in a variable that is not Keras's.

    counting.py whole|lost: as it is; with worker 1 lost in step 7, whose replacement joins.

Prints the losses, the counts and a digest.
"""

import importlib
import os
import signal
import sys
from typing import Any

import keras
import numpy as np

import lockstep
from lockstep.worker.job import current

HOW = sys.argv[1]
# With a statement, workers on other backends would import everything by themselves.
tensorflow = importlib.import_module("tensorflow") if keras.backend.backend() == "tensorflow" else None


class Warming(keras.layers.Layer):
    """Grows in its first steps."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.recent: list[int] = []
        self.held = {"mean": tensorflow.Variable(0.0)} if tensorflow else {}

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.steps += 1
            self.recent = [*self.recent[-2:], self.steps % 5]
            if tensorflow:
                mean = self.held["mean"]
                mean.assign(0.9 * mean + 0.1 * tensorflow.reduce_mean(x))
                x = x + mean
        return x * min(1.0, self.steps / 10) * (1 + 0.1 * sum(self.recent))


class KillWorker(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if HOW == "lost" and current().worker == 1 and int(self.model.optimizer.iterations) == 6:
            os.kill(os.getpid(), signal.SIGKILL)


keras.utils.set_random_seed(4)
x = np.random.default_rng(0).normal(size=(40, 6)).astype("float32")
layer = Warming()
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), layer, keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.01), "mse", run_eagerly=True)
history = model.fit(x, x[:, :1], batch_size=10, epochs=4, verbose=0, callbacks=[KillWorker()]).history
print("result", history["loss"], layer.steps, layer.recent, lockstep.digest(model), flush=True)
