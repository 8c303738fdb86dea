"""The program whose orders of arrival are stored here.

lockstep run --ps 2 -n 2 --backend jax --run-dir ps-run ps_training.py
"""

import keras
import numpy as np

import lockstep

keras.utils.set_random_seed(1)
x = np.arange(32, dtype="float32").reshape(8, 4) / 32
strategy = lockstep.ParameterServerStrategy()
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(x, np.arange(8) % 2, batch_size=4, epochs=1, verbose=2)
