"""The rows of a first `fit` hide that a loss compares examples; those of the second one show it.

    tried_again.py fit|batches [WORKER ...]

With "batches", `train_on_batch` trains, and all rows show it. In the second `fit`, these workers are killed,
unless the job resumes. Prints the digest at the end.
"""

import os
import signal
import sys
from typing import Any

import keras
import numpy as np

import lockstep
from lockstep.worker import job

X = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
HOW, *KILLED = sys.argv[1:]


class Largest(keras.Sequential):  # type: ignore[misc]
    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, **_: Any) -> Any:
        errors = keras.ops.square(y - y_pred)
        return keras.ops.mean(errors) + keras.ops.max(keras.ops.square(x[:, :1]) * errors)


def may_die() -> None:
    checkpoints = job.current().checkpoints
    if str(job.current().worker) in KILLED and checkpoints.resumed is None:
        # The checkpoints that the chief has taken are on disk.
        assert checkpoints.scheduler is None or checkpoints.scheduler.close(30)
        os.kill(os.getpid(), signal.SIGKILL)


class Kill(keras.callbacks.Callback):  # type: ignore[misc]
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1:
            may_die()


def main() -> None:
    keras.utils.set_random_seed(1)
    model = Largest([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd")
    options = {"batch_size": 4, "shuffle": False, "verbose": 0}
    # The second call has so many steps that the others ask for a replacement before the last one.
    hiding = np.float32([HOW == "batches", 1, 1])
    for x, epochs, callbacks in ((X * hiding, 1, []), (X, 25, [Kill()])):
        if HOW == "fit":
            model.fit(x, X[:, 1:2], epochs=epochs, callbacks=callbacks, **options)
            continue
        for start in [*range(0, 16, 4)] * epochs:
            model.train_on_batch(x[start : start + 4], X[start : start + 4, 1:2])
            if callbacks and start == 4:
                may_die()
    print("digest", lockstep.digest(model))


if __name__ == "__main__":
    main()
