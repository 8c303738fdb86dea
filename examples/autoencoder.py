"""A denoising autoencoder, with checkpoints: killed and started again, it resumes where it was.

    lockstep run -n 2 --checkpoint saved examples/autoencoder.py

The encoder keeps 16 of 784 numbers of a digit.
"""

import keras
import numpy as np

from digits import load_digits

layers = keras.layers
keras.utils.set_random_seed(1)
(clean, _), (clean_test, _) = load_digits()
noise = np.random.default_rng(0)
noisy, noisy_test = (
    np.clip(images + noise.normal(0, 0.4, images.shape), 0, 1).astype("float32")
    for images in (clean, clean_test)
)
model = keras.Sequential(
    [
        layers.Input((28, 28)),
        layers.Flatten(),
        layers.Dense(256, activation="relu"),
        layers.Dense(16),
        layers.Dense(256, activation="relu"),
        layers.Dense(784, activation="sigmoid"),
        layers.Reshape((28, 28)),
    ]
)
model.compile(keras.optimizers.Adam(1e-3), "binary_crossentropy", metrics=["mse"])
model.fit(noisy, clean, batch_size=64, epochs=100, validation_data=(noisy_test, clean_test), verbose=2)
print(f"mean squared error before: {np.mean((noisy_test - clean_test) ** 2):.4f}")
print(f"mean squared error after: {np.mean((model.predict(noisy_test, verbose=0) - clean_test) ** 2):.4f}")
