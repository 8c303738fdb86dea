"""A program that trains on inputs that have a fixed order; prints a result for each kind.

streams.py KIND...
"""

import sys
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

import lockstep
from lockstep.keras.input import stored_arrays

x = np.random.default_rng(0).normal(size=(70, 12)).astype("float32")
y = x.sum(axis=1)


def rows() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for start in range(0, len(x), 16):
        yield x[start : start + 16], y[start : start + 16]


def endless() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    while True:
        yield from rows()


def tensorflow() -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(100).batch(16)


def torch() -> Any:
    from torch.utils import data

    return data.DataLoader(data.TensorDataset(*map(as_tensor, (x, y))), batch_size=16, shuffle=True)


def as_tensor(array: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(array)


KINDS: dict[str, tuple[Any, dict[str, int]]] = {
    "endless": (endless, {"steps_per_epoch": 3}),
    "finite": (rows, {}),
    "short": (rows, {"steps_per_epoch": 4}),
    "tensorflow": (tensorflow, {}),
    "torch": (torch, {}),
}


def main() -> None:
    strategy = lockstep.MultiWorkerMirroredStrategy()
    for kind in sys.argv[1:]:
        make, options = KINDS[kind]
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(4, activation="relu"), keras.layers.Dense(1)])
            model.compile("adam", "mse")
        data = make()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            history = model.fit(data, epochs=2, verbose=0, **options)
        ended = sum("ran out of data" in str(warning.message) for warning in caught)
        figures = ""
        if kind in ("tensorflow", "torch"):
            figures = f"{model.evaluate(data, verbose=0).hex()} {model.predict(data, verbose=0).shape}"
        print(f"stream {kind} {lockstep.digest(model)} {len(history.epoch)} {ended} {figures}")
    stored_arrays.LARGE = 2 * x.nbytes
    for validation in (None, (x, y)):
        model.fit(x, y, validation_data=validation, verbose=0)


if __name__ == "__main__":
    main()
