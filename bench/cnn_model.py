"""The tutorial's CNN (2.77 M parameters), in Keras and in PyTorch, and random images for it.

All programs start from the same weights, so that those that compute the same mathematics can be compared.
"""

from typing import Any

import numpy as np

BATCH = 64
"""Images a replica."""
LEARNING_RATE = 1e-3
SHAPES = ((3, 3, 1, 32), (32,), (26 * 26 * 32, 128), (128,), (128, 10), (10,))
"""Of the weights, as Keras has them."""
Arrays = list[np.ndarray[Any, Any]]


def examples(count: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    generator = np.random.default_rng(0)
    return generator.random((count, 28, 28), dtype=np.float32), generator.integers(0, 10, count)


def initial_weights() -> Arrays:
    """Return Glorot's uniform weights, and biases of zero."""
    generator = np.random.default_rng(1)
    weights = []
    for shape in SHAPES:
        if len(shape) == 1:
            weights.append(np.zeros(shape, np.float32))
        else:
            field = np.prod(shape[:-2])
            limit = np.sqrt(6 / (field * (shape[-2] + shape[-1])))
            weights.append(generator.uniform(-limit, limit, shape).astype(np.float32))
    return weights


def keras_cnn(keras: Any) -> Any:
    """Return the model of this `keras`: Keras 3 or tf_keras."""
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
        optimizer=keras.optimizers.Adam(LEARNING_RATE),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.set_weights(initial_weights())
    return model


def torch_cnn() -> Any:
    import torch

    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 32, 3),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(26 * 26 * 32, 128),
        torch.nn.ReLU(),
        torch.nn.Linear(128, 10),
    )
    kernel, bias, hidden, hidden_bias, last, last_bias = initial_weights()
    # PyTorch has the channels before the image's rows and columns, and the outputs before the inputs.
    hidden = hidden.reshape(26, 26, 32, 128).transpose(2, 0, 1, 3).reshape(-1, 128)
    weights = (kernel.transpose(3, 2, 0, 1), bias, hidden.T, hidden_bias, last.T, last_bias)
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.copy_(torch.from_numpy(weight))
    return model
