"""Trains layers that draw random numbers, and count their calls, in Python while a step is traced.

Two replicas have 8 and 7 examples. Lines that begin with "result" are the same for any number of workers.
"""

import random
from typing import Any

import keras
import numpy as np

X = np.random.default_rng(0).normal(size=(60, 6)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
SHARED = np.random.default_rng(7)


def offset() -> float:
    return float(SHARED.uniform(-0.1, 0.1))


class Masked(keras.layers.Layer):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.generator = random.Random(4)
        self.calls = 0

    def call(self, x: Any) -> Any:
        self.calls += 1
        mask = np.random.uniform(0.5, 1.5, x.shape[-1]) * self.generator.random() + offset()
        return x * (mask + self.calls / 8).astype("float32")


def main() -> None:
    keras.utils.set_random_seed(3)
    layer = Masked()
    model = keras.Sequential([keras.layers.Input((6,)), layer, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    history = model.fit(X, Y, batch_size=15, epochs=2, verbose=0, validation_data=(X[:9], Y[:9])).history
    print("result", history, model.evaluate(X, Y, batch_size=7, verbose=0), layer.calls)
    print("result", layer.generator.random(), SHARED.random(), np.random.rand(), random.random())


if __name__ == "__main__":
    main()
