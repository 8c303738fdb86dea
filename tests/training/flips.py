"""A callback changes which loss a model computes, before and after a worker joins.

    flips.py FOLDER HOW WHERE

The arguments are those of `joining`. Prints the digest at the end.
"""

from typing import Any

import keras
import numpy as np

import joining
import lockstep

X = np.random.default_rng(0).normal(size=(29, 4)).astype("float32")
LABELS = (np.arange(29) % 3).astype("int32")[:, None]


class Contrasts(keras.Sequential):  # type: ignore[misc]
    contrasts = False

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, **_: Any) -> Any:
        if not self.contrasts:
            return keras.ops.mean(keras.ops.square(y_pred))
        alike = keras.ops.cast(keras.ops.equal(y, keras.ops.transpose(y)), y_pred.dtype)
        likely = keras.ops.log_softmax(keras.ops.matmul(y_pred, keras.ops.transpose(y_pred)))
        return -keras.ops.mean(keras.ops.sum(alike * likely, axis=1) / keras.ops.sum(alike, axis=1))


class Flips(keras.callbacks.Callback):  # type: ignore[misc]
    steps = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        flips = {2: True, 5: False, 8: True, 14: False}
        self.model.contrasts = flips.get(self.steps, self.model.contrasts)
        joining.at(f"fit 1 step {self.steps}")


def main() -> None:
    keras.utils.set_random_seed(5)
    model = Contrasts([keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9))
    model.fit(X, LABELS, batch_size=9, epochs=5, verbose=0, callbacks=[Flips()])
    print("digest", lockstep.digest(model))


if __name__ == "__main__":
    main()
