"""One process that trains a model of `models.large` for `bench/gpu.py`.

    gpu_training.py NAME MODEL DTYPE KIND BATCH TURNS STEPS

NAME is that of the program in turns, or `steps`: then it reports each step instead, and worker 1 ends itself
with SIGKILL after the step KILL_AT, if that variable is set. KIND is `plain` or `lockstep`. BATCH is the size
of the global batch. A tiny model has `tiny-` before its name.
"""

import contextlib
import os
import signal
import sys
from typing import Any

import keras
import numpy as np

import lockstep
from lockstep.worker import job
from models import large
from steps import StepReports
from turns import Epochs

NAME, MODEL, DTYPE, KIND = sys.argv[1:5]
BATCH, TURNS, STEPS = map(int, sys.argv[5:])
KILL_AT = int(os.environ.get("KILL_AT", -1))
MIXED = {"bfloat16": "mixed_bfloat16"}
WORKER = job.current().context.worker if KIND == "lockstep" else 0


class Turn(Epochs, keras.callbacks.Callback):
    def weights(self) -> Any:
        return [np.asarray(keras.ops.convert_to_numpy(weight)) for weight in self.model.weights]


class StepReporter(StepReports, keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_end(batch, logs)
        if WORKER == 1 and self.epoch * STEPS + batch == KILL_AT:
            os.kill(os.getpid(), signal.SIGKILL)


if "CUBLAS_WORKSPACE_CONFIG" in os.environ and keras.backend.backend() == "torch" and KIND == "plain":
    import torch

    torch.use_deterministic_algorithms(True)
keras.config.set_dtype_policy(MIXED.get(DTYPE, DTYPE))
keras.utils.set_random_seed(1)
measured = {**{f"tiny-{name}": model for name, model in large.TINY.items()}, **large.LARGE}[MODEL]
with lockstep.MultiWorkerMirroredStrategy().scope() if KIND == "lockstep" else contextlib.nullcontext():
    model = measured.built(keras)
x, y = measured.examples(STEPS * BATCH)
callback = (
    StepReporter(WORKER, STEPS, lambda: job.current().view.number) if NAME == "steps" else Turn(NAME, WORKER)
)
model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, epochs=TURNS + 1, callbacks=[callback])
