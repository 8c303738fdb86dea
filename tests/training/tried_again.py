"""The rows of a first `fit` hide that a loss compares examples; those of the second one show it.

    tried_again.py [WORKER ...]

In the second `fit`, these workers are killed, unless the job resumes. Prints the digest at the end.
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


class Largest(keras.Sequential):  # type: ignore[misc]
    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, **_: Any) -> Any:
        errors = keras.ops.square(y - y_pred)
        return keras.ops.mean(errors) + keras.ops.max(keras.ops.square(x[:, :1]) * errors)


class Kill(keras.callbacks.Callback):  # type: ignore[misc]
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        checkpoints = job.current().checkpoints
        if batch == 1 and str(job.current().worker) in sys.argv[1:] and checkpoints.resumed is None:
            # The checkpoints that the chief has taken are on disk.
            assert checkpoints.scheduler is None or checkpoints.scheduler.close(30)
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    keras.utils.set_random_seed(1)
    model = Largest([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd")
    options = {"batch_size": 4, "shuffle": False, "verbose": 0}
    model.fit(X * np.float32([0, 1, 1]), X[:, 1:2], **options)
    # So many steps that the others ask for a replacement before the last one.
    model.fit(X, X[:, 1:2], epochs=25, callbacks=[Kill()], **options)
    print("digest", lockstep.digest(model))


if __name__ == "__main__":
    main()
