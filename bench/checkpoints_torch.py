"""One of two processes that train a large model in DistributedDataParallel and write a checkpoint per turn.

    checkpoints_torch.py PROGRAM STAGER MODEL PROCESS TURNS FOLDER

The checkpoints are PyTorch's distributed asynchronous ones. STAGER is `default`, or `reused`: a stager that
copies to the same memory each time.
"""

import os
import shutil
import sys
import time
from pathlib import Path

from turns import SOCKET, Turns, pin

NAME, STAGER, MODEL = sys.argv[1:4]
PROCESS, TURNS = map(int, sys.argv[4:6])
FOLDER = Path(sys.argv[6])
pin(PROCESS)

import torch  # noqa: E402
from torch.distributed.checkpoint import async_save  # noqa: E402
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict  # noqa: E402

from checkpoint_cost import AT, STEPS, figures  # noqa: E402
from large_model import BATCH, LEARNING_RATE, examples, torch_model  # noqa: E402

torch.set_num_threads(1)
rendezvous = f"file://{os.environ[SOCKET]}-{NAME.replace(' ', '-')}"
torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=PROCESS, world_size=2)
# The writers need a group of their own, since training uses the other group meanwhile.
writers = torch.distributed.new_group(backend="gloo")
model = torch_model(MODEL)
model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=100, gradient_as_bucket_view=True)
optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE, fused=True)
loss_of = torch.nn.CrossEntropyLoss()
inputs, labels = examples(STEPS * BATCH * 2)
x, y = torch.from_numpy(inputs), torch.from_numpy(labels)
stager = DefaultStager(StagingOptions(False, False, False, False)) if STAGER == "reused" else None


def epoch(number: int) -> dict[str, float]:
    """Train an epoch with a checkpoint in its middle; return the cost of the checkpoint."""
    folder = FOLDER / str(number)
    times = [time.perf_counter()]
    for step in range(STEPS):
        start = (2 * step + PROCESS) * BATCH
        optimizer.zero_grad(set_to_none=False)
        loss_of(model(x[start : start + BATCH]), y[start : start + BATCH]).backward()
        optimizer.step()
        times.append(time.perf_counter())
        if step + 1 == AT:
            weights, averages = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": averages}
            begun = time.perf_counter()
            written = async_save(state, checkpoint_id=folder, process_group=writers, async_stager=stager)
            call = time.perf_counter() - begun
    written.result()
    torch.distributed.barrier()
    size = sum(path.stat().st_size for path in folder.iterdir()) if PROCESS == 0 else 0
    torch.distributed.barrier()
    if PROCESS == 0:
        shutil.rmtree(folder)
    return figures(times, call, size)


epoch(0)
turns = Turns(NAME, PROCESS)
for number in range(TURNS):
    turns.wait()
    turns.send(epoch(number + 1))
if stager is not None:
    stager.close()
