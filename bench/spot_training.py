"""The training that `spot.py` disturbs: spot_training.py EPOCHS."""

import sys

import keras
import numpy as np

ROWS, BATCH = 4096, 256


def main(epochs: int) -> None:
    keras.utils.set_random_seed(1)
    random = np.random.default_rng(1)
    x = random.random((ROWS, 28, 28, 1), dtype=np.float32)
    y = random.integers(0, 10, ROWS)
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(x, y, batch_size=BATCH, epochs=epochs, verbose=0)


main(int(sys.argv[1]))
