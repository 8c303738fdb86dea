"""One process that trains in Keras 2 on a costly `tf.data`, which TensorFlow shards over its workers.

    reading_mwms.py PROGRAM PROCESSES PROCESS REPLICAS BATCH TURNS STEPS

The strategy is MultiWorkerMirroredStrategy with AutoShardPolicy.DATA: each of two processes skips the rows of
the other after the map, as TensorFlow's rewriting places the shard. One process trains alone.
"""

import json
import os
import sys
from typing import Any

from turns import PORTS, Epochs, pin

NAME = sys.argv[1]
PROCESSES, PROCESS, REPLICAS, BATCH, TURNS, STEPS = map(int, sys.argv[2:])
pin(PROCESS)
workers = [f"127.0.0.1:{port}" for port in os.environ[PORTS].split()[:PROCESSES]]
task = {"type": "worker", "index": PROCESS}
os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})

import tensorflow as tf  # noqa: E402
import tf_keras  # noqa: E402

from models import MODELS  # noqa: E402
from pipelines import without_tuning  # noqa: E402
from reading_sources import examples, source  # noqa: E402


class Turn(Epochs, tf_keras.callbacks.Callback):
    pass


strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = MODELS["dense-0.1"].compiled(tf_keras)
x, y = examples(STEPS * BATCH * REPLICAS)
options: Any = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
dataset = without_tuning(source("tf.data", x, y, BATCH * REPLICAS)).with_options(options)
model.fit(dataset, epochs=TURNS + 1, verbose=0, callbacks=[Turn(NAME, PROCESS)])
