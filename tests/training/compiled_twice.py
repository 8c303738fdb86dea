"""A model is trained, compiled with another loss and trained again; prints all figures."""

import gc

import keras
import numpy as np

# A search for garbage could end the functions of the first `compile`, although something refers to them.
gc.disable()
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(8, 2)).astype("float32")
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
for loss in ("mse", "mae"):
    model.compile("sgd", loss, metrics=["mse"])
    history = model.fit(x, x, batch_size=4, validation_data=(x, x), verbose=0).history
    print("figures", history, model.evaluate(x, x, verbose=0))
