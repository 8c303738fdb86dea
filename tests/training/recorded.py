"""Trains with `fit`, with functions and with `fit` again on parameter servers; prints exact results.

    recorded.py [lost]

The folder `recorded` has the orders of arrival of a run with two workers and two servers. Worker 2 was
`lost` in its third step of the second `fit`.

    lockstep run -n 2 --ps 2 --max-restarts 0 --backend jax recorded.py lost
"""

import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from loop_gradients import gradients_of

import lockstep
from lockstep.keras.parameter_server.worker_process import WorkerProcess
from lockstep.worker import job

layers = keras.layers
X = np.random.default_rng(0).normal(size=(96, 6)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("int32")

keras.utils.set_random_seed(3)
strategy = lockstep.ParameterServerStrategy(None, lockstep.FixedShardsPartitioner(2))
with strategy.scope():
    model = keras.Sequential(
        [
            layers.Input((6,)),
            layers.Dense(8, activation="relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.2),
            layers.Dense(2),
        ]
    )
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss_of, metrics=["accuracy"])
    optimizer = keras.optimizers.Adam(0.01)
coordinator = lockstep.ClusterCoordinator(strategy)


class Batches:
    """Batches without end, in a random order."""

    def __iter__(self) -> Iterator[Any]:
        order = np.random.permutation(96)
        while True:
            for start in range(0, 96, 12):
                yield X[order[start : start + 12]], Y[order[start : start + 12]]


def train(batches: Iterator[Any]) -> Any:
    x, y = next(batches)
    variables = model.trainable_variables
    loss, gradients = gradients_of(
        variables, lambda: loss_of(y, model(x, training=True)), model.non_trainable_variables
    )
    optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return loss


def lose_worker() -> None:
    """End worker 2 in the second `fit`."""
    compute, computed = WorkerProcess._computed, 0

    def counted(self: WorkerProcess, step: int, batch: Any) -> Any:
        nonlocal computed
        computed += self.call.name == "fit 2"
        if computed == 3 and job.current().worker == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return compute(self, step, batch)

    WorkerProcess._computed = counted  # type: ignore[method-assign]


def main() -> None:
    if "lost" in sys.argv:
        lose_worker()
    shown = [model.fit(X, Y, batch_size=8, epochs=2, verbose=0).history]
    batches = iter(coordinator.create_per_worker_dataset(lambda: Batches()))
    for _ in range(2):
        losses = [coordinator.schedule(train, (batches,)) for _ in range(8)]
        coordinator.join()
        shown.append([float(loss) for loss in coordinator.fetch(losses)])
    shown.append(model.fit(X, Y, batch_size=16, epochs=2, verbose=0).history)
    print("result", json.dumps(shown))
    print("digest", lockstep.digest(model), flush=True)


if __name__ == "__main__":
    main()
