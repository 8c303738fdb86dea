"""One of two processes that train a model in Keras on PyTorch, with `keras.distribution.DataParallel`.

    training_torch_parallel.py PROGRAM MODEL PROCESS BATCH TURNS STEPS

This needs Keras 3.16, whose `fit` wraps the model in PyTorch's DistributedDataParallel and sums the metrics
over the processes in every step. They connect on the loopback with gloo. Keras refuses to shard arrays over
processes, so each passes its own half of every batch, from memory, as Lockstep does.
"""

import os
import sys

from turns import PORTS, Epochs, pin

NAME, MODEL = sys.argv[1:3]
PROCESS, BATCH, TURNS, STEPS = map(int, sys.argv[3:])
pin(PROCESS)
os.environ["KERAS_BACKEND"] = "torch"

import keras  # noqa: E402
import torch  # noqa: E402

from models import MODELS, halves  # noqa: E402

if not hasattr(keras.Model, "_initialize_ddp"):
    sys.exit(f"Keras {keras.__version__} in {keras.__path__[0]} has no data parallelism on PyTorch")


class Turn(Epochs, keras.callbacks.Callback):
    pass


torch.set_num_threads(1)
keras.utils.set_random_seed(1)
keras.distribution.initialize(f"127.0.0.1:{os.environ[PORTS].split()[0]}", 2, PROCESS)
keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
measured = MODELS[MODEL]
model = measured.compiled(keras)
x, y = halves(measured.examples(STEPS * BATCH * 2), BATCH)[PROCESS]
options = {"shuffle": False, "verbose": 0, "callbacks": [Turn(NAME, PROCESS)]}
model.fit(x, y, batch_size=BATCH, epochs=TURNS + 1, **options)
torch.distributed.destroy_process_group()
