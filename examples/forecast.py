"""A forecast of a time series with a GRU: a script that trains long enough to change its number of workers.

    lockstep run -n 1 --replicas 4 examples/forecast.py
    lockstep scale forecast 2

The second command is for another terminal.
"""

import keras
import numpy as np

LENGTH, POINTS, EPOCHS = 24, 12000, 150


def load_series() -> np.ndarray:
    """Return hourly values with a daily and a weekly period, and noise."""
    hours = np.arange(POINTS)
    noise = np.random.default_rng(0).normal(0, 0.1, POINTS)
    return (np.sin(2 * np.pi * hours / 24) + 0.5 * np.sin(2 * np.pi * hours / 168) + noise).astype("float32")


keras.utils.set_random_seed(1)
series = load_series()
x = np.lib.stride_tricks.sliding_window_view(series, LENGTH)[:-1, :, np.newaxis]
y = series[LENGTH:]
model = keras.Sequential([keras.layers.Input((LENGTH, 1)), keras.layers.GRU(24), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(2e-3), "mse")
model.fit(x, y, batch_size=128, epochs=EPOCHS, validation_split=0.2, verbose=2)
