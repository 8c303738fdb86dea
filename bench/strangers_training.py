"""The job that `strangers.py` measures: strangers_training.py FOLDER; trains until FOLDER has a file `stop`.

The chief writes the times at which its steps ended to the file `ends`.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import keras

import lockstep
from models import MODELS

FOLDER = Path(sys.argv[1])
STEPS, EPOCHS = 20, 1_000_000
PAUSE = 5e-4
"""Seconds of rest in each step: the kernel stops threads of real-time priority for 50 ms if they use a core
for more than 95 % of a second."""


class Times(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self._ends: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._ends.append(time.monotonic())
        time.sleep(PAUSE)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        (FOLDER / "started").touch()
        self.model.stop_training = (FOLDER / "stop").exists()

    def on_train_end(self, logs: Any = None) -> None:
        if lockstep.is_chief():
            (FOLDER / "ends").write_text(json.dumps(self._ends))


keras.utils.set_random_seed(1)
measured = MODELS["mlp"]
with lockstep.MultiWorkerMirroredStrategy().scope():
    model = measured.compiled(keras)
x, y = measured.examples(STEPS * 2 * measured.batch)
options = {"shuffle": False, "verbose": 0, "callbacks": [Times()]}
model.fit(x, y, batch_size=2 * measured.batch, epochs=EPOCHS, **options)
