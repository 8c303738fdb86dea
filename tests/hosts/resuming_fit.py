"""Trains with `fit`; in its seventh step the chief writes the file `held`, and waits for the file `go`."""

import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

import lockstep


class Pause(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.model.optimizer.iterations == 6 and lockstep.is_chief():
            Path("held").touch()
            while not Path("go").exists():
                time.sleep(0.01)


keras.utils.set_random_seed(3)
x = np.random.default_rng(0).normal(size=(70, 6)).astype("float32")
model = keras.Sequential([keras.layers.Dense(5, "relu"), keras.layers.Dropout(0.3), keras.layers.Dense(1)])
model.compile(optimizer="adam", loss="mse")
model.fit(x, x.sum(1), batch_size=20, epochs=4, verbose=0, callbacks=[Pause()])
print("digest", lockstep.digest(model))
