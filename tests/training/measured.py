"""Two calls of `fit` of a small model, the first with validation, then two of `train_on_batch`."""

import keras
import numpy as np

keras.utils.set_random_seed(1)
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(40, 6)).astype("float32")
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3), keras.layers.Dense(1)])
model.compile("adam", "mse", metrics=["mae"])
rate = keras.callbacks.LearningRateScheduler(lambda epoch: 0.01 / (epoch + 1))
model.fit(X, X[:, :1], batch_size=8, epochs=3, validation_split=0.2, verbose=0, callbacks=[rate])
model.fit(X, X[:, :1], batch_size=8, epochs=1, verbose=0)
for _ in range(2):
    model.train_on_batch(X[:8], X[:8, :1])
