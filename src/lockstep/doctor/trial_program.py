"""An ordinary training program that runs for a second, as a test of the whole installation.

    lockstep run ... -m lockstep.doctor.trial_program FILE

The chief writes a JSON object to FILE: the images per second of the second epoch, since the first one
compiles, and the hash of the result.
"""

import json
import sys
import time
from pathlib import Path

import keras
import numpy as np

import lockstep
from lockstep.worker import job

_BATCH = 32
_STEPS = 20


def main(file: Path) -> None:
    """Train, and write the result to `file`."""
    generator = np.random.default_rng(0)
    strategy = lockstep.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((16, 16, 1)),
                keras.layers.Conv2D(8, 3, activation="relu"),
                keras.layers.Flatten(),
                keras.layers.Dense(10),
            ]
        )
        model.compile(optimizer="adam", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    batch = _BATCH * strategy.num_replicas_in_sync
    images = generator.standard_normal((_STEPS * batch, 16, 16, 1), np.float32)
    labels = generator.integers(0, 10, _STEPS * batch)
    clock = _Clock()
    model.fit(images, labels, batch_size=batch, epochs=2, verbose=0, callbacks=[clock])
    rate = len(images) / clock.seconds[-1]
    result = {"images_per_second": rate, "hash": lockstep.digest(model)}
    if job.is_chief():
        file.write_text(json.dumps(result))


class _Clock(keras.callbacks.Callback):  # type: ignore[misc]
    """Measures the seconds of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._begun = 0.0

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        self._begun = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        self.seconds.append(time.perf_counter() - self._begun)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
