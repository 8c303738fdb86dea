"""Steps of the program that call Keras's, on a model with a regularizer; run it with `--tf-distribute`.

Prints the losses and the sum of the weights' sizes of each model, first with plain Keras.
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

X = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")


class Calling(keras.Sequential):
    def train_step(self, *arguments: Any) -> Any:
        return super().train_step(*arguments)


class Keeping(keras.Sequential):
    """Calls the step that Keras had when the class was defined."""

    kept = keras.Model.train_step

    def train_step(self, *arguments: Any) -> Any:
        return self.kept(*arguments)


def train(kind: str, model_class: type[keras.Model]) -> None:
    keras.utils.set_random_seed(1)
    dense = keras.layers.Dense(1, kernel_regularizer=keras.regularizers.L2(0.5))
    model = model_class([keras.Input((4,)), dense])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    losses = model.fit(X, X[:, :1], batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]
    size = sum(float(np.abs(weight).sum()) for weight in model.get_weights())
    print(kind, model_class.__name__, *losses, size, flush=True)


CLASSES = (Calling, Keeping)
for model_class in CLASSES:
    train("plain", model_class)
with tf.distribute.MirroredStrategy().scope():
    for model_class in CLASSES:
        train("replicas", model_class)
