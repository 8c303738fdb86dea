"""What a step costs more if its loss compares the examples of the whole batch: a CNN on two workers.

    whole_batch.py [BACKEND] [--turns N] [--worker]

One job trains two copies of the model in turns. The loss of one is computed from the whole batch; that of the
other per replica, as if its rows were too large to be exchanged. The rows are the seconds of a step, their
quotient, and that of the processor times of a worker.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from programs import environment
from report import print_row
from turns import FailedError

BATCH, STEPS, TURNS = 128, 30, 7


def train(turns: int) -> None:
    """Train in a worker; print the seconds and the processor seconds of a step of each copy in each turn."""
    import keras
    import numpy as np

    from lockstep.keras.fit import trials

    def contrast(y: Any, p: Any) -> Any:
        ops = keras.ops
        alike = ops.cast(ops.equal(y, ops.transpose(y)), "float32")
        likely = ops.log_softmax(ops.matmul(p, ops.transpose(p)))
        return -ops.mean(ops.sum(alike * likely, axis=1) / ops.sum(alike, axis=1))

    def built() -> keras.Model:
        layers = keras.layers
        model = keras.Sequential(
            [
                layers.Input((28, 28, 1)),
                layers.Conv2D(32, 3, activation="relu"),
                layers.MaxPooling2D(),
                layers.Flatten(),
                layers.Dense(64, activation="relu"),
                layers.Dense(10),
            ]
        )
        model.compile("sgd", contrast)
        return model

    random = np.random.default_rng(0)
    x = random.random((BATCH * STEPS, 28, 28, 1), dtype=np.float32)
    y = random.integers(0, 10, (len(x), 1))
    whole, per_replica = built(), built()
    largest = trials.LARGEST_EXCHANGE
    for turn in range(turns + 1):
        seconds = []
        for model, limit in ((whole, largest), (per_replica, -1)):
            trials.LARGEST_EXCHANGE = limit
            begun, used = time.perf_counter(), time.process_time()
            model.fit(x, y, batch_size=BATCH, verbose=0)
            seconds.append([(time.perf_counter() - begun) / STEPS, (time.process_time() - used) / STEPS])
        if turn:
            print("seconds", json.dumps(seconds), flush=True)


def main(backend: str = "jax", turns: int = TURNS) -> None:
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        command = [sys.executable, "-m", "lockstep", "run", "-n", "2", "--threads-per-worker", "1"]
        command += ["--witness", "off", "--run-dir", folder, "--backend", backend]
        command += [__file__, "--worker", "--turns", str(turns)]
        variables = os.environ | environment(backend, 1)
        done = subprocess.run(command, env=variables, capture_output=True, text=True)
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    pairs = [json.loads(line[1]) for line in lines if line[0] == "seconds"]
    exchanged = "whole batch: the loss contrast" in done.stderr and "per replica: the loss" in done.stderr
    if done.returncode or len(pairs) != turns or not exchanged:
        raise FailedError(done.stderr[-2000:])
    label = f"a contrastive loss, {backend}"
    print_row(f"{label}: a step with that of the whole batch", [whole[0] for whole, _ in pairs], "ms")
    print_row(f"{label}: a step with that of each replica", [other[0] for _, other in pairs], "ms")
    print_row(f"{label}: quotient", [whole[0] / other[0] for whole, other in pairs], "times", "1.4")
    print_row(f"{label}: of processor times", [whole[1] / other[1] for whole, other in pairs], "times")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend", nargs="?", default="jax")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    train(options.turns) if options.worker else main(options.backend, options.turns)
