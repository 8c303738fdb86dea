"""One worker that trains and reports each step, until killed.

    lockstep run ... recovery_lockstep.py MODEL STEPS

MODEL is `cnn`, the tutorial's, `large` or `larger`, whose states are 203 MB and 1.5 GB, or one of
`reading_sources.SOURCES`: a small model on a costly input.
"""

import sys
from functools import partial

import keras
import numpy as np

import large_model
import lockstep
from lockstep.worker import job
from models import MODELS
from reading_sources import SOURCES, examples, source
from steps import StepReports

MODEL, STEPS = sys.argv[1], int(sys.argv[2])
REPEATED = 10
cnn, dense = MODELS["cnn"], MODELS["dense-0.1"]
size, examples_of, make = {
    "cnn": (cnn.batch, cnn.examples, cnn.compiled),
    **{
        name: (large_model.BATCH, large_model.examples, partial(large_model.keras_model, name=name))
        for name in large_model.HIDDEN
    },
    **dict.fromkeys(SOURCES, (dense.batch, examples, dense.compiled)),
}[MODEL]


class StepReporter(StepReports, keras.callbacks.Callback):
    pass


strategy = lockstep.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = make(keras)
batch = size * strategy.num_replicas_in_sync
# A few batches, repeated: more random numbers would take much of a worker's start.
x, y = (np.concatenate([part] * (STEPS // REPEATED)) for part in examples_of(REPEATED * batch))
data = {"x": source(MODEL, x, y, batch)} if MODEL in SOURCES else {"x": x, "y": y, "batch_size": batch}
reporter = StepReporter(job.current().worker, STEPS, lambda: job.current().view.number)
model.fit(**data, epochs=1000, shuffle=False, verbose=0, callbacks=[reporter])
