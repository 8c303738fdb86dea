"""A plain Keras script, which does not mention Lockstep: a classifier of handwritten digits.

lockstep run -n 2 examples/plain.py
python examples/plain.py
"""

import keras
from sklearn.datasets import load_digits

keras.utils.set_random_seed(1)
x, y = load_digits(return_X_y=True)
model = keras.Sequential(
    [
        keras.layers.Rescaling(1 / 16),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(x, y, batch_size=128, epochs=15, validation_split=0.2, verbose=2)
model.save("model.keras")
