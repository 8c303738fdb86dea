"""One worker that tells of each step, until it is ended.

    lockstep run ... recovery_lockstep.py MODEL STEPS

MODEL is `cnn`, the tutorial's, or `large`, whose state is 203 MB.
"""

import sys

import keras

import cnn_model
import large_model
import lockstep
from lockstep import job
from steps import Steps

MODEL, STEPS = sys.argv[1], int(sys.argv[2])
source, make = {
    "cnn": (cnn_model, cnn_model.keras_cnn),
    "large": (large_model, large_model.keras_model),
}[MODEL]


class Tell(Steps, keras.callbacks.Callback):
    pass


strategy = lockstep.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = make(keras)
batch = source.BATCH * strategy.num_replicas_in_sync
x, y = source.examples(STEPS * batch)
tell = Tell(job.current().worker, STEPS, lambda: job.current().view.number)
model.fit(x, y, batch_size=batch, epochs=1000, shuffle=False, verbose=0, callbacks=[tell])
