"""The description of a model for measurements.

All programs start with the same weights, so that those that compute the same function can be compared.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LEARNING_RATE = 1e-3
CLASSES = 10
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Model:
    """A model and its examples.

    Attributes:
        title: the name in reports.
        batch: examples per replica.
        steps: the number of steps per turn.
        examples: makes a number of examples, as (x, y).
        layers: builds the model with `keras`, Keras 3 or tf_keras; every layer with weights has a name.
        torch: builds the model in PyTorch, with the same weights.
        compared: the turns in which the losses of all programs are compared: training amplifies differences
            of rounding.
        near: the fraction of a loss by which rounding may change it.
        batch_statistics: whether the output for an example depends on the others in its batch; then a program
            with a larger batch computes something else.
        sparse: whether Keras on TensorFlow represents a gradient as a list of occurrences, for which its Adam
            computes another update than for their sum.
    """

    title: str
    batch: int
    steps: int
    examples: Callable[[int], tuple[Array, Array]]
    layers: Callable[[Any], Any]
    torch: Callable[[], Any] | None = None
    compared: int = 8
    near: float = 1e-4
    batch_statistics: bool = False
    sparse: bool = False

    def built(self, keras: Any) -> Any:
        """Return the compiled model with weights of Keras."""
        model = self.layers(keras)
        model.compile(
            optimizer=keras.optimizers.Adam(LEARNING_RATE),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        return model

    def compiled(self, keras: Any) -> Any:
        """Return the compiled model with the common initial weights."""
        model = self.built(keras)
        for layer in model.layers:
            if given := layer.get_weights():
                layer.set_weights(
                    [initial_weight(layer.name, number, weight) for number, weight in enumerate(given)]
                )
        return model


def initial_weight(layer: str, number: int, given: Array) -> Array:
    """Return an initial weight: that of Keras if it is constant, like a bias."""
    return given if np.ptp(given) == 0 else uniform(layer, number, given.shape)


def uniform(layer: str, number: int, shape: Sequence[int]) -> Array:
    """Return a weight with LeCun's uniform initialization, the same in every program."""
    generator = np.random.default_rng([zlib.crc32(layer.encode()), number])
    limit = np.sqrt(3 * shape[-1] / np.prod(shape))
    return generator.uniform(-limit, limit, shape).astype(np.float32)


def images(count: int, *shape: int) -> tuple[Array, Array]:
    """Return random images, and a label for each."""
    generator = np.random.default_rng(0)
    return generator.random((count, *shape), dtype=np.float32), generator.integers(0, CLASSES, count)


def tokens(count: int, length: int, words: int) -> tuple[Array, Array]:
    """Return random sequences of tokens, and a label for each."""
    generator = np.random.default_rng(0)
    drawn = generator.integers(0, words, (count, length), dtype=np.int32)
    return drawn, generator.integers(0, CLASSES, count)


def halves(examples: Sequence[Array], batch: int) -> list[list[Array]]:
    """Return for each of two processes its half of every global batch; a half has `batch` examples."""
    split = [array.reshape(-1, 2, batch, *array.shape[1:]) for array in examples]
    return [[array[:, process].reshape(-1, *array.shape[3:]) for array in split] for process in range(2)]
