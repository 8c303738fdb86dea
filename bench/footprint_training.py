"""Trains a model to its end, reports each step, and prints the digest of the model.

    footprint_training.py MODEL STEPS [REPLICAS]

With REPLICAS, it is plain Keras with the global batch of that many replicas.
"""

import contextlib
import sys

import keras

import lockstep
from lockstep.worker import job
from models import MODELS
from steps import StepReports

MODEL, STEPS = sys.argv[1], int(sys.argv[2])


class StepReporter(StepReports, keras.callbacks.Callback):
    pass


strategy = None if len(sys.argv) > 3 else lockstep.MultiWorkerMirroredStrategy()
replicas = strategy.num_replicas_in_sync if strategy else int(sys.argv[3])
measured = MODELS[MODEL]
with strategy.scope() if strategy else contextlib.nullcontext():
    model = measured.compiled(keras)
x, y = measured.examples(10 * measured.batch * replicas)
reporter = StepReporter(job.current().worker if strategy else 0, 10)
model.fit(
    x,
    y,
    batch_size=measured.batch * replicas,
    epochs=STEPS // 10,
    shuffle=False,
    verbose=0,
    callbacks=[reporter],
)
print("digest", lockstep.digest(model))
