"""One process of the tutorial's CNN in Keras: `fit`, an epoch a turn.

    cnn_keras.py PROGRAM PLAIN PROCESS TURNS STEPS

With PLAIN 1 it is plain Keras; else the strategy's scope is all that differs. PROCESS -1 takes the
worker's number from TF_CONFIG.
"""

import contextlib
import json
import os
import sys
import time
from typing import Any

from turns import SOCKET, Turns, pin

NAME, PLAIN, PROCESS, TURNS, STEPS = sys.argv[1], sys.argv[2] == "1", *map(int, sys.argv[3:])
if PROCESS < 0:
    PROCESS = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
pin(PROCESS)

import keras  # noqa: E402
import numpy as np  # noqa: E402

import lockstep  # noqa: E402
from cnn_model import BATCH, examples, keras_cnn  # noqa: E402


class Turn(keras.callbacks.Callback):
    """Waits before each epoch, and answers after it."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: Turns | None = None
        self.begun = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self.turns is None and epoch:
            # The first epoch compiles: it is nobody's turn.
            self.turns = Turns(os.environ[SOCKET], NAME, PROCESS)
        if self.turns is not None and not self.turns.wait():
            sys.exit("the driver is gone")
        self.begun = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        seconds = time.perf_counter() - self.begun
        if self.turns is not None:
            self.turns.answer({"seconds": seconds, "loss": float(logs["loss"]).hex()})


strategy = None if PLAIN else lockstep.MultiWorkerMirroredStrategy()
replicas = strategy.num_replicas_in_sync if strategy else 1
keras.utils.set_random_seed(1)
with strategy.scope() if strategy else contextlib.nullcontext():
    model = keras_cnn()
x, y = examples(STEPS * BATCH * replicas)
model.fit(x, y, batch_size=BATCH * replicas, epochs=TURNS + 1, shuffle=False, verbose=0, callbacks=[Turn()])
assert np.isfinite(model.get_weights()[0]).all()
