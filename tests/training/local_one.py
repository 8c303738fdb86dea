"""Trains by SGD, and prints the weights: with one local step at a time, those of synchronous training."""

import sys
from typing import Any

import keras
import numpy as np

import lockstep


class Counting(keras.Sequential):
    def train_step(self, *args: Any) -> Any:
        result = super().train_step(*args)
        x, *_ = args[-1]
        logs = result[0] if keras.backend.backend() == "jax" else result
        logs["rows"] = keras.ops.sum(keras.ops.ones_like(x[:, 0]))
        return result


local_steps = lockstep.LocalSteps(int(sys.argv[1])) if sys.argv[1:] else None
keras.utils.set_random_seed(3)
random = np.random.default_rng(0)
x = random.normal(size=(50, 8)).astype("float32")
y = (x[:, :1] > 0).astype("float32")
with lockstep.MultiWorkerMirroredStrategy(local_steps=local_steps).scope():
    model = Counting([keras.Input((8,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
history = model.fit(x, y, batch_size=12, epochs=2, verbose=0).history
values = [
    *history["loss"],
    *history["mae"],
    *history["rows"],
    *(np.ravel(weight) for weight in model.get_weights()),
]
print("numbers", *(repr(float(value)) for value in np.concatenate([np.ravel(value) for value in values])))
