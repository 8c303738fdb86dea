"""One of two processes that train a model in Keras 2, with TensorFlow's MultiWorkerMirroredStrategy.

    training_mwms.py PROGRAM MODEL PROCESS BATCH TURNS STEPS

Keras 3 does not support this strategy, so this uses tf_keras. The processes connect on the loopback and sum
the gradients in a ring. Each passes its own half of every batch, from memory.
"""

import json
import os
import sys
from typing import Any

from turns import PORTS, Epochs, pin

NAME, MODEL = sys.argv[1:3]
PROCESS, BATCH, TURNS, STEPS = map(int, sys.argv[3:])
pin(PROCESS)
workers = [f"127.0.0.1:{port}" for port in os.environ[PORTS].split()]
task = {"type": "worker", "index": PROCESS}
os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})

import tensorflow as tf  # noqa: E402
import tf_keras  # noqa: E402

from models import MODELS, halves  # noqa: E402
from pipelines import without_tuning  # noqa: E402


class Turn(Epochs, tf_keras.callbacks.Callback):
    pass


def own_half(context: Any) -> Any:
    """Return this process's half of every batch, repeatedly."""
    batches = [array.reshape(STEPS, BATCH, *array.shape[1:]) for array in half]
    return without_tuning(tf.data.Dataset.from_tensor_slices(tuple(batches)).repeat())


ring = tf.distribute.experimental.CommunicationOptions(
    implementation=tf.distribute.experimental.CommunicationImplementation.RING
)
strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=ring)
measured = MODELS[MODEL]
with strategy.scope():
    model = measured.compiled(tf_keras)
half = halves(measured.examples(STEPS * BATCH * 2), BATCH)[PROCESS]
data = strategy.distribute_datasets_from_function(own_half)
options = {"shuffle": False, "verbose": 0, "callbacks": [Turn(NAME, PROCESS)]}
model.fit(data, steps_per_epoch=STEPS, epochs=TURNS + 1, **options)
