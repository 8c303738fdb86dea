"""Fits, evaluates and predicts with models that these calls build, then fits a last one. Prints digests.

one_after_another.py [WORKER ...]

These workers are killed in the last fit, unless they have taken the state from elsewhere.
"""

import os
import signal
import sys
from typing import Any

import keras
import numpy as np

import lockstep
from lockstep.worker import job

X = np.random.default_rng(0).normal(size=(32, 8)).astype("float32")
KILLED = sys.argv[1:]


def compiled(name: str) -> Any:
    """Return a model without variables."""
    layers = keras.layers
    model = keras.Sequential([layers.Dense(8, "relu"), layers.Dropout(0.2), layers.Dense(1)], name=name)
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def die(number: int) -> None:
    checkpoints = job.current().checkpoints
    if number == 2 and str(job.current().worker) in KILLED and checkpoints.resumed is None:
        # The checkpoints that the chief has taken are on disk.
        assert checkpoints.scheduler is None or checkpoints.scheduler.close(30)
        os.kill(os.getpid(), signal.SIGKILL)


keras.utils.set_random_seed(1)
fitted, evaluated, predicted, last = map(compiled, ("fitted", "evaluated", "predicted", "last"))
history = fitted.fit(X, X[:, :1], batch_size=16, verbose=0).history
figures = evaluated.evaluate(X, X[:, :1], batch_size=16, verbose=0)
outputs = predicted.predict(X, batch_size=16, verbose=0).sum()
killer = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: die(batch))
last.fit(X, X[:, :1], batch_size=8, verbose=0, callbacks=[killer])
# With one replica on TensorFlow, Keras evaluates without the slots of the optimizer. A model that is built
# for a finished call has them. So only the weights of such models count.
weights = [float(np.abs(each).sum()) for model in (evaluated, predicted) for each in model.get_weights()]
outputs_now = [float(keras.ops.sum(model(X))) for model in (fitted, evaluated, predicted)]
print("end", history, figures, outputs, lockstep.digest(fitted), lockstep.digest(last), weights, outputs_now)
