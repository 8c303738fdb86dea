"""A small MLP: 51 thousand parameters, so that the cost of an exchange is its latency."""

from typing import Any

from models.model import CLASSES, Array, Model, images


def examples(count: int) -> tuple[Array, Array]:
    x, y = images(count, 784)
    # With only positive inputs, units of the MLP die, and the last bit may decide whether a unit does.
    return x - x.dtype.type(0.5), y


def layers(keras: Any) -> Any:
    made = keras.layers
    return keras.Sequential(
        [
            made.Input((784,)),
            made.Dense(64, activation="relu", name="hidden"),
            made.Dense(CLASSES, name="logits"),
        ]
    )


MODEL = Model("a small MLP", 64, 100, examples, layers)
