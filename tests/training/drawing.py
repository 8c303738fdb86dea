"""Inputs that hold generators and numbers, read by several calls; workers are lost in a later one.

    drawing.py KIND [HOW CALL STEP]

KIND is `loader`, a DataLoader with a generator, whose sampler counts passes; `dataset`, a PyDataset with
generators of Python, NumPy and Keras; or `ordered`, one that shuffles its rows after each epoch. After a step
of a call of `fit`, from 1, all workers are `killed` in the first run, or worker 1 is `lost`.
"""

import os
import random
import signal
import sys
from typing import Any

import keras
import numpy as np

import lockstep
from lockstep.worker import job

KIND, (HOW, *PLACE) = sys.argv[1], sys.argv[2:] or [""]
X = np.random.default_rng(0).normal(size=(48, 4)).astype("float32")


class Noisy(keras.utils.PyDataset):  # type: ignore[misc]
    """Batches with noise, in an order of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.noise, self.order = np.random.RandomState(2), random.Random(3)
        self.bits, self.factor = np.random.PCG64(4), keras.random.SeedGenerator(5)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        rows = self.order.sample(range(48), 12)
        factor = keras.ops.convert_to_numpy(keras.random.uniform((12, 4), seed=self.factor))
        x = X[rows] * factor + 0.1 * self.noise.normal(size=(12, 4)) + self.bits.random_raw() / 2**64
        return x.astype("float32"), X[rows, :1]


class Ordered(keras.utils.PyDataset):  # type: ignore[misc]
    """Batches of rows that are shuffled after each epoch, from where they are."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.files, self.epoch = np.arange(48), list(range(4)), 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        rows = self.rows[12 * self.files[index] :][:12]
        return X[rows] + 0.1 * self.epoch, X[rows, :1]

    def on_epoch_end(self) -> None:
        np.random.shuffle(self.rows)
        random.shuffle(self.files)
        self.epoch += 1


class Rolled:
    """A sampler that depends on a generator and on the number of the pass."""

    def __init__(self, generator: Any) -> None:
        self.generator, self.passes = generator, 0

    def __len__(self) -> int:
        return 48

    def __iter__(self) -> Any:
        import torch

        self.passes += 1
        return iter(torch.randperm(48, generator=self.generator).roll(self.passes).tolist())


def loader() -> Any:
    import torch

    rows = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(X[:, :1]))
    sampler = Rolled(torch.Generator().manual_seed(4))
    return torch.utils.data.DataLoader(rows, batch_size=12, sampler=sampler)


INPUTS: Any = {"loader": loader, "dataset": Noisy, "ordered": Ordered}


class Loses(keras.callbacks.Callback):  # type: ignore[misc]
    """Ends this process after a step of a call."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.call, self.steps = call, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        current = job.current()
        if [str(self.call), str(self.steps)] != PLACE:
            return
        if HOW == "killed" and current.checkpoints.resumed is None:
            assert current.checkpoints.scheduler is None or current.checkpoints.scheduler.close(30)
            os.kill(os.getpid(), signal.SIGKILL)
        if HOW == "lost" and current.worker == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    keras.utils.set_random_seed(1)
    layers = keras.layers
    with lockstep.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(1)])
        model.compile("adam", "mse")
    data, validation = INPUTS[KIND](), Noisy()
    model.fit(data, epochs=2, verbose=0, callbacks=[Loses(1)], validation_data=validation)
    print("evaluate", model.evaluate(data, verbose=0))
    fit = model.fit(data, epochs=3, verbose=0, callbacks=[Loses(2)], validation_data=validation)
    print("fit 2", fit.history)
    print("predict", float(model.predict(validation, verbose=0).sum()).hex())
    print("end", lockstep.digest(model))


if __name__ == "__main__":
    main()
