"""Trains with the requested communication options, and prints the results.

communicating.py IMPLEMENTATION [stuck]: with "stuck", worker 1 hangs at the end of the first epoch.
"""

import sys
import threading
from typing import Any

import keras
import numpy as np

import lockstep
from lockstep.worker import job


class Stuck(keras.callbacks.Callback):  # type: ignore[misc]
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if "stuck" in sys.argv and job.current().worker == 1:
            threading.Event().wait()


options = lockstep.CommunicationOptions(
    implementation=lockstep.CommunicationImplementation[sys.argv[1]],
    bytes_per_pack=1 << 20,
    timeout_seconds=5 if "stuck" in sys.argv else None,
)
strategy = lockstep.MultiWorkerMirroredStrategy(communication_options=options)
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile("adam", "mse")
x = np.random.default_rng(0).normal(size=(60, 4)).astype("float32")
model.fit(x, x[:, :1], batch_size=20, epochs=2, verbose=0, callbacks=[Stuck()])
print("digest:", lockstep.digest(model))
