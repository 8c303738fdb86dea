"""One process that trains a model in PyTorch, tuned: one thread, one bucket, gradients in the bucket.

    training_ddp.py PROGRAM MODEL LIBRARY ADAM EXCHANGE PROCESS BATCH TURNS STEPS

LIBRARY is `torch`, or `keras`: a model of Keras on its PyTorch backend, which is a module of PyTorch. ADAM is
`adam`, the default, or `fused`, which passes over the memory once. EXCHANGE processes train together in
DistributedDataParallel over gloo; with 0, two processes train alone. With BENCH_LOCAL_STEPS, each process
takes so many steps by itself before the weights are averaged: by the post-local SGD of PyTorch, or with
BENCH_TORCHFT by the LocalSGD of torchft. Its value is the network of the processes, such as 10.219.0.
"""

import itertools
import math
import os
import sys
import time
from datetime import timedelta
from typing import Any

from turns import SOCKET, Turns, pin

NAME, MODEL, LIBRARY, ADAM = sys.argv[1:5]
EXCHANGE, PROCESS, BATCH, TURNS, STEPS = map(int, sys.argv[5:])
LOCAL_STEPS = int(os.environ.get("BENCH_LOCAL_STEPS", "0"))
TORCHFT = os.environ.get("BENCH_TORCHFT", "")
pin(PROCESS)
os.environ["KERAS_BACKEND"] = "torch"

import torch  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (  # noqa: E402
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager  # noqa: E402

from models import LEARNING_RATE, MODELS  # noqa: E402


def build() -> Any:
    if LIBRARY == "torch":
        return measured.torch()
    import keras

    return measured.compiled(keras)


def average_by_torchft(model: Any, optimizer: Any) -> None:
    """Average the weights after every LOCAL_STEPS steps. The first process runs the lighthouse, too."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import LocalSGD

    host, port = f"{TORCHFT}.{PROCESS + 1}", 29510
    if PROCESS == 0:
        kept.append(LighthouseServer(bind=f"0.0.0.0:{port}", min_replicas=EXCHANGE, join_timeout_ms=60_000))
    store = torch.distributed.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    limit = timedelta(minutes=10)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=EXCHANGE,
        use_async_quorum=False,
        timeout=limit,
        quorum_timeout=limit,
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        lighthouse_addr=f"http://{TORCHFT}.1:{port}",
        replica_id=f"process{PROCESS}",
        hostname=host,
        init_sync=False,
    )
    local = LocalSGD(manager, model, optimizer, LOCAL_STEPS)
    local.__enter__()
    kept.extend([store, manager, local])


kept: list[Any] = []
torch.set_num_threads(1)
replicas = EXCHANGE or 2
measured = MODELS[MODEL]
model = build()
if EXCHANGE:
    rendezvous = f"file://{os.environ[SOCKET]}-{NAME.replace(' ', '-')}"
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=PROCESS, world_size=EXCHANGE)
if EXCHANGE and not TORCHFT:
    model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=100, gradient_as_bucket_view=True)
average = None
if LOCAL_STEPS and not TORCHFT:
    state = PostLocalSGDState(None, None, start_localSGD_iter=0, post_local_gradient_allreduce=False)
    model.register_comm_hook(state, post_localSGD_hook)
    average = PeriodicModelAverager(period=LOCAL_STEPS).average_parameters
parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.Adam(parameters, LEARNING_RATE, fused=ADAM == "fused" or None)
if TORCHFT:
    average_by_torchft(model, optimizer)
BETA, EPSILON = 0.999, 1e-7
numbers = itertools.count(1)
loss_of = torch.nn.CrossEntropyLoss()
x, y = map(torch.from_numpy, measured.examples(STEPS * BATCH * replicas))
# Keras takes the mode as an argument, PyTorch stores it in the module.
mode = {"training": True} if LIBRARY == "keras" else {}


def epoch() -> tuple[float, Any]:
    """Train an epoch; return its seconds and the mean loss of this process's examples."""
    begun = time.perf_counter()
    total = torch.zeros(())
    for step in range(STEPS):
        start = (replicas * step + PROCESS) * BATCH
        optimizer.zero_grad(set_to_none=False)
        loss = loss_of(model(x[start : start + BATCH], **mode), y[start : start + BATCH])
        loss.backward()
        # Keras adds epsilon before it corrects Adam's second moment, PyTorch after: this makes them equal.
        optimizer.param_groups[0]["eps"] = EPSILON / math.sqrt(1 - BETA ** next(numbers))
        optimizer.step()
        if average is not None:
            average(parameters)
        total += loss.detach()
    return time.perf_counter() - begun, total / STEPS


epoch()
turns = Turns(NAME, PROCESS)
for _ in range(TURNS):
    turns.wait()
    seconds, loss = epoch()
    if EXCHANGE:
        torch.distributed.all_reduce(loss)
        loss /= replicas
    turns.answer(seconds, loss.item(), (value.detach().numpy() for value in parameters))
