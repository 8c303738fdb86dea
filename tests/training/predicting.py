"""Predicts outputs of many forms; prints them. Two batches of eight rows, and one with a single row."""

import keras
import numpy as np
from keras import layers, ops

X = np.random.default_rng(5).normal(size=(17, 3)).astype("float32")


class Towers(keras.Model):
    """Has an output for each of its inputs, and a table with as many rows as one of two replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.table = layers.Dense(2), layers.Embedding(4, 2)

    def call(self, inputs: dict[str, object]) -> dict[str, object]:
        rows = {name: self.tower(inputs[name]) for name in inputs}
        return rows | {"classes": self.table(ops.arange(4))}


def show(outputs: object) -> None:
    for path, array in sorted(keras.tree.flatten_with_path(outputs)):
        rounded = array.tolist() if array.dtype.kind == "O" else np.round(array, 3).tolist()
        print("predicted", *path, array.dtype, array.shape, rounded, flush=True)


keras.utils.set_random_seed(7)
towers = Towers()
towers.compile("sgd", "mse")
for names in ("a", "ab", "ac"):
    show(towers.predict({name: X * (1 + ord(name)) for name in names}, batch_size=8, verbose=0))
show(towers.predict_on_batch({"a": X[:1], "c": X[:1]}))

if keras.backend.backend() == "tensorflow":
    inputs = keras.Input((3,))
    words = layers.StringLookup(vocabulary=["no", "maybe", "ja"], num_oov_indices=0, invert=True)
    lookup = keras.Model(inputs, words(ops.argmax(inputs, axis=-1)))
    lookup.compile(steps_per_execution=2)
    show(lookup.predict(X, batch_size=8, verbose=0))
