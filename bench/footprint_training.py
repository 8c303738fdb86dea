"""Trains a model to its end, reports each step, and prints the digest of the model.

    footprint_training.py MODEL EPOCHS STEPS [REPLICAS]

STEPS are those of an epoch. With REPLICAS, it is plain Keras with the global batch of that many replicas.
"""

import contextlib
import sys

import keras

import lockstep
from lockstep.worker import job
from models import MODELS
from steps import StepReports

MODEL, EPOCHS, STEPS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


class StepReporter(StepReports, keras.callbacks.Callback):
    pass


strategy = None if len(sys.argv) > 4 else lockstep.MultiWorkerMirroredStrategy()
replicas = strategy.num_replicas_in_sync if strategy else int(sys.argv[4])
measured = MODELS[MODEL]
with strategy.scope() if strategy else contextlib.nullcontext():
    model = measured.compiled(keras)
x, y = measured.examples(STEPS * measured.batch * replicas)
reporter = StepReporter(job.current().worker if strategy else 0, STEPS)
model.fit(
    x,
    y,
    batch_size=measured.batch * replicas,
    epochs=EPOCHS,
    shuffle=False,
    verbose=0,
    callbacks=[reporter],
)
print("digest", lockstep.digest(model))
