"""What the comparison with one process costs that runs beside each job: processor time, and the job's rate.

    comparison.py [BACKEND] [--turns N]

The processor time is that of all processes of the comparison, for each of some examples. The rates are those
of jobs with a small model on two workers; jobs with and without the comparison alternate. It begins after 45
of about 100 seconds, so these jobs pay six times the part of a job of ten minutes.
"""

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from lockstep.cli.witness import compare
from lockstep.system.environment import usable_cores
from programs import environment
from report import print_row
from turns import FailedError

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = ("plain", "autoencoder", "gan")
TURNS = 3
EPOCHS = {"jax": 2400, "tensorflow": 2400, "torch": 400}
TEN_MINUTES = 600.0
TRAINING = """
import sys, keras, numpy as np
x = np.random.default_rng(0).normal(size=(2048, 64)).astype("float32")
layers = [keras.layers.Dense(512, activation="relu"), keras.layers.Dense(1)]
model = keras.Sequential([keras.Input((64,)), *layers])
model.compile("adam", "mse")
model.fit(x, x.sum(axis=1, keepdims=True), batch_size=64, epochs=int(sys.argv[1]), verbose=0)
"""


def main(backend: str = "jax", turns: int = TURNS) -> None:
    os.environ.update(environment(backend, 1))
    seconds = [processor_time(backend, name) for name in NAMES]
    label = f"comparison: {backend}, {', '.join(NAMES)}"
    print_row(f"{label}: processor time", seconds, "s")
    print_row(
        f"{label}: part of ten minutes", [s / (TEN_MINUTES * usable_cores()) for s in seconds], "", "0.02"
    )
    pairs = [(rate(backend, "first"), rate(backend, "off")) for _ in range(turns)]
    print_row(f"comparison: {backend}, rate with it / without", [one / other for one, other in pairs])


def processor_time(backend: str, name: str) -> float:
    """Return the seconds of processor time of a comparison; it must have found everything equal."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        words = ["--replicas", "2", "--backend", backend]
        result = compare(words, ["--", str(EXAMPLES / f"{name}.py")], Path(folder), "first")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if not result["compared"] or any(step["differences"] for step in result["compared"]):
        raise FailedError(f"comparison of {name} on {backend}: {result}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def rate(backend: str, witness: str) -> float:
    """Return the examples per second of a job."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(TRAINING)
        words = ["-m", "lockstep", "run", "-n", "2", "--backend", backend, "--witness", witness]
        variables = os.environ | {"XDG_CACHE_HOME": folder}
        done = subprocess.run(
            [sys.executable, *words, "train.py", str(EPOCHS[backend])],
            cwd=folder,
            env=variables,
            capture_output=True,
            text=True,
        )
    told_rate = re.search(r"fit 1: ([\d,]+) examples/s", done.stderr)
    compared = "compared with one process: equal" in done.stderr
    if told_rate is None or compared != (witness == "first"):
        raise FailedError(f"a job beside a comparison on {backend}: {done.stderr}")
    return float(told_rate[1].replace(",", ""))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("backend", nargs="?", default="jax")
    parser.add_argument("--turns", type=int, default=TURNS, metavar="N")
    options = parser.parse_args()
    try:
        main(options.backend, options.turns)
    except FailedError as error:
        sys.exit(str(error))
