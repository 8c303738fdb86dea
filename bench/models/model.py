"""What a model to measure with consists of.

All programs start from the same weights, so that those that compute the same mathematics can be compared.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LEARNING_RATE = 1e-3
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
    """

    title: str
    batch: int
    steps: int
    examples: Callable[[int], tuple[Array, Array]]
    layers: Callable[[Any], Any]
    torch: Callable[[], Any] | None = None

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
                layer.set_weights(initial_weights(layer.name, given))
        return model


def initial_weights(layer: str, given: Sequence[Array]) -> list[Array]:
    """Return a layer's weights to begin with: matrices by its name, and vectors as they are given."""
    generator = np.random.default_rng(zlib.crc32(layer.encode()))
    return [
        weight if weight.ndim < 2 else uniform(generator, weight.shape).astype(np.float32) for weight in given
    ]


def uniform(generator: np.random.Generator, shape: Sequence[int]) -> Array:
    """Return LeCun's uniform weights, of the variance that keeps that of the signal."""
    limit = np.sqrt(3 * shape[-1] / np.prod(shape))
    return generator.uniform(-limit, limit, shape)


def images(count: int, *shape: int) -> tuple[Array, Array]:
    """Return random images, and one of ten labels for each."""
    generator = np.random.default_rng(0)
    return generator.random((count, *shape), dtype=np.float32), generator.integers(0, 10, count)
