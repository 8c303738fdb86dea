"""One process of the tutorial's CNN in PyTorch, tuned: one thread, one bucket, gradients in the bucket.

    cnn_ddp.py PROGRAM EXCHANGE PROCESS TURNS STEPS

With EXCHANGE 1 two processes train together in DistributedDataParallel over gloo, else each for itself.
"""

import hashlib
import os
import sys
import time

from turns import SOCKET, Turns, pin

NAME, EXCHANGE, PROCESS, TURNS, STEPS = sys.argv[1], sys.argv[2] == "1", *map(int, sys.argv[3:])
pin(PROCESS)

import torch  # noqa: E402

from cnn_model import BATCH, examples, torch_cnn  # noqa: E402

torch.set_num_threads(1)
torch.manual_seed(1)
model = torch_cnn()
if EXCHANGE:
    meeting = f"file://{os.environ[SOCKET]}-{NAME.replace(' ', '-')}"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=PROCESS, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=100, gradient_as_bucket_view=True)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
loss_of = torch.nn.CrossEntropyLoss()
images, labels = examples(STEPS * BATCH * 2)
x, y = torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels)


def epoch() -> float:
    begun = time.perf_counter()
    for step in range(STEPS):
        start = (2 * step + PROCESS) * BATCH
        optimizer.zero_grad(set_to_none=False)
        loss_of(model(x[start : start + BATCH]), y[start : start + BATCH]).backward()
        optimizer.step()
    return time.perf_counter() - begun


epoch()
turns = Turns(os.environ[SOCKET], NAME, PROCESS)
for _ in range(TURNS):
    if not turns.wait():
        sys.exit("the driver is gone")
    seconds = epoch()
    state = b"".join(value.detach().numpy().tobytes() for value in model.parameters())
    turns.answer({"seconds": seconds, "loss": hashlib.sha256(state).hexdigest()})
