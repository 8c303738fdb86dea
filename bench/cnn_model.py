"""The tutorial's CNN (2.77 M parameters), in Keras and in PyTorch, and random images for it."""

from typing import Any

import numpy as np

BATCH = 64
"""Images a replica."""


def examples(count: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.random((count, 28, 28), dtype=np.float32), generator.integers(0, 10, count)


def keras_cnn() -> Any:
    import keras

    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((28, 28)),
            layers.Reshape((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def torch_cnn() -> Any:
    import torch

    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 32, 3),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(32 * 26 * 26, 128),
        torch.nn.ReLU(),
        torch.nn.Linear(128, 10),
    )
