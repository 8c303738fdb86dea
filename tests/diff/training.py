"""Trains a small plain Keras model; with `label`, an example of step 7 differs."""

import sys

import keras
import numpy as np

keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(96, 6)).astype("float32")
y = x[:, :1] * x[:, 1:2]
if "label" in sys.argv:
    y[77] += 1
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, activation="relu"), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0)
