"""A program that trains on DataLoaders whose items draw random numbers; prints exact results.

    dividing_loaders.py [HOW WORKER STEP]

HOW is "lost": that worker is killed after that step of the second `fit`; or "all": all workers are, once.
"""

import os
import random
import signal
import sys
from typing import Any

import keras
import numpy as np
import torch
from torch.utils import data

import lockstep
from lockstep.worker import job

HOW, WORKER, STEP = (sys.argv[1], int(sys.argv[2]), int(sys.argv[3])) if sys.argv[1:] else ("", 0, 0)


class Augmented(data.Dataset):  # type: ignore[misc]
    """Rows with noise from each of the global random states."""

    reads = 0

    def __init__(self, rows: int) -> None:
        self.x = np.random.default_rng(0).normal(size=(rows, 12)).astype("float32")

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        self.reads += 1
        x = torch.from_numpy(self.x[index])
        noise = random.gauss(0, 0.1) + np.random.normal() * 0.1 + torch.randn(12) * 0.1
        return x + noise.to(torch.float32), x.sum().reshape(1)


class KillOnce(keras.callbacks.Callback):  # type: ignore[misc]
    """Kills the process after a step, once."""

    steps = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        entered = job.current()
        if self.steps != STEP or entered.checkpoints.resumed is not None:
            return
        if HOW == "all":
            assert entered.checkpoints.scheduler is not None
            assert entered.checkpoints.scheduler.close(60)
        if HOW == "all" or (HOW == "lost" and entered.worker == WORKER):
            os.kill(os.getpid(), signal.SIGKILL)


def loader(rows: int, batch: int, **options: Any) -> Any:
    return data.DataLoader(Augmented(rows), batch_size=batch, **options)


def main() -> None:
    keras.utils.set_random_seed(1)
    torch.manual_seed(1)
    strategy = lockstep.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(4, activation="relu"), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    training, validation = loader(70, 16, shuffle=True), loader(19, 8)
    history = model.fit(training, epochs=2, validation_data=validation, verbose=0)
    print("weights", lockstep.digest(model))
    print("result", [loss.hex() for loss in history.history["val_loss"]])
    print("reads", training.dataset.reads)
    # The last batch has fewer rows than there are replicas.
    ahead = loader(43, 8, shuffle=True, num_workers=2)
    model.fit(ahead, epochs=2, callbacks=[KillOnce()], verbose=0)
    print("result", lockstep.digest(model))
    print("result", model.evaluate(validation, verbose=0).hex())
    print("result", float(model.predict(validation, verbose=0).sum()).hex())
    loop(strategy, model)
    print("end")


def loop(strategy: Any, model: Any) -> None:
    """Sum what replicas get from a distributed loader, in two passes; then train on it."""
    distributed = strategy.experimental_distribute_dataset(loader(21, 6, shuffle=True))
    print("result", len(distributed), distributed.element_spec)
    for _ in range(2):
        for x, y in distributed:
            sums = strategy.run(lambda x, y: keras.ops.sum(x * y), (x, y))
            print("result", float(strategy.reduce("SUM", sums, axis=None)).hex())
    model.fit(distributed, epochs=2, verbose=0)
    print("result", lockstep.digest(model))


if __name__ == "__main__":
    main()
