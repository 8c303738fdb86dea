"""A model is tried again, with the first sample weights, while a worker that joins catches up.

    tried_later.py FOLDER HOW WHERE

The arguments are those of `joining`. Prints the digest at the end.
"""

from typing import Any

import keras
import numpy as np

import joining
import lockstep

X = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")


def mean_error(y: Any, p: Any) -> Any:
    """Keras multiplies one number by the mean of the sample weights."""
    return keras.ops.mean(keras.ops.square(y - p))


class At(keras.callbacks.Callback):  # type: ignore[misc]
    def __init__(self, call: str) -> None:
        super().__init__()
        self._call = call

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        joining.at(f"{self._call} step {int(self.model.optimizer.iterations)}")


def main() -> None:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", mean_error)
    options = {"batch_size": 4, "shuffle": False, "verbose": 0}
    model.fit(X, X[:, 1:2], epochs=3, callbacks=[At("fit 1")], **options)
    model.evaluate(X, X[:, 1:2], sample_weight=np.linspace(0.1, 2, 16), batch_size=4, verbose=0)
    model.optimizer.iterations.assign(0)
    model.fit(X, X[:, 1:2], epochs=3, callbacks=[At("fit 2")], **options)
    print("digest", lockstep.digest(model))


if __name__ == "__main__":
    main()
