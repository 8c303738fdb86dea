"""Trains for 30 steps.

    night.py [FOLDER]

The chief fills the disk of FOLDER after step 5 and each later one. Worker 1 is killed after step 10, and
worker 0 after step 20. Without FOLDER, nothing of that happens.
"""

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

from lockstep.worker import job

KILLED = {(1, 10), (0, 20)}
"""Workers, and after which step."""


class Night(keras.callbacks.Callback):  # type: ignore[misc]
    """Causes the faults."""

    def __init__(self, folder: Path | None) -> None:
        super().__init__()
        self._folder = folder

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._folder is None:
            return
        at = job.current().worker, int(self.model.optimizer.iterations)
        if job.current().is_chief and at[1] >= 5:
            # Also the space of a checkpoint that was deleted meanwhile.
            with contextlib.suppress(OSError), (self._folder / "filler").open("ab", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        if at in KILLED:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    random = np.random.default_rng(7)
    x, y = random.normal(size=(80, 4)).astype("float32"), random.normal(size=(80, 1)).astype("float32")
    model = keras.Sequential([keras.layers.Dense(64, activation="tanh"), keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    night = Night(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    model.fit(x, y, batch_size=16, epochs=6, validation_data=(x, y), callbacks=[night], verbose=0)


if __name__ == "__main__":
    main()
