"""One of two processes of the tutorial's CNN in Keras 2, with TensorFlow's MultiWorkerMirroredStrategy.

    cnn_mwms.py PROGRAM PROCESS TURNS STEPS

Keras 3 does not run under this strategy, so it is tf_keras. The processes meet on the loopback and sum the
gradients in a ring.
"""

import json
import os
import sys

from turns import PORTS, Epochs, pin

NAME = sys.argv[1]
PROCESS, TURNS, STEPS = map(int, sys.argv[2:])
pin(PROCESS)
workers = [f"127.0.0.1:{port}" for port in os.environ[PORTS].split()]
task = {"type": "worker", "index": PROCESS}
os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})

import tensorflow as tf  # noqa: E402
import tf_keras  # noqa: E402

from cnn_model import BATCH, examples, keras_cnn  # noqa: E402


class Turn(Epochs, tf_keras.callbacks.Callback):
    pass


ring = tf.distribute.experimental.CommunicationOptions(
    implementation=tf.distribute.experimental.CommunicationImplementation.RING
)
strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=ring)
with strategy.scope():
    model = keras_cnn(tf_keras)
x, y = examples(STEPS * BATCH * 2)
turn = Turn(NAME, PROCESS)
model.fit(x, y, batch_size=BATCH * 2, epochs=TURNS + 1, shuffle=False, verbose=0, callbacks=[turn])
