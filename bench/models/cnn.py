"""The tutorial's CNN: 2.77 million parameters."""

from typing import Any

import numpy as np

from models.model import Array, Model, images, initial_weights


def examples(count: int) -> tuple[Array, Array]:
    return images(count, 28, 28)


def layers(keras: Any) -> Any:
    made = keras.layers
    return keras.Sequential(
        [
            made.Input((28, 28)),
            made.Reshape((28, 28, 1)),
            made.Conv2D(32, 3, activation="relu", name="convolution"),
            made.Flatten(),
            made.Dense(128, activation="relu", name="hidden"),
            made.Dense(10, name="logits"),
        ]
    )


def torch_model() -> Any:
    import torch

    model = torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 28)),
        torch.nn.Conv2d(1, 32, 3),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(26 * 26 * 32, 128),
        torch.nn.ReLU(),
        torch.nn.Linear(128, 10),
    )
    kernel, bias = _weights("convolution", (3, 3, 1, 32))
    hidden, hidden_bias = _weights("hidden", (26 * 26 * 32, 128))
    last, last_bias = _weights("logits", (128, 10))
    # PyTorch has the channels before the image's rows and columns, and the outputs before the inputs.
    hidden = hidden.reshape(26, 26, 32, 128).transpose(2, 0, 1, 3).reshape(-1, 128)
    weights = (kernel.transpose(3, 2, 0, 1), bias, hidden.T, hidden_bias, last.T, last_bias)
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.copy_(torch.from_numpy(weight))
    return model


def _weights(layer: str, shape: tuple[int, ...]) -> list[Array]:
    return initial_weights(layer, [np.empty(shape), np.zeros(shape[-1], np.float32)])


MODEL = Model("the tutorial's CNN", 64, 40, examples, layers, torch_model)
