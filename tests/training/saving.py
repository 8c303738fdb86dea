"""A program that saves in every way, all workers to the same paths; prints what each worker reads.

saving.py FOLDER
"""

import json
import os
import sys
from pathlib import Path

import keras
import numpy as np

import lockstep

folder = Path(sys.argv[1])
worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
x = np.linspace(-1, 1, 96, dtype="float32").reshape(32, 3)
y = x.sum(axis=1)
strategy = lockstep.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile("adam", "mse")

backup = keras.callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False)
model.fit(
    x,
    y,
    batch_size=8,
    epochs=3,
    verbose=0,
    validation_data=(x, y),
    callbacks=[
        backup,
        keras.callbacks.ModelCheckpoint(folder / "made" / "{epoch}.weights.h5", save_weights_only=True),
        keras.callbacks.ModelCheckpoint(folder / "best.keras", save_best_only=True),
        keras.callbacks.CSVLogger(folder / "log.csv"),
    ],
)
model.save(folder / "whole.keras")
model.save(folder / f"own-{worker}.keras")
print(f"chief {lockstep.is_chief()}")
if lockstep.is_chief():
    model.save(folder / "chief.keras")
for name in ("whole.keras", "best.keras", f"own-{worker}.keras"):
    loaded = keras.models.load_model(folder / name)
    same = all((a == b).all() for a, b in zip(loaded.get_weights(), model.get_weights(), strict=True))
    print(f"loaded {name} {same}")
try:
    model.save_weights(folder / "nowhere" / "x.weights.h5")
except Exception as error:
    print(f"error {type(error).__name__} {error}")

with strategy.scope():
    again = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    again.compile("adam", "mse")
restore = keras.callbacks.BackupAndRestore(folder / "backup")
history = again.fit(x, y, batch_size=8, epochs=4, verbose=0, callbacks=[restore])
print(f"resumed {history.epoch} {lockstep.digest(again)}")
