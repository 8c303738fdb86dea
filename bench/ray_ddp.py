"""Ray Train's TorchTrainer: a model of Keras in DistributedDataParallel over gloo, which reports each step.

    ray_ddp.py ADDRESS MODEL STEPS EVERY FOLDER

Two workers of one CPU each; a checkpoint every EVERY steps, from which Ray Train continues after a loss.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any


def train(config: dict[str, Any]) -> None:
    import ray.train
    import ray.train.torch
    import torch

    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    from models import LEARNING_RATE, MODELS
    from steps import report_step

    torch.set_num_threads(1)
    measured, steps, every = MODELS[config["model"]], config["steps"], config["every"]
    rank = ray.train.get_context().get_world_rank()
    model = ray.train.torch.prepare_model(
        measured.compiled(keras),
        parallel_strategy_kwargs={"bucket_cap_mb": 100, "gradient_as_bucket_view": True},
    )
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    loss_of = torch.nn.CrossEntropyLoss()
    x, y = map(torch.from_numpy, measured.examples(steps * measured.batch * 2))
    taken = 0
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "state")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        taken = saved["taken"]
    while True:
        start = (2 * (taken % steps) + rank) * measured.batch
        rows = slice(start, start + measured.batch)
        optimizer.zero_grad(set_to_none=False)
        loss_of(model(x[rows], training=True), y[rows]).backward()
        optimizer.step()
        report_step(rank, taken)
        taken += 1
        if taken % every == 0:
            with tempfile.TemporaryDirectory() as folder:
                kept = None
                if rank == 0:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "taken": taken}
                    torch.save(state, Path(folder) / "state")
                    kept = ray.train.Checkpoint.from_directory(folder)
                ray.train.report({"taken": taken}, checkpoint=kept)


def main(address: str, model: str, steps: int, every: int, folder: str) -> None:
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    import ray

    ray.init(address, log_to_driver=False)
    TorchTrainer(
        train,
        train_loop_config={"model": model, "steps": steps, "every": every},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2, placement_strategy="SPREAD"),
        run_config=RunConfig(
            storage_path=folder,
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
