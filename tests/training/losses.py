"""Trainings whose losses are not means over examples; nothing in them is random.

    losses.py [--plain]

Prints a digest of the results of each, and the numbers.
"""

import contextlib
import sys
from typing import Any

import keras
import numpy as np

import lockstep

layers = keras.layers


def sentences() -> tuple[Any, Any]:
    """Sequences of tokens of very different lengths, padded with 0, and a target for each."""
    random = np.random.default_rng(0)
    tokens = random.integers(1, 20, (94, 7))
    lengths = random.integers(1, 8, 94)
    lengths[:20] = 1
    tokens[np.arange(7) >= lengths[:, None]] = 0
    return tokens, (tokens % 3).astype("float32")[..., None]


def masked() -> tuple[keras.Model, Any, Any, Any]:
    """A mask from the model, a recurrent layer, a regularizer, metrics with and without weights."""
    model = keras.Sequential(
        [
            layers.Input((7,), dtype="int32"),
            layers.Embedding(20, 4, mask_zero=True),
            layers.LSTM(5, return_sequences=True),
            layers.Dense(1, kernel_regularizer="l2"),
        ]
    )
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer, "mse", metrics=["mae"], weighted_metrics=["mse"])
    return model, *sentences(), None


def weighted() -> tuple[keras.Model, Any, Any, Any]:
    """A mean with sample weights."""
    model = keras.Sequential([layers.Input((7,)), layers.Dense(4, activation="tanh"), layers.Dense(1)])
    model.compile("adam", keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"))
    tokens, targets = sentences()
    return model, tokens.astype("float32") / 20, targets[:, 0], np.linspace(0.1, 3, 94).astype("float32")


def contrast(y: Any, p: Any) -> Any:
    """Compares each example with all others of the batch."""
    ops = keras.ops
    alike = ops.cast(ops.equal(ops.reshape(y, (-1, 1)), ops.reshape(y, (1, -1))), "float32")
    likely = ops.log_softmax(ops.matmul(p, ops.transpose(p)))
    return -ops.mean(ops.sum(alike * likely, axis=1) / ops.sum(alike, axis=1))


def correlation(y: Any, p: Any) -> Any:
    y, p = (keras.ops.cast(one, "float32") for one in (y[:, 0], p[:, 0]))
    y, p = y - keras.ops.mean(y), p - keras.ops.mean(p)
    return keras.ops.sum(y * p) / keras.ops.sqrt(keras.ops.sum(y * y) * keras.ops.sum(p * p))


def contrasted() -> tuple[keras.Model, Any, Any, Any]:
    """A loss and a metric that compare the examples of a batch, and regularizers."""
    model = keras.Sequential(
        [
            layers.Input((7,)),
            layers.Dense(6, activation="tanh", kernel_regularizer="l2", activity_regularizer="l2"),
            layers.Dense(4),
        ]
    )
    model.compile(keras.optimizers.SGD(0.3, momentum=0.9), contrast, metrics=["mae", correlation])
    tokens, _ = sentences()
    return model, tokens.astype("float32") / 20, tokens[:, :1] % 4, None


def main() -> None:
    plain = sys.argv[1:] == ["--plain"]
    scope = contextlib.nullcontext if plain else lockstep.MultiWorkerMirroredStrategy().scope
    for training in (masked, weighted, contrasted):
        keras.utils.set_random_seed(3)
        with scope():
            model, x, y, weight = training()
        # The shares of all batches have 7 or 8 rows, because a backend compiles for each number.
        part = (x[:62], y[:62]) if weight is None else (x[:62], y[:62], weight[:62])
        options = {"sample_weight": weight, "validation_data": part, "shuffle": False, "verbose": 0}
        history = model.fit(x, y, batch_size=32, epochs=3, **options).history
        figures = [value for _, values in sorted(history.items()) for value in values]
        weights = np.concatenate([np.ravel(array) for array in model.get_weights()])
        print("result", training.__name__, lockstep.digest(model))
        print("numbers", *(float(number) for number in [*figures, *weights]))


if __name__ == "__main__":
    main()
