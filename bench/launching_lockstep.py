"""One worker of a short training that reports each step.

    lockstep run ... launching_lockstep.py FOLDER

It writes a digest of the model to a file in FOLDER.
"""

import sys
from pathlib import Path

import keras

import lockstep
from lockstep.worker import job
from models import MODELS
from steps import StepReports

STEPS = 3


class StepReporter(StepReports, keras.callbacks.Callback):
    pass


cnn = MODELS["cnn"]
strategy = lockstep.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = cnn.compiled(keras)
batch = cnn.batch * strategy.num_replicas_in_sync
x, y = cnn.examples(STEPS * batch)
worker = job.current().worker
model.fit(x, y, batch_size=batch, shuffle=False, verbose=0, callbacks=[StepReporter(worker, STEPS)])
Path(sys.argv[1], f"result-{worker}").write_text(lockstep.digest(model))
