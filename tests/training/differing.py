"""Two calls of `fit` read one endless generator: a process that skips the first call reads other elements.

    differing.py [killed]

With "killed", worker 1 is lost in the second call, and the chief lets its replacement join.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

import lockstep
from lockstep.worker import job

ENTERED = job.current()
FIRST, SECOND = 5, 40
WAITS = {4: "false", 24: "true"}
"""By step of the second call: the request of the replacement for which the chief waits after it."""


def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(0)
    while True:
        x = random.normal(size=(8, 4)).astype("float32")
        yield x, x[:, :1] * 2


class Losing(keras.callbacks.Callback):  # type: ignore[misc]
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if ENTERED.worker == 1 and batch == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if lockstep.is_chief() and batch in WAITS:
            assert ENTERED.context.folder is not None
            asks = f'"event":"asks","worker":2,"whole":{WAITS[batch]}'
            while asks not in (ENTERED.context.folder / "events.jsonl").read_text():
                time.sleep(0.01)


def main() -> None:
    keras.utils.set_random_seed(1)
    with lockstep.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    stream = batches()
    losing = [Losing()] if "killed" in sys.argv else []
    model.fit(stream, steps_per_epoch=FIRST, verbose=0)
    try:
        history = model.fit(stream, steps_per_epoch=SECOND, callbacks=losing, verbose=0)
    except Exception as error:
        print("handled", error)
    else:
        print("end", lockstep.digest(model), history.history["loss"])


if __name__ == "__main__":
    main()
