"""A plain Keras script that creates a strategy at its end.

plain_script.py FOLDER whole|scope|lost: as it is; with its first part in a scope; with a worker lost.
"""

import os
import signal
import sys
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
from keras.saving import save_model

FOLDER, HOW = sys.argv[1:]
X = np.random.default_rng(0).normal(size=(40, 6)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


class KillWorker(keras.callbacks.Callback):
    """Kills worker 1 in the second epoch; its replacement does not repeat the first one."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        from lockstep.worker.job import current

        if HOW == "lost" and current().worker == 1 and self.model.optimizer.iterations == 5:
            os.kill(os.getpid(), signal.SIGKILL)


def compiled(*layers: Any) -> Any:
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    return model


def strategy() -> Any:
    import lockstep

    return lockstep.MultiWorkerMirroredStrategy()


def train() -> Any:
    model = compiled(keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.1))
    # As a folder that is named after the time, this name differs between workers.
    log = keras.callbacks.CSVLogger(f"{FOLDER}/log-{os.getpid()}.csv")
    model.fit(X, Y, batch_size=16, epochs=3, verbose=0, callbacks=[KillWorker(), log])
    # Several times: without sharing, a worker would read the file while another one writes it.
    for _ in range(5):
        save_model(model, f"{FOLDER}/model.keras")
        loaded = keras.models.load_model(f"{FOLDER}/model.keras")
    history = loaded.fit(X, Y, batch_size=16, verbose=0).history
    print("result", history, loaded.evaluate(X, Y, verbose=0), float(loaded.predict(X, verbose=0).sum()))
    return loaded


keras.utils.set_random_seed(5)
with strategy().scope() if HOW == "scope" else nullcontext():
    model = train()

import lockstep  # noqa: E402

with strategy().scope():
    scoped = compiled()
scoped.fit(X, Y, batch_size=16, verbose=0)
model.fit(X, Y, batch_size=16, verbose=0)
print("result", lockstep.digest(model), lockstep.digest(scoped))
try:
    compiled().fit(X, Y, verbose=0)
except lockstep.errors.ScopeError:
    print("result refused outside of the scope")
