"""What a model to measure with consists of.

All programs start from the same weights, so that those that compute the same mathematics can be compared.
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
        title: what reports call it.
        batch: examples a replica.
        steps: of a turn.
        examples: makes so many of them, as (x, y).
        layers: builds it with this `keras`, Keras 3 or tf_keras; every layer with weights has a name.
        torch: builds it in PyTorch, with the same weights.
        compared: turns in which the losses of all programs are near each other: training multiplies
            differences of rounding.
        near: the part of a loss by which rounding may change it.
        batch_statistics: whether an example's output depends on the others in its batch: then a program
            that computes a larger batch at once computes something else.
        sparse: whether Keras on TensorFlow keeps a gradient as a list of occurrences, of which its Adam makes
            something else than of their sum.
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

    def compiled(self, keras: Any) -> Any:
        """Return the model of this `keras` as all programs train it."""
        model = self.layers(keras)
        model.compile(
            optimizer=keras.optimizers.Adam(LEARNING_RATE),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        for layer in model.layers:
            if given := layer.get_weights():
                layer.set_weights([begun(layer.name, number, weight) for number, weight in enumerate(given)])
        return model


def begun(layer: str, number: int, given: Array) -> Array:
    """Return a weight to begin with: what Keras gives if that is constant, as biases are."""
    return given if np.ptp(given) == 0 else uniform(layer, number, given.shape)


def uniform(layer: str, number: int, shape: Sequence[int]) -> Array:
    """Return LeCun's uniform numbers for a layer's weight, the same in every program."""
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
    """Return for each of two processes its half of every global batch, of `batch` examples."""
    split = [array.reshape(-1, 2, batch, *array.shape[1:]) for array in examples]
    return [[array[:, process].reshape(-1, *array.shape[3:]) for array in split] for process in range(2)]
