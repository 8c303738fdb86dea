"""A model whose weights and Adam's averages are 203 MB, in Keras and in PyTorch, and examples for it."""

import itertools
from typing import Any

import numpy as np

BATCH = 8
"""Examples per replica: few, so that steps are short."""
BYTES = 200e6
"""A lower bound of the size of the state."""
FEATURES = 64
WIDTH = 2048
HIDDEN = 5
CLASSES = 10
LEARNING_RATE = 1e-4


def examples(count: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    generator = np.random.default_rng(0)
    return generator.random((count, FEATURES), dtype=np.float32), generator.integers(0, CLASSES, count)


def keras_model(keras: Any) -> Any:
    layers = keras.layers
    hidden = [layers.Dense(WIDTH, activation="relu") for _ in range(HIDDEN)]
    model = keras.Sequential([layers.Input((FEATURES,)), *hidden, layers.Dense(CLASSES)])
    model.compile(
        optimizer=keras.optimizers.Adam(LEARNING_RATE),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def torch_model() -> Any:
    from torch import nn

    widths = [FEATURES] + [WIDTH] * HIDDEN
    hidden = [nn.Sequential(nn.Linear(*pair), nn.ReLU()) for pair in itertools.pairwise(widths)]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, CLASSES))
