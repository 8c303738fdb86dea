"""Models that their first call builds, and workers that are killed unless their job resumes."""

import os
import signal
from typing import Any

import keras

from lockstep.worker import job


def unbuilt(name: str) -> Any:
    """Return a compiled model without variables."""
    layers = keras.layers
    model = keras.Sequential([layers.Dense(8, "relu"), layers.Dropout(0.2), layers.Dense(1)], name=name)
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def killed_here(workers: list[str]) -> None:
    """Kill this worker if it is one of some workers and has not taken the state from elsewhere."""
    checkpoints = job.current().checkpoints
    if str(job.current().worker) in workers and checkpoints.resumed is None:
        # The checkpoints that the chief has taken are on disk.
        assert checkpoints.scheduler is None or checkpoints.scheduler.close(30)
        os.kill(os.getpid(), signal.SIGKILL)
