"""A script for `lockstep check`; arguments: what it does, and a pipe.

named     a layer subtracts the mean of the batch, and models are saved and loaded; on PyTorch, a step has
          an optimizer of its own, too
fault     replicas are combined wrongly, and a library in C writes a file
nothing   no model is trained
    waits     writes its process id to the pipe, and waits for a signal
"""

import os
import signal
import sqlite3
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

from lockstep.data.batch import GlobalBatch

WHAT = sys.argv[1]


class Centered(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        return x - keras.ops.mean(x, axis=0, keepdims=True)


class Squaring(keras.optimizers.SGD):
    """Squares gradients, so that those of replicas must be added up before."""

    def apply_gradients(self, grads_and_vars: Any, **options: Any) -> Any:
        return super().apply_gradients([(gradient**2, weight) for gradient, weight in grads_and_vars])


class Watched(keras.layers.Layer):
    """Keeps a mean over the examples, and a figure that compares them, in metrics.

    Plain Keras allows this on TensorFlow and PyTorch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.level = keras.metrics.Mean(name="level")
        self.spread = keras.metrics.Mean(name="spread")

    def call(self, x: Any) -> Any:
        self.level.update_state(keras.ops.mean(keras.ops.square(x)))
        self.spread.update_state(keras.ops.std(x))
        return x


class WithOptimizer(keras.Model):
    """Has a step with an optimizer that creates its variables in its first update.

    Afterwards, the step clears its gradients where they are.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.inner = optimizer

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        loss = keras.ops.mean(keras.ops.square(self(data[0]) - data[1]))
        loss.backward()
        gradients = [weight.value.grad for weight in self.trainable_weights]
        self.inner.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        for gradient in gradients:
            gradient.zero_()
        return {"error": loss}


def main() -> None:
    if WHAT == "nothing":
        return
    if WHAT == "waits":
        Path(sys.argv[2]).write_text(str(os.getpid()))
        signal.pause()
    if WHAT == "fault":
        share = GlobalBatch.share
        GlobalBatch.share = lambda *args: share(*args)._replace(weight=1.0)  # type: ignore[method-assign]
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    layers = [keras.layers.Dense(8, activation="relu"), keras.layers.Dropout(0.1), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    callbacks = [keras.callbacks.CSVLogger("log.csv"), keras.callbacks.ModelCheckpoint("best.keras")]
    print(len(model.fit(x, y, batch_size=8, epochs=5, verbose=0, callbacks=callbacks).epoch))
    if WHAT == "fault":
        sqlite3.connect("runs.db").execute("create table runs (loss real)")
    if WHAT == "named":
        model = keras.Sequential([model, Centered(name="centered"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.evaluate(x, y, verbose=0)
        model.save("model.keras")
        best = keras.saving.load_model("best.keras")
        print(
            keras.models.load_model("model.keras", {"Centered": Centered}).count_params(), best.count_params()
        )
        inputs = keras.Input((4,))
        outputs = [keras.layers.Dense(1, name=name)(inputs) for name in ("one", "other")]
        model = keras.Model(inputs, outputs, name="forked")
        model.compile(loss=["mse", "mae"], metrics=[["mae"], [keras.metrics.FalseNegatives(0.0)]])
        model.evaluate(x, [y, y], verbose=0)
        if keras.backend.backend() == "torch":
            for optimizer in (keras.optimizers.Adagrad(0.1), Squaring(0.1)):
                model = WithOptimizer(optimizer)
                model.compile()
                model.fit(x, y, batch_size=8, verbose=0)
            model = keras.Sequential([Watched(), keras.layers.Dense(1)], name="watched")
            model.compile("sgd", "mse")
            model.evaluate(x, y, verbose=0)
        Path("out.csv").write_text("1")
        model.predict(x, verbose=0)


if __name__ == "__main__":
    main()
