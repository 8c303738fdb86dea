"""Callbacks change values of Python outside of the model: global variables, closures, containers and classes.

    changing.py FOLDER HOW WHERE

The arguments are those of `joining`. Prints the digest at the end. The model is
compiled three times: a compiled step follows the values of its first call.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import joining
import lockstep

X = np.random.default_rng(0).normal(size=(29, 4)).astype("float32")
WEIGHT = 1.0
STEPS = 0
CONFIG: dict[str, Any] = {"powers": [2.0, 2.0], "name": "first"}


class Settings:
    scale = 1.0


SETTINGS = Settings()


def levels() -> tuple[Callable[[], float], Callable[[], None]]:
    level = 0.0

    def rises() -> None:
        nonlocal level
        level += 0.5

    return lambda: level, rises


level, rises = levels()


class Weighs(keras.Sequential):  # type: ignore[misc]
    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, **_: Any) -> Any:
        powers = CONFIG["powers"]
        loss = keras.ops.mean(keras.ops.abs(y_pred) ** powers[0]) + powers[1] * keras.ops.mean(y_pred)
        factor = 0.7 if CONFIG["name"] == "second" else 1.0
        return factor * WEIGHT * Settings.scale * SETTINGS.scale * loss + level() * keras.ops.mean(y_pred)


class Changes(keras.callbacks.Callback):  # type: ignore[misc]
    def __init__(self, call: int) -> None:
        super().__init__()
        self.call = call

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        global WEIGHT
        if self.call == 1 and STEPS == 0:
            WEIGHT = 1.5

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        global STEPS, WEIGHT
        STEPS += 1
        if STEPS % 6 == 2:
            WEIGHT += 0.5
            CONFIG["powers"][1] += 0.25
        if STEPS % 6 == 3:
            rises()
            Settings.scale *= 1.25
        if STEPS % 6 == 4:
            CONFIG["name"] = "second"
            SETTINGS.scale = 0.75 * SETTINGS.scale
        if STEPS % 5 == 0:
            self.model.optimizer.learning_rate = self.model.optimizer.learning_rate * 0.9
        where = f"fit {self.call} step {batch + 1}"
        joining.at(where)


def main() -> None:
    keras.utils.set_random_seed(5)
    model = Weighs([keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(2)])
    for call in (1, 2, 3):
        if call != 2:
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9))
        history = model.fit(X, batch_size=4, epochs=1, verbose=0, callbacks=[Changes(call)]).history
        print("loss", call, history["loss"])
    print("digest", lockstep.digest(model), STEPS, WEIGHT, CONFIG, Settings.scale, SETTINGS.scale, level())


if __name__ == "__main__":
    main()
