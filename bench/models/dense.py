"""Dense models of several sizes, which show how the cost grows with the number of parameters."""

import math
from typing import Any

from models.model import CLASSES, Array, Model, images

MILLIONS = (0.1, 1, 3, 10, 30)
PIXELS = 784


def examples(count: int) -> tuple[Array, Array]:
    return images(count, PIXELS)


def width(parameters: float) -> int:
    """Return the width of two hidden layers with this number of parameters."""
    half = (PIXELS + CLASSES + 2) / 2
    return round(math.sqrt(half**2 + parameters) - half)


def of(millions: float) -> Model:
    def layers(keras: Any) -> Any:
        made = keras.layers
        hidden = [made.Dense(width(millions * 1e6), "relu", name=f"hidden{number}") for number in range(2)]
        return keras.Sequential([made.Input((PIXELS,)), *hidden, made.Dense(CLASSES, name="logits")])

    return Model(f"a dense model of {millions:g} M parameters", 64, 10, examples, layers)


LARGE = (15, 125)
"""With Adam's averages, 180 MB and 1.5 GB."""
MODELS = {f"dense-{millions:g}": of(millions) for millions in (*MILLIONS, *LARGE)}
