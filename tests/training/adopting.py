"""Trains on a pipeline for each replica; the second of three workers is lost in the middle of an epoch."""

import os
import signal
from typing import Any

import keras
import numpy as np

import lockstep
from lockstep.worker import job

X = np.random.default_rng(0).normal(size=(90, 6)).astype("float32")
strategy = lockstep.MultiWorkerMirroredStrategy()


class Shuffled:
    """A dataset of unknown length with a new order in each pass and new noise in each element."""

    def __init__(self, rows: Any, batch: int) -> None:
        self.rows = rows
        self.batch = batch
        self.random = np.random.default_rng(3)

    def __iter__(self) -> Any:
        rows = self.random.permutation(self.rows)
        for start in range(0, len(rows), self.batch):
            part = rows[start : start + self.batch]
            noise = self.random.normal(scale=0.1, size=part.shape).astype("float32")
            yield part + noise, part.sum(axis=1)


def pipeline(context: Any) -> Any:
    rows = X[context.input_pipeline_id :: context.num_input_pipelines]
    return Shuffled(rows, context.get_per_replica_batch_size(9) + context.input_pipeline_id)


class KillWorker(keras.callbacks.Callback):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        if job.current().worker == 1 and self.steps == 14:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    dataset = strategy.distribute_datasets_from_function(pipeline)
    for epochs in (2, 1):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(4, activation="relu"), keras.layers.Dense(1)])
            model.compile("adam", "mse")
        model.fit(dataset, epochs=epochs, verbose=0, callbacks=[KillWorker()])
        print("result", epochs, lockstep.digest(model))


if __name__ == "__main__":
    main()
