"""One process that trains a small model in Keras on a costly input: `fit`, one epoch per turn.

    reading_keras.py PROGRAM SOURCE KIND REPLICAS BATCH TURNS STEPS

KIND is `lockstep` or `plain`: plain Keras that computes the global batches in one process. BATCH is the size
per replica.
"""

import os
import sys

from turns import Epochs, pin

NAME, SOURCE, KIND = sys.argv[1:4]
REPLICAS, BATCH, TURNS, STEPS = map(int, sys.argv[4:])
worker = 0
if KIND == "lockstep":
    from lockstep.worker import job

    worker = job.current().worker
pin(worker)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras  # noqa: E402

from models import MODELS  # noqa: E402
from reading_sources import examples, source  # noqa: E402


class Turn(Epochs, keras.callbacks.Callback):
    pass


keras.utils.set_random_seed(1)
model = MODELS["dense-0.1"].compiled(keras)
size = BATCH * REPLICAS
x, y = examples(STEPS * size)
model.fit(
    source(SOURCE, x, y, size),
    epochs=TURNS + 1,
    steps_per_epoch=STEPS if SOURCE == "generator" else None,
    shuffle=False,
    verbose=0,
    callbacks=[Turn(NAME, worker)],
)
