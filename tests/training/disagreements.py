"""A program whose workers differ, in one respect after the other; prints each error and continues.

    disagreements.py FOLDER

Last, they save different weights, which only the second one finds: its script ends with the error.
"""

import json
import os
import sys
from collections.abc import Callable

import keras
import numpy as np

import lockstep

worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
unseeded = np.random.default_rng()
x = np.linspace(-1, 1, 64, dtype="float32").reshape(16, 4)
y = x.sum(axis=1)


def build() -> keras.Model:
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1, name="only")])
    model.compile("sgd", "mse")
    return model


class Noisy(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = slice(index * 4, index * 4 + 4)
        return x[rows] + (unseeded.normal(size=(4, 4)) if index == 2 else 0), y[rows]


def models(model: keras.Model) -> None:
    model.set_weights([unseeded.normal(size=(4, 1)), np.zeros(1)])
    model.fit(x, y, verbose=0)


def examples(model: keras.Model) -> None:
    order = unseeded.permutation(16)
    model.fit(x[order], y[order], verbose=0)


def batches(model: keras.Model) -> None:
    model.fit(Noisy(), shuffle=False, verbose=0)


def calls(model: keras.Model) -> None:
    if worker == 0:
        model.fit(x, y, verbose=0)
    else:
        model.evaluate(x, y, verbose=0)


def hyperparameters(model: keras.Model) -> None:
    rate = unseeded.uniform(0.1, 0.3) + 0.3 * worker
    with lockstep.MultiWorkerMirroredStrategy().scope():
        other = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dropout(round(rate, 3)), keras.layers.Dense(1)]
        )
        other.set_weights(model.get_weights())
        other.compile("sgd", "mse")
    other.fit(x, y, verbose=0)


def sizes(model: keras.Model) -> None:
    model.fit(x[: 16 - worker], y[: 16 - worker], batch_size=4, verbose=0)


def epochs(model: keras.Model) -> None:
    model.fit(x, y, epochs=1 + worker, verbose=0)


class Nudge(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        if worker == 1:
            self.model.get_layer("only").bias.assign_add([1e-7])


def drift(model: keras.Model) -> None:
    model.fit(x, y, epochs=150, batch_size=16, callbacks=[Nudge()], verbose=0)


def ends(model: keras.Model) -> None:
    model.fit(x, y, epochs=2, batch_size=16, callbacks=[Nudge()], verbose=0)


def draws(model: keras.Model) -> None:
    keras.utils.set_random_seed(3)
    if worker == 0:
        np.random.random()
    model.fit(x, y, verbose=0)


def main() -> None:
    cases: list[Callable[[keras.Model], None]] = [
        models,
        examples,
        batches,
        sizes,
        epochs,
        drift,
        hyperparameters,
        ends,
        draws,
        calls,
    ]
    strategy = lockstep.MultiWorkerMirroredStrategy()
    for case in cases:
        with strategy.scope():
            model = build()
        try:
            case(model)
        except Exception as error:
            print(f"case {case.__name__}: {type(error).__name__}: {error}")
        else:
            print(f"case {case.__name__}: no error")
    with strategy.scope():
        model = build()
    model.set_weights([np.full((4, 1), worker), np.zeros(1)])
    model.save_weights(f"{sys.argv[1]}/unlike.weights.h5")


if __name__ == "__main__":
    main()
