"""Models whose weights and Adam's averages are 203 MB and 1.5 GB, in Keras and in PyTorch, and examples."""

import itertools
from typing import Any

import numpy as np

BATCH = 8
"""Examples per replica: few, so that steps are short."""
FEATURES = 64
WIDTH = 2048
HIDDEN = {"large": 5, "larger": 31}
"""The number of hidden layers of a model."""
BYTES = {"large": 200e6, "larger": 1500e6}
"""A lower bound of the size of its state."""
SHOWN = {"large": "203 MB", "larger": "1.5 GB"}
CLASSES = 10
LEARNING_RATE = 1e-4


def examples(count: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    generator = np.random.default_rng(0)
    return generator.random((count, FEATURES), dtype=np.float32), generator.integers(0, CLASSES, count)


def keras_model(keras: Any, name: str) -> Any:
    layers = keras.layers
    hidden = [layers.Dense(WIDTH, activation="relu") for _ in range(HIDDEN[name])]
    model = keras.Sequential([layers.Input((FEATURES,)), *hidden, layers.Dense(CLASSES)])
    model.compile(
        optimizer=keras.optimizers.Adam(LEARNING_RATE),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def torch_model(name: str) -> Any:
    from torch import nn

    widths = [FEATURES] + [WIDTH] * HIDDEN[name]
    hidden = [nn.Sequential(nn.Linear(*pair), nn.ReLU()) for pair in itertools.pairwise(widths)]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, CLASSES))
