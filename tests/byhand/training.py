"""Trains for 18 steps, which are 3 epochs, and prints the exact result.

    training.py HOW

HOW selects what happens once, at the beginning of step 7:

    nothing, unshuffled
    killed      task 0 is killed; the others wait in later steps until it has joined again
    backup      all tasks are killed; the program saves its state with Keras's BackupAndRestore, which does
                not save the order of the examples: they are not shuffled
    checkpoint  all tasks are killed; the program saves checkpoints with Lockstep's callback
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

import lockstep
from lockstep.worker import job

HOW = sys.argv[1]
TASK = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
STOPPED = {"killed": (0,), "backup": (0, 1), "checkpoint": (0, 1)}
STEP = 7


def until(done: Any) -> None:
    while not done():
        time.sleep(0.01)


def stop() -> None:
    """Kill this process, once."""
    if HOW == "checkpoint":
        until(Path(f"kept/step-{STEP - 1:012d}/manifest.json").exists)
    stopped = Path(f"stopped-{TASK}")
    if not stopped.exists():
        stopped.touch()
        os.kill(os.getpid(), signal.SIGKILL)


class Happen(keras.callbacks.Callback):  # type: ignore[misc]
    """Prints the first step, and causes what HOW selects."""

    # On the class, because a callback resumes with its own attributes.
    begun = False

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        step = int(self.model.optimizer.iterations) + 1
        if not Happen.begun:
            print(f"resumes at step {step}", flush=True)
        Happen.begun = True
        if step == STEP and TASK in STOPPED.get(HOW, ()):
            stop()
        if HOW == "killed" and step in (STEP + 2, STEP + 3) and job.current().worker != 2:
            events, whole = job.current().context.folder / "events.jsonl", str(step == STEP + 3).lower()
            until(lambda: f'"event":"asks","worker":2,"whole":{whole}' in events.read_text())


strategy = lockstep.MultiWorkerMirroredStrategy()
generator = np.random.default_rng(0)
x, y = generator.normal(size=(96, 8)).astype("float32"), generator.integers(0, 3, 96)
with strategy.scope():
    layers = [keras.layers.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
callbacks: list[Any] = [Happen()]
if HOW == "backup":
    callbacks.append(keras.callbacks.BackupAndRestore("backup", save_freq="epoch"))
if HOW == "checkpoint":
    callbacks.append(lockstep.callbacks.Checkpoint("kept", every=STEP - 1))
shuffle = HOW not in ("backup", "unshuffled")
history = model.fit(x, y, epochs=3, batch_size=16, verbose=0, shuffle=shuffle, callbacks=callbacks)
if not shuffle:
    # With Keras's callback, the history begins where the training resumes.
    model.history = None
print(f"digest {lockstep.digest(model)} {history.history['loss'][-1].hex()}", flush=True)
