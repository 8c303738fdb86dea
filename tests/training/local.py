"""Trains with local steps: partial batches, BatchNormalization, dropout, slots, outer momentum.

    local.py ROWS [KIND WORKER COUNT]

With KIND `lost`, this worker is killed by SIGKILL in its inner step of this number; with `waits`, it says so
and waits there. With KIND `fails`, the script raises after this number of outer steps, on all workers.
"""

import os
import signal
import sys

import keras
import numpy as np

import lockstep
from lockstep.keras.fit.local_steps import LocalProgram
from lockstep.worker import job


def failing(count: int) -> keras.callbacks.Callback:
    def end(batch: int, logs: object) -> None:
        nonlocal count
        count -= 1
        if not count:
            raise RuntimeError("the script fails")

    return keras.callbacks.LambdaCallback(on_train_batch_end=end)


def stops_in_inner_step(count: int, *, waits: bool) -> None:
    take = LocalProgram._inner_step

    def counted(self: object, *args: object) -> object:
        nonlocal count
        count -= 1
        if not count and waits:
            print("waits", flush=True)
            signal.pause()
        if not count:
            os.kill(os.getpid(), signal.SIGKILL)
        return take(self, *args)

    LocalProgram._inner_step = counted


def main() -> None:
    rows, *rest = sys.argv[1:]
    kind, worker, count = rest or ("", "0", "0")
    if kind in ("lost", "waits") and job.current().worker == int(worker):
        stops_in_inner_step(int(count), waits=kind == "waits")
    random = np.random.default_rng(0)
    x = random.normal(size=(int(rows), 8)).astype("float32")
    y = (x[:, :1] * x[:, 1:2] > 0).astype("float32")
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.25),
            keras.layers.GaussianNoise(0.1),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
    callbacks = [failing(int(count) if kind == "fails" else 0)]
    for _ in range(2):
        history = model.fit(
            x, y, batch_size=16, epochs=2, validation_data=(x[:32], y[:32]), verbose=0, callbacks=callbacks
        )
        print("logs", history.history)
    model.fit(x, y, batch_size=16, epochs=2, steps_per_epoch=3, verbose=0)
    model.train_on_batch(x[:16], y[:16])
    print("steps", int(model.optimizer.iterations))
    print("result", lockstep.digest(model), model.evaluate(x, y, verbose=0))


main()
