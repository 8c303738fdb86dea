"""One of two processes that train a model in Keras on JAX, with `keras.distribution.DataParallel`.

    training_data_parallel.py PROGRAM MODEL PROCESS BATCH TURNS STEPS

The processes connect through `jax.distributed` on the loopback, and XLA sums the gradients with gloo. Keras
shards only tf.data automatically, so each process passes its own half of every batch, from memory, as
Lockstep does.
"""

import os
import sys

from turns import PORTS, Epochs, pin

NAME, MODEL = sys.argv[1:3]
PROCESS, BATCH, TURNS, STEPS = map(int, sys.argv[3:])
pin(PROCESS)
os.environ["KERAS_BACKEND"] = "jax"

import jax  # noqa: E402

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{os.environ[PORTS].split()[0]}", 2, PROCESS)

import keras  # noqa: E402

from models import MODELS, halves  # noqa: E402


class Turn(Epochs, keras.callbacks.Callback):
    pass


keras.utils.set_random_seed(1)
keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
measured = MODELS[MODEL]
model = measured.compiled(keras)
x, y = halves(measured.examples(STEPS * BATCH * 2), BATCH)[PROCESS]
options = {"shuffle": False, "verbose": 0, "callbacks": [Turn(NAME, PROCESS)]}
model.fit(x, y, batch_size=BATCH, epochs=TURNS + 1, **options)
