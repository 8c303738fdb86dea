"""Calls that take examples in a random order and draw random numbers, on plain Keras and then on Lockstep.

Prints the exact results of each kind of input, and the random states afterwards.
"""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

import lockstep
from lockstep.keras.randomness import digest_of_states

layers = keras.layers
BACKEND = keras.backend.backend()
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(70, 5)).astype("float32")
Y = (X[:, 0] > 0).astype("float32")


class Draws(keras.callbacks.Callback):  # type: ignore[misc]
    """Takes numbers from the program's random states between passes."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        np.random.normal()
        random.random()
        keras.random.uniform(())


class Batches(keras.utils.PyDataset):  # type: ignore[misc]
    """Shuffles its own rows, and changes them."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = np.arange(len(X))

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        rows = self.rows[index * 12 : index * 12 + 12]
        return X[rows] + np.random.normal(), Y[rows]

    def on_epoch_begin(self) -> None:
        np.random.shuffle(self.rows)

    def on_epoch_end(self) -> None:
        np.random.shuffle(self.rows)


def model(*first: Any) -> keras.Model:
    made = keras.Sequential(
        [*first, layers.Dense(4, activation="relu"), layers.Dropout(0.3), layers.Dense(1)]
    )
    made.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True), metrics=["accuracy"])
    return made


def arrays() -> Iterator[Any]:
    """A model without variables, and calls of every kind."""
    made = model()
    yield made.evaluate(X, Y, batch_size=32, verbose=0)
    options: dict[str, Any] = {"batch_size": 32, "verbose": 0, "callbacks": [Draws()]}
    yield made.fit(X, Y, epochs=3, validation_split=0.2, **options).history
    yield made.predict(X, batch_size=50, verbose=0)
    yield made.fit(X, Y, epochs=2, shuffle="batch", steps_per_epoch=2, **options).history
    yield made.train_on_batch(X[:32], Y[:32])
    yield made.get_weights()


def datasets() -> Iterator[Any]:
    """A model that was built by hand, and inputs that are read batch by batch."""
    made = model(layers.Input((5,)))
    yield made.predict(X, batch_size=50, verbose=0)
    yield made.fit(Batches(), epochs=3, validation_data=(X, Y), verbose=0, callbacks=[Draws()]).history
    yield made.fit(stream(), epochs=3, verbose=0).history
    yield made.get_weights()


def stream() -> Any:
    if BACKEND == "torch":
        import torch

        rows = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
        return torch.utils.data.DataLoader(rows, batch_size=12, shuffle=True)
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(70).batch(12)


def main() -> None:
    # Lockstep replaces methods of Keras when a strategy is created.
    for kind in ("plain", "lockstep"):
        scope = (
            contextlib.nullcontext() if kind == "plain" else lockstep.MultiWorkerMirroredStrategy().scope()
        )
        with scope:
            for inputs in (arrays, datasets):
                # Up to Keras 3.14, a seed leaves the global generator of an earlier program as it is.
                keras.utils.clear_session()
                keras.utils.set_random_seed(7)
                for number, result in enumerate(inputs()):
                    figures = [np.asarray(leaf, "float64").tobytes() for leaf in keras.tree.flatten(result)]
                    print(kind, inputs.__name__, number, b"".join(figures).hex()[:4000])
                names = ("python", "numpy", *(["torch"] if BACKEND == "torch" else []))
                print(kind, inputs.__name__, "states", *(digest_of_states([name]) for name in names))


if __name__ == "__main__":
    main()
