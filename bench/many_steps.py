"""Whether a long job stays as it began: a million small steps of two workers on JAX.

    many_steps.py [--steps N]

A step is one of a small dense model; 100 epochs. The rows compare the last five epochs with the second to the
sixth: the steps per second, and the resident memory and open descriptors of a worker; then the files of the
run.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from programs import environment
from turns import FailedError

EPOCHS = 100
BATCH = 16
STEPS = 1_000_000


def train(steps: int) -> None:
    """Train in a worker; print the figures of each epoch."""
    import keras
    import numpy as np
    import psutil

    import lockstep

    class Figures(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.begun = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seconds, process = time.perf_counter() - self.begun, psutil.Process()
            memory, descriptors = process.memory_info().rss, process.num_fds()
            print("epoch", json.dumps([steps / EPOCHS / seconds, memory, descriptors]), flush=True)

    with lockstep.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(8), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    x = np.random.default_rng(0).random((BATCH * steps // EPOCHS, 8), dtype=np.float32)
    model.fit(x, x[:, :1], batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=[Figures()])


def main(steps: int = STEPS) -> None:
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as name:
        folder = Path(name) / "run"
        command = [sys.executable, "-m", "lockstep", "run", "-n", "2", "--threads-per-worker", "1"]
        command += ["--run-dir", str(folder), __file__, "--worker", "--steps", str(steps)]
        done = subprocess.run(command, env=os.environ | environment("jax", 1), capture_output=True, text=True)
        if done.returncode:
            sys.exit(str(FailedError(done.stderr[-2000:])))
        lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
        epochs = [json.loads(line[1]) for line in lines if line[0] == "epoch"]
        sizes: Counter[str] = Counter()
        for path in folder.rglob("*"):
            if path.is_file():
                sizes[path.relative_to(folder).parts[0]] += path.stat().st_size
    print(f"{steps:,} steps of two workers on jax")
    for place, label in enumerate(("steps per second", "resident memory of the chief", "its descriptors")):
        first, last = (
            statistics.median(epoch[place] for epoch in part) for part in (epochs[1:6], epochs[-5:])
        )
        print(f"  {label:32} {first:14,.0f} at the beginning, {last:14,.0f} at the end: {last / first:.3f}")
    for file, size in sorted(sizes.items()):
        print(f"  {file:32} {size:14,} bytes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="a multiple of 100")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    (train if given.worker else main)(given.steps)
