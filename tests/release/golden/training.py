"""The program whose checkpoints and run folder are stored here.

lockstep run -n 2 --backend jax --checkpoint saved --checkpoint-every 2 --run-dir run training.py 2
"""

import sys

import keras
import numpy as np

keras.utils.set_random_seed(1)
x = np.arange(32, dtype="float32").reshape(8, 4) / 32
y = np.arange(8) % 2
layers = keras.layers
model = keras.Sequential(
    [layers.Input((4,)), layers.Dense(3, activation="relu"), layers.Dropout(0.5), layers.Dense(2)]
)
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
model.fit(x, y, batch_size=4, epochs=int(sys.argv[1]), verbose=2)
