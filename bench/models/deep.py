"""Many small layers: 2,000 variables, so that the cost of each variable shows."""

from typing import Any

from models.model import CLASSES, Array, Model, images

PIXELS = 64
BRANCHES = 20
LAYERS = 50
"""Of each branch: Keras recurses from layer to layer."""


def examples(count: int) -> tuple[Array, Array]:
    return images(count, PIXELS)


def layers(keras: Any) -> Any:
    made = keras.layers
    inputs = made.Input((PIXELS,))
    ends = []
    for branch in range(BRANCHES):
        hidden = inputs
        for number in range(LAYERS):
            hidden = made.Dense(16, activation="tanh", name=f"hidden{branch}-{number}")(hidden)
        ends.append(hidden)
    return keras.Model(inputs, made.Dense(CLASSES, name="logits")(made.Add()(ends)))


MODEL = Model("many small layers", 32, 10, examples, layers)
