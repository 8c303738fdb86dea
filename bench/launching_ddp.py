"""One process of a short training in DistributedDataParallel that reports each step.

    torchrun ... launching_ddp.py FOLDER

It writes a digest of the weights to a file in FOLDER.
"""

import hashlib
import os
import sys
from pathlib import Path

import torch

from models import LEARNING_RATE, MODELS
from steps import report_step

STEPS = 3
RANK = int(os.environ["RANK"])

torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
cnn = MODELS["cnn"]
model = torch.nn.parallel.DistributedDataParallel(
    cnn.torch(), bucket_cap_mb=100, gradient_as_bucket_view=True
)
optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
loss_of = torch.nn.CrossEntropyLoss()
x, y = map(torch.from_numpy, cnn.examples(STEPS * cnn.batch * 2))
for step in range(STEPS):
    start = (2 * step + RANK) * cnn.batch
    optimizer.zero_grad(set_to_none=False)
    loss_of(model(x[start : start + cnn.batch]), y[start : start + cnn.batch]).backward()
    optimizer.step()
    report_step(RANK, step)
digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().numpy().tobytes())
Path(sys.argv[1], f"result-{RANK}").write_text(digest.hexdigest())
torch.distributed.destroy_process_group()
