"""One of two processes of the tutorial's CNN in Keras on JAX, with `keras.distribution.DataParallel`.

    cnn_data_parallel.py PROGRAM PROCESS TURNS STEPS

The processes meet in `jax.distributed` on the loopback, and XLA sums the gradients with gloo. Keras shards
only tf.data by itself, so each process gives its own half of every batch, from memory, as Lockstep does.
"""

import os
import sys

from turns import PORTS, Epochs, pin

NAME = sys.argv[1]
PROCESS, TURNS, STEPS = map(int, sys.argv[2:])
pin(PROCESS)
os.environ["KERAS_BACKEND"] = "jax"

import jax  # noqa: E402

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{os.environ[PORTS].split()[0]}", 2, PROCESS)

import keras  # noqa: E402

from cnn_model import BATCH, examples, keras_cnn  # noqa: E402


class Turn(Epochs, keras.callbacks.Callback):
    pass


keras.utils.set_random_seed(1)
keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
model = keras_cnn(keras)
x, y = (whole.reshape(STEPS, 2, BATCH, *whole.shape[1:])[:, PROCESS] for whole in examples(STEPS * 2 * BATCH))
x, y = x.reshape(-1, 28, 28), y.reshape(-1)
turn = Turn(NAME, PROCESS)
model.fit(x, y, batch_size=BATCH, epochs=TURNS + 1, shuffle=False, verbose=0, callbacks=[turn])
