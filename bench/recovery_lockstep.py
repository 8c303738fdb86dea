"""One worker that trains and reports each step, until killed.

    lockstep run ... recovery_lockstep.py MODEL STEPS

MODEL is `cnn`, the tutorial's, or `large`, whose state is 203 MB.
"""

import sys

import keras
import numpy as np

import large_model
import lockstep
from lockstep.worker import job
from models import MODELS
from steps import StepReports

MODEL, STEPS = sys.argv[1], int(sys.argv[2])
REPEATED = 10
cnn = MODELS["cnn"]
size, examples, make = {
    "cnn": (cnn.batch, cnn.examples, cnn.compiled),
    "large": (large_model.BATCH, large_model.examples, large_model.keras_model),
}[MODEL]


class StepReporter(StepReports, keras.callbacks.Callback):
    pass


strategy = lockstep.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = make(keras)
batch = size * strategy.num_replicas_in_sync
# A few batches, repeated: more random numbers would take much of a worker's start.
x, y = (np.concatenate([part] * (STEPS // REPEATED)) for part in examples(REPEATED * batch))
reporter = StepReporter(job.current().worker, STEPS, lambda: job.current().view.number)
model.fit(x, y, batch_size=batch, epochs=1000, shuffle=False, verbose=0, callbacks=[reporter])
