"""Two workers on two hosts train a classifier and count its accuracy; without a launcher.

Copy this file and a key to both hosts, and run it on each with its own index:

lockstep key job.key
export LOCKSTEP_KEY_FILE=job.key
export KERAS_BACKEND=jax
WORKERS='{"worker": ["10.0.0.1:12345", "10.0.0.2:12345"]}'
TF_CONFIG='{"cluster": '$WORKERS', "task": {"type": "worker", "index": 0}}' python two_hosts.py
"""

import keras
import numpy as np

import lockstep

EXAMPLES, CLASSES = 1200, 4


def spirals() -> tuple[np.ndarray, np.ndarray]:
    """Return points on the arms of a spiral, and the arm of each."""
    generator = np.random.default_rng(7)
    arms = generator.integers(0, CLASSES, EXAMPLES)
    radii = generator.uniform(0.1, 1.0, EXAMPLES)
    angles = 2 * np.pi * arms / CLASSES + 2 * radii + generator.normal(0.0, 0.05, EXAMPLES)
    points = radii[:, None] * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    return points.astype("float32"), arms


strategy = lockstep.MultiWorkerMirroredStrategy()
x, y = spirals()
with strategy.scope():
    model = keras.Sequential(
        [
            keras.layers.Input((2,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(CLASSES, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"])
history = model.fit(x, y, batch_size=50, epochs=12, verbose=2)
print(f"accuracy: {history.history['accuracy'][-1]:.3f}")
print(f"digest: {lockstep.digest(model)}")
