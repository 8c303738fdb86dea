"""The tutorial's CNN: 2.77 million parameters."""

from typing import Any

from models.model import CLASSES, Array, Model, images, uniform


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
            made.Dense(CLASSES, name="logits"),
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
    kernel = uniform("convolution", 0, (3, 3, 1, 32))
    hidden = uniform("hidden", 0, (26 * 26 * 32, 128))
    last = uniform("logits", 0, (128, 10))
    # In PyTorch, channels come before the rows and columns of an image, and outputs before inputs.
    hidden = hidden.reshape(26, 26, 32, 128).transpose(2, 0, 1, 3).reshape(-1, 128)
    weights = (kernel.transpose(3, 2, 0, 1), hidden.T, last.T)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for parameter, weight in zip(list(model.parameters())[::2], weights, strict=True):
            parameter.copy_(torch.from_numpy(weight))
    return model


MODEL = Model("the tutorial's CNN", 64, 20, examples, layers, torch_model)
