"""Trains with Adam, whose slots are reset in each outer step, and prints the weights.

    local_twin.py [by-hand]

In a job, with `--local-steps 3,reset` on four replicas. By hand, in plain Keras: a model is compiled anew for
each replica and each outer step.
"""

import sys

import keras
import numpy as np

REPLICAS, STEPS, BATCH, EPOCHS = 4, 3, 12, 2

random = np.random.default_rng(0)
x = random.normal(size=(5 * BATCH, 8)).astype("float32")
y = (x[:, :1] * x[:, 1:2]).astype("float32")
keras.utils.set_random_seed(3)
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(70, "tanh"), keras.layers.Dense(1)])


def outer_step(batches: list[slice]) -> None:
    before = model.get_weights()
    after = []
    for replica in range(REPLICAS):
        model.set_weights(before)
        model.compile(keras.optimizers.Adam(0.01), "mse")
        for batch in batches:
            rows = np.arange(batch.start, batch.stop).reshape(REPLICAS, -1)[replica]
            model.train_on_batch(x[rows], y[rows])
        after.append(model.get_weights())
    model.set_weights([np.mean(values, axis=0) for values in zip(*after, strict=True)])


if sys.argv[1:] == ["by-hand"]:
    every = [slice(start, start + BATCH) for start in range(0, len(x), BATCH)]
    for first in [0, STEPS] * EPOCHS:
        outer_step(every[first : first + STEPS])
else:
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
print("numbers", *(repr(float(v)) for weight in model.get_weights() for v in np.ravel(weight)))
