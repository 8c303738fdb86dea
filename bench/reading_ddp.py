"""One process of PyTorch that trains on its shard of a costly `DataLoader`, with DistributedSampler.

    reading_ddp.py PROGRAM PROCESSES PROCESS REPLICAS BATCH TURNS STEPS

One process computes the batches of all replicas. Two train together in DistributedDataParallel over gloo.
"""

import os
import sys
import time

from turns import SOCKET, Turns, pin

NAME = sys.argv[1]
PROCESSES, PROCESS, REPLICAS, BATCH, TURNS, STEPS = map(int, sys.argv[2:])
pin(PROCESS)
os.environ["KERAS_BACKEND"] = "torch"

import keras  # noqa: E402
import torch  # noqa: E402
from torch.utils.data import DistributedSampler  # noqa: E402

from models import LEARNING_RATE, MODELS  # noqa: E402
from reading_sources import examples, loader  # noqa: E402

torch.set_num_threads(1)
model = MODELS["dense-0.1"].compiled(keras)
if PROCESSES > 1:
    rendezvous = f"file://{os.environ[SOCKET]}-{NAME.replace(' ', '-')}"
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=PROCESS, world_size=PROCESSES)
    model = torch.nn.parallel.DistributedDataParallel(model)
parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.Adam(parameters, LEARNING_RATE, eps=1e-7)
loss_of = torch.nn.CrossEntropyLoss()
x, y = examples(STEPS * BATCH * REPLICAS)
sampler = DistributedSampler(range(len(x)), PROCESSES, PROCESS, shuffle=False)
batches = loader(x, y, BATCH * REPLICAS // PROCESSES, sampler)


def epoch() -> tuple[float, torch.Tensor]:
    """Train an epoch; return its seconds and the mean loss of this process's examples."""
    begun = time.perf_counter()
    total = torch.zeros(())
    for rows, labels in batches:
        optimizer.zero_grad()
        loss = loss_of(model(rows, training=True), labels)
        loss.backward()
        optimizer.step()
        total += loss.detach()
    return time.perf_counter() - begun, total / STEPS


epoch()
turns = Turns(NAME, PROCESS)
for _ in range(TURNS):
    turns.wait()
    seconds, loss = epoch()
    if PROCESSES > 1:
        torch.distributed.all_reduce(loss)
        loss /= PROCESSES
    turns.answer(seconds, loss.item(), (value.detach().numpy() for value in parameters))
