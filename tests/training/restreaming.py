"""A model that was built on arrays continues with a stream that is shuffled again in each pass.

On PyTorch steps draw from the same random state as the stream.

    restreaming.py [killed]

With "killed", the first run is killed in the second pass over the stream.
"""

import os
import signal
import sys
from typing import Any

import keras
import numpy as np

import lockstep
from lockstep.worker import job


class KillOnce(keras.callbacks.Callback):  # type: ignore[misc]
    """Kills the process after the eighth step, once."""

    steps = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        scheduler = job.current().checkpoints.scheduler
        if self.steps == 8 and scheduler is not None and job.current().checkpoints.resumed is None:
            assert scheduler.close(30)
            os.kill(os.getpid(), signal.SIGKILL)


def shuffled(x: Any, y: Any) -> Any:
    if keras.backend.backend() == "torch":
        import torch

        rows = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
        return torch.utils.data.DataLoader(rows, batch_size=10, shuffle=True)
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(60, seed=3).batch(10)


def main() -> None:
    keras.utils.set_random_seed(1)
    layers = keras.layers
    with lockstep.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([layers.Dense(8, activation="relu"), layers.Dropout(0.2), layers.Dense(1)])
        model.compile("adam", "mse")
    x = np.random.default_rng(0).normal(size=(60, 4)).astype("float32")
    y = x[:, :1] * 2
    model.fit(x, y, batch_size=20, verbose=0)
    stream = shuffled(x, y)
    history = model.fit(stream, epochs=3, verbose=0, callbacks=[KillOnce()] if "killed" in sys.argv else [])
    print("end", lockstep.digest(model), history.history["loss"])


if __name__ == "__main__":
    main()
