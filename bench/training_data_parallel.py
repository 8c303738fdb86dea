"""One of two processes that train a model in Keras on JAX, with `keras.distribution`.

    training_data_parallel.py PROGRAM MODEL data | model PROCESS BATCH TURNS STEPS

The processes connect through `jax.distributed` on the loopback, and XLA exchanges arrays with gloo. With
`DataParallel`, each process passes its own half of every batch, from memory, as Lockstep does: Keras shards
only tf.data automatically. With `ModelParallel`, each process has half of the columns of every kernel and
table, and passes whole batches.
"""

import os
import sys
from typing import Any

from turns import PORTS, Epochs, pin

NAME, MODEL, KIND = sys.argv[1:4]
PROCESS, BATCH, TURNS, STEPS = map(int, sys.argv[4:])
pin(PROCESS)
os.environ["KERAS_BACKEND"] = "jax"

import jax  # noqa: E402

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{os.environ[PORTS].split()[0]}", 2, PROCESS)

import keras  # noqa: E402
from jax.experimental.multihost_utils import process_allgather  # noqa: E402

from models import MODELS, halves  # noqa: E402


class Turn(Epochs, keras.callbacks.Callback):
    """Also reads weights of which this process has a part."""

    def weights(self) -> Any:
        return [process_allgather(variable.value, tiled=True) for variable in self.model.weights]


keras.utils.set_random_seed(1)
measured = MODELS[MODEL]
examples = measured.examples(STEPS * BATCH * 2)
model = measured.compiled(keras)
if KIND == "data":
    keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
    model = measured.compiled(keras)
    x, y = halves(examples, BATCH)[PROCESS]
else:
    initial, BATCH = model.get_weights(), 2 * BATCH
    paths = [variable.path for variable in model.weights]
    keras.utils.clear_session()
    mesh = keras.distribution.DeviceMesh((1, 2), ["batch", "model"], keras.distribution.list_devices())
    layouts = keras.distribution.LayoutMap(mesh)
    for variable in model.trainable_variables:
        if variable.name in ("kernel", "embeddings"):
            layouts[variable.path] = (None,) * (len(variable.shape) - 1) + ("model",)
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch", auto_shard_dataset=False)
    )
    model = measured.built(keras)
    assert [variable.path for variable in model.weights] == paths
    for variable, value in zip(model.weights, initial, strict=True):
        variable.assign(value)
    x, y = examples
options = {"shuffle": False, "verbose": 0, "callbacks": [Turn(NAME, PROCESS)]}
model.fit(x, y, batch_size=BATCH, epochs=TURNS + 1, **options)
