"""One process that trains a model in Keras: `fit`, one epoch per turn.

    training_keras.py PROGRAM MODEL KIND PROCESS BATCH TURNS STEPS

KIND is `lockstep` (PROCESS -1 takes the worker's number from TF_CONFIG), `plain`, or `both-cores`: plain
Keras that computes the batches of two replicas on the cores of two workers. BATCH is the size per replica.
"""

import contextlib
import json
import os
import sys

from turns import Epochs, pin

NAME, MODEL, KIND = sys.argv[1:4]
PROCESS, BATCH, TURNS, STEPS = map(int, sys.argv[4:])
if PROCESS < 0:
    PROCESS = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
pin(*((0, 1) if KIND == "both-cores" else (PROCESS,)))

import keras  # noqa: E402

import lockstep  # noqa: E402
from models import MODELS  # noqa: E402
from pipelines import of_arrays  # noqa: E402


class Turn(Epochs, keras.callbacks.Callback):
    pass


strategy = lockstep.MultiWorkerMirroredStrategy() if KIND == "lockstep" else None
replicas = strategy.num_replicas_in_sync if strategy else 2 if KIND == "both-cores" else 1
keras.utils.set_random_seed(1)
measured = MODELS[MODEL]
with strategy.scope() if strategy else contextlib.nullcontext():
    model = measured.compiled(keras)
x, y = measured.examples(STEPS * BATCH * replicas)
data = {"x": x, "y": y, "batch_size": BATCH * replicas}
if replicas == 1 + (KIND == "both-cores") and keras.backend.backend() == "tensorflow":
    data = {"x": of_arrays(x, y, BATCH * replicas)}
options = {"shuffle": False, "verbose": 0, "callbacks": [Turn(NAME, PROCESS)]}
model.fit(**data, epochs=TURNS + 1, **options)
