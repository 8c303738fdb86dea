"""One process that trains the tutorial's CNN in DistributedDataParallel and reports each step, until killed.

    torchrun ... recovery_ddp.py STEPS FOLDER EVERY

It writes a checkpoint to FOLDER every EVERY steps, and resumes from an existing one.
"""

import itertools
import os
import sys
from pathlib import Path

import torch

from models import LEARNING_RATE, MODELS
from steps import report_step

STEPS, EVERY = int(sys.argv[1]), int(sys.argv[3])
CHECKPOINT = Path(sys.argv[2]) / "checkpoint"
RANK = int(os.environ["RANK"])

torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
cnn = MODELS["cnn"]
model = cnn.torch()
model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=100, gradient_as_bucket_view=True)
optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
loss_of = torch.nn.CrossEntropyLoss()
x, y = map(torch.from_numpy, cnn.examples(STEPS * cnn.batch * 2))
taken = 0
if CHECKPOINT.exists():
    saved = torch.load(CHECKPOINT)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    taken = saved["taken"]

for step in itertools.count(taken):
    start = (2 * (step % STEPS) + RANK) * cnn.batch
    rows = slice(start, start + cnn.batch)
    optimizer.zero_grad(set_to_none=False)
    loss_of(model(x[rows]), y[rows]).backward()
    optimizer.step()
    report_step(RANK, step)
    if RANK == 0 and (step + 1) % EVERY == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "taken": step + 1}
        torch.save(state, CHECKPOINT.with_suffix(".new"))
        CHECKPOINT.with_suffix(".new").replace(CHECKPOINT)
