"""Trains beside a comparison with one process; arguments: what it does, the folder of the run, and a pipe.

plain     nothing else
equal     waits at its end for the result of the comparison
fault     likewise; replicas are combined wrongly
writes    likewise; writes files before it trains
dies      likewise; the process that compares kills itself before it trains
holds     writes the id of the process to the pipe after the training, and waits for SIGUSR1
"""

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import keras
import numpy as np

from lockstep.data.batch import GlobalBatch
from lockstep.worker import job

PATIENCE = 600.0


def result(folder: Path) -> dict[str, object]:
    fields: dict[str, object] = json.loads((folder / "comparison.json").read_text())
    return fields


def wait_for_result(folder: Path) -> None:
    # The comparison ends here.
    Path("trained").write_text("")
    deadline = time.monotonic() + PATIENCE
    while not {"ended", "failed"} & {name for name, value in result(folder).items() if value}:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def main(what: str, folder: str, pipe: str = "") -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    if what == "fault":
        share = GlobalBatch.share
        GlobalBatch.share = lambda *args: share(*args)._replace(weight=1.0)  # type: ignore[method-assign]
    if what == "writes":
        with tempfile.TemporaryDirectory() as temporary:
            Path(temporary, "out.csv").write_text("")
        Path(tempfile.gettempdir(), "note").write_text("")
        Path("out.csv").write_text("")
    if what == "dies" and job.current().settings.checks:
        os.kill(os.getpid(), signal.SIGKILL)
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    model = keras.Sequential([keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(x, x.sum(axis=1, keepdims=True), batch_size=8, epochs=2, verbose=0)
    if what == "holds":
        descriptor = os.open(pipe, os.O_WRONLY)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        os.close(descriptor)
        signal.sigwait([signal.SIGUSR1])
    elif what != "plain" and Path(folder).exists():
        # On another host, the folder does not exist.
        wait_for_result(Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
