"""A training as a script, and as a function that another program launches.

    launched_training.py
    launched_training.py launch

Launched, worker 0 kills itself in `fit`, and worker 1 waits until a replacement has joined.
"""

import os
import signal
import sys
import time
from typing import Any

import keras
import numpy as np

import lockstep
from lockstep.worker import job

KILLED, MEETS, JOINS = 4, 6, 9


def train(killed: bool = False) -> dict[str, Any]:
    me = job.current()

    def until(text: str) -> None:
        assert me.context.folder is not None
        while text not in (me.context.folder / "events.jsonl").read_text():
            time.sleep(0.01)

    class Steps(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if killed and batch == KILLED and me.worker == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            if killed and batch == MEETS and me.worker == 1:
                until('"event":"asks","worker":2,"whole":false')
            if killed and batch == JOINS and me.worker == 1:
                until('"event":"asks","worker":2,"whole":true')

    with lockstep.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential(
            [
                keras.layers.Input((6,)),
                keras.layers.Dense(16, activation="relu"),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(1),
            ]
        )
        model.compile("adam", "mse")
    x = np.random.default_rng(0).normal(size=(120, 6)).astype("float32")
    history = model.fit(x, x[:, :1], epochs=2, batch_size=10, callbacks=[Steps()], verbose=0)
    return {
        "digest": lockstep.digest(model),
        "history": history.history,
        "weights": model.get_weights(),
        "worker": me.worker,
    }


def main() -> None:
    strategy = lockstep.MultiWorkerMirroredStrategy()
    if sys.argv[1:] != ["launch"]:
        print(train()["digest"])
        return
    try:
        lockstep.launch(lambda: strategy.num_replicas_in_sync)
    except lockstep.errors.InputError as error:
        print(error)
    result = lockstep.launch(train, (True,), run_dir="launched")
    print(result["worker"], len(result["weights"]), sorted(result["history"]))
    print(result["digest"])


if __name__ == "__main__":
    main()
