"""Trains two models by turns, one batch each; the first batch of each builds it. Prints figures and digests.

by_turns.py [WORKER ...]

These workers are killed after a batch of the second model, unless the job resumes.
"""

import os
import signal
import sys
from typing import Any

import keras
import numpy as np

import lockstep
from lockstep.worker import job

X = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
KILLED = sys.argv[1:]


def model_named(name: str) -> Any:
    """Return a model without variables."""
    layers = keras.layers
    model = keras.Sequential([layers.Dense(8, "relu"), layers.Dropout(0.2), layers.Dense(1)], name=name)
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def may_die() -> None:
    checkpoints = job.current().checkpoints
    if str(job.current().worker) in KILLED and checkpoints.resumed is None:
        # The checkpoints that the chief has taken are on disk.
        assert checkpoints.scheduler is None or checkpoints.scheduler.close(30)
        os.kill(os.getpid(), signal.SIGKILL)


keras.utils.set_random_seed(1)
first, second = model_named("first"), model_named("second")
figures = []
for number in range(6):
    shift = sum(float(np.abs(weight).mean()) for weight in first.get_weights())
    figures += first.train_on_batch(X + shift, X[:, :1])
    shift = sum(float(np.abs(weight).mean()) for weight in first.get_weights())
    figures += second.train_on_batch(X + shift, X[:, 1:2])
    if number == 2:
        may_die()
print("end", figures, lockstep.digest(first), lockstep.digest(second))
