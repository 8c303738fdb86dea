"""A training of two workers that really stalls, twice: its input waits, then a worker is stopped.

Worker 1 waits for a byte from the pipe `gate` in the second epoch. In the fourth one, it writes its process
id to the pipe `stops`, and stops itself.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np

from lockstep.worker import job

STEPS, EPOCHS = 8, 5
me = job.current().worker


def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for number in range(STEPS * EPOCHS):
        if me == 1 and number == STEPS + 3:
            with Path("gate").open("rb") as gate:
                gate.read(1)
        yield np.full((4, 3), number, "float32"), np.ones((4, 1), "float32")


class Stops(keras.callbacks.Callback):  # type: ignore[misc]
    epoch = 0

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        if me == 1 and (self.epoch, batch) == (3, 3):
            Path("stops").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)


model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(batches(), steps_per_epoch=STEPS, epochs=EPOCHS, verbose=0, callbacks=[Stops()])
