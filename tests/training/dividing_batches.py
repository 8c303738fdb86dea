"""A program whose datasets make a batch for an index, and whose workers divide them.

    dividing_batches.py [FAULT...]

A FAULT is WORKER:CALL:PLACE:NUMBER: that worker is killed when it passes PLACE for the nth time in a call:
"item" in the main process, "sending" halfway through a hand-over. With "all" in place of WORKER, all workers
are, unless the job has resumed. The program prints the exact results.
"""

import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np

import lockstep
from lockstep.collectives.shared.buffers import Buffers
from lockstep.data.digest import digest_arrays
from lockstep.keras.input import batch_division
from lockstep.worker import job

FAULTS = [fault.split(":") for fault in sys.argv[1:]]
PASSED: Counter[str] = Counter()
PROCESS = os.getpid()
CALL = ""

# All batches take longer than this to make, so they are divided on any machine.
batch_division.HAND_OVER_SECONDS = batch_division.HAND_OVER_SECONDS_PER_BYTE = 0.0


def passing(place: str) -> None:
    """Kill this process, if it is due."""
    if os.getpid() != PROCESS:
        return
    PASSED[f"{CALL} {place}"] += 1
    for worker, call, at, number in FAULTS:
        if (call, at) == (CALL, place) and int(number) == PASSED[f"{CALL} {place}"]:
            entered = job.current()
            if worker == str(entered.worker) or (worker == "all" and entered.checkpoints.resumed is None):
                scheduler = entered.checkpoints.scheduler
                assert scheduler is None or scheduler.close(30)
                os.kill(PROCESS, signal.SIGKILL)


def parts(self: Buffers, size: int, original: Any = Buffers.parts) -> Any:
    passing("sending")
    return original(self, size)


Buffers.parts = parts  # type: ignore[method-assign]


class Batches(keras.utils.PyDataset):  # type: ignore[misc]
    """Batches of 8 rows, the last one of 3, augmented with global random numbers if `noisy`."""

    def __init__(self, batches: int, noisy: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.batches, self.noisy = batches, noisy

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, index: int) -> Any:
        passing("item")
        numbers = np.random.default_rng(index)
        rows = 3 if index == self.batches - 1 else 8
        x = numbers.normal(size=(rows, 6)).astype("float32")
        y = x[:, :1] * 2 + numbers.normal(size=(rows, 1)).astype("float32")
        if self.noisy:
            x += np.random.normal(size=x.shape).astype("float32") * random.random()
        return {"a": x[:, :2], "b": x[:, 2:]}, y


class Held(Batches):
    """Batches that depend on those read before, so every worker reads all."""

    def __init__(self) -> None:
        super().__init__(3)
        self.numbers = np.random.default_rng(3)

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x, y + self.numbers.random()


def written(folder: Path) -> str:
    """Return a digest of the weights in the files of a folder."""
    values: list[Any] = []
    for path in sorted(folder.iterdir()):
        values.append(np.frombuffer(path.name.encode(), np.uint8))
        with h5py.File(path) as file:
            file.visititems(
                lambda _, item: values.append(item[()]) if isinstance(item, h5py.Dataset) else None
            )
    return digest_arrays(map(np.asarray, values)).hex()


def named(call: str) -> None:
    global CALL
    CALL = call


def main() -> None:
    layers = keras.layers
    keras.utils.set_random_seed(5)
    with lockstep.MultiWorkerMirroredStrategy().scope():
        inputs = {"a": keras.Input((2,)), "b": keras.Input((4,))}
        hidden = layers.Dense(8, activation="relu")(layers.Concatenate()([inputs["a"], inputs["b"]]))
        model = keras.Model(inputs, layers.Dense(1)(hidden))
        model.compile(keras.optimizers.Adam(1e-2), "mse", metrics=["mae"])
    assert job.current().context.folder is not None
    folder = job.current().context.folder / "weights"
    folder.mkdir(exist_ok=True)
    saving = keras.callbacks.ModelCheckpoint(
        folder / "{epoch}-{batch}.weights.h5", save_weights_only=True, save_freq=4
    )
    fits = {
        "noisy": (Batches(11, noisy=True), 3, Batches(5)),
        "threads": (Batches(9, workers=2, max_queue_size=3), 2, None),
        "processes": (Batches(6, noisy=True, workers=1, use_multiprocessing=True), 1, None),
        "held": (Held(), 2, None),
    }
    for call, (dataset, epochs, validation) in fits.items():
        named(call)
        callbacks = [saving] if call == "noisy" else []
        history = model.fit(
            dataset, epochs=epochs, validation_data=validation, callbacks=callbacks, verbose=0
        )
        print("fit", call, history.history, np.random.random(), random.random())
        print("weights", call, lockstep.digest(model))
        print("made", call, PASSED[f"{call} item"])
    print("files", written(folder))
    named("evaluate")
    print("end", [float(figure).hex() for figure in model.evaluate(Batches(7), verbose=0)])
    named("predict")
    print("end", float(model.predict(Batches(7, noisy=True), verbose=0).sum()).hex())


if __name__ == "__main__":
    main()
