"""One of two processes that train the tutorial's CNN in Keras 2 and report each step, until killed.

    recovery_mwms.py STEPS FOLDER EVERY PROCESS PORT PORT

The strategy is `tf.distribute.MultiWorkerMirroredStrategy`, with Keras's BackupAndRestore every EVERY steps.
"""

import json
import os
import sys

STEPS, EVERY, PROCESS = int(sys.argv[1]), int(sys.argv[3]), int(sys.argv[4])
workers = [f"127.0.0.1:{port}" for port in sys.argv[5:]]
task = {"type": "worker", "index": PROCESS}
os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})

import tensorflow as tf  # noqa: E402
import tf_keras  # noqa: E402

from models import MODELS  # noqa: E402
from steps import StepReports  # noqa: E402


class StepReporter(StepReports, tf_keras.callbacks.Callback):
    pass


ring = tf.distribute.experimental.CommunicationOptions(
    implementation=tf.distribute.experimental.CommunicationImplementation.RING
)
strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=ring)
cnn = MODELS["cnn"]
with strategy.scope():
    model = cnn.compiled(tf_keras)
batch = cnn.batch * 2
x, y = cnn.examples(STEPS * batch)
backup = tf_keras.callbacks.BackupAndRestore(f"{sys.argv[2]}/backup", save_freq=EVERY)
callbacks = [backup, StepReporter(PROCESS, STEPS)]
model.fit(x, y, batch_size=batch, epochs=1000, shuffle=False, verbose=0, callbacks=callbacks)
