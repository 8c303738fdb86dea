"""What a job takes by its size: memory against plain Keras, and the times of its steps on two cores.

    footprint.py [BACKEND] [--row ROW]

Memory is the proportional set size of all processes of a program together, so that shared pages count once:
the median over its steps, and the highest while it starts or trains. Rows are the number of workers from 1 to
32, a model with 2,000 variables, and models whose weights and Adam's averages are 180 MB and 1.5 GB.
Processes are not pinned and have one thread each. All jobs of a row must have equal digests.
"""

import argparse
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from programs import environment
from steps import Watch, descendants, gaps, of, watching
from turns import FailedError

HERE = Path(__file__).parent
SETTLED = 20
"""The first steps, which do not count: code is compiled, and memory is taken for the first time."""
EPOCH = 10
"""The steps of an epoch."""
SAMPLE_SECONDS = 0.5
LONGEST_SECONDS = 1800.0


@dataclass(frozen=True)
class Row:
    """Jobs with one model.

    Attributes:
        model: its name in `MODELS`.
        replicas: of each job.
        workers: of each job.
        steps: the number of training steps, a multiple of the steps of an epoch.
        divided: the workers of jobs on JAX and PyTorch that divide the update.
    """

    model: str
    replicas: int
    workers: tuple[int, ...]
    steps: int
    divided: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.steps % EPOCH or self.steps <= SETTLED:
            raise ValueError(
                f"{self.model}: {self.steps} steps are not more than {SETTLED} and a multiple of {EPOCH}"
            )


ROWS = {
    "workers": Row("mlp", 32, (1, 2, 4, 8, 16, 32), 400, (32,)),
    "variables": Row("deep", 2, (1, 2), 200),
    "memory": Row("dense-15", 2, (1, 2), 80, (2,)),
    "eight": Row("dense-15", 8, (8,), 40, (8,)),
    "large": Row("dense-125", 2, (1, 2), 40),
}


@dataclass(frozen=True)
class Footprint:
    """The measurements of a program.

    Attributes:
        memory: the median over its steps, in bytes.
        highest: the highest memory.
        first: seconds to the end of the first step.
        steps: the seconds of each step of the first process.
        digest: of the trained model; empty if it says none.
    """

    memory: float
    highest: int
    first: float
    steps: list[float]
    digest: str


def memory(pid: int) -> int:
    """Return the proportional set size of a process and its children, in bytes."""
    total = 0
    for each in [pid, *(child.pid for child in descendants(pid))]:
        with suppress(OSError):
            text = Path(f"/proc/{each}/smaps_rollup").read_text()
            total += int(next(line for line in text.splitlines() if line.startswith("Pss:")).split()[1])
    return total * 1024


def measure(backend: str, row: Row, workers: int, *options: str) -> Footprint:
    """Train to the end with this number of workers; 0 is plain Keras."""
    with (
        tempfile.TemporaryDirectory(prefix="lockstep-bench-") as name,
        watching(Path(name), environment(backend, 1)) as watch,
    ):
        script = [str(HERE / "footprint_training.py"), row.model, str(row.steps // EPOCH), str(EPOCH)]
        numbers = ["-n", str(workers), "--replicas", str(row.replicas), "--threads-per-worker", "1"]
        command = [
            sys.executable,
            "-m",
            "lockstep",
            "run",
            *numbers,
            *options,
            "--run-dir",
            f"{name}/run",
            *script,
        ]
        begun = time.monotonic()
        process = watch.start(command if workers else [sys.executable, *script, str(row.replicas)])
        samples = list(sampled(watch, process.pid, begun))
        log = (Path(name) / "log").read_text(errors="replace")
        if process.wait():
            raise FailedError(f"{row.model} with {workers} workers:\n{log[-2000:]}")
    own = of(watch.steps[0].pid, watch.steps)
    processes = max(1, workers)
    settled = [size for size, steps in samples if SETTLED * processes <= steps < row.steps * processes]
    if not settled:
        raise FailedError(
            f"{row.model} with {workers} workers: no sample of memory in its steps after the first {SETTLED}"
        )
    digest = re.search(r"digest (\w{64})", log)
    return Footprint(
        statistics.median(settled),
        max(size for size, _ in samples),
        min(step.time for step in watch.steps) - begun,
        gaps(own[SETTLED:]),
        digest[1] if digest else "",
    )


def sampled(watch: Watch, pid: int, begun: float) -> Iterator[tuple[int, int]]:
    """Yield the memory of a program until it ends, and how many steps its processes have reported by then."""
    (process,) = watch.processes
    due = 0.0
    while process.poll() is None:
        watch.receive(0.05)
        if (now := time.monotonic()) >= due:
            due = now + SAMPLE_SECONDS
            if size := memory(pid):
                yield size, len(watch.steps)
        if now > begun + LONGEST_SECONDS:
            raise FailedError(f"the training has not ended after {LONGEST_SECONDS:.0f} s")
    while watch.receive(0.0):
        pass


def print_footprint(label: str, found: Footprint, plain: Footprint) -> None:
    times = statistics.quantiles(found.steps, n=100, method="inclusive")
    memory, highest = found.memory / plain.memory, found.highest / plain.highest
    print(
        f"  {label:13} memory {found.memory / 1e9:5.2f} GB, {memory:5.2f} of plain Keras; highest "
        f"{found.highest / 1e9:5.2f} GB, {highest:5.2f}; first step after {found.first:5.1f} s; "
        f"a step {times[49] * 1e3:7.1f} ms, p99 {times[98] * 1e3:7.1f} ms",
        flush=True,
    )


def main(backend: str = "jax", rows: tuple[str, ...] = tuple(ROWS)) -> None:
    try:
        for name in rows:
            row = ROWS[name]
            print(f"{row.model} on {backend}, {row.replicas} replicas, {row.steps} steps, Adam")
            plain = measure(backend, row, 0)
            print_footprint("plain Keras", plain, plain)
            digests = set()
            for workers in row.workers:
                found = measure(backend, row, workers)
                digests.add(found.digest)
                print_footprint(f"{workers} workers", found, plain)
            for workers in row.divided if backend != "tensorflow" else ():
                found = measure(backend, row, workers, "--update", "divided")
                digests.add(found.digest)
                print_footprint(f"{workers}, divided", found, plain)
            if len(digests) != 1 or not digests.pop():
                raise FailedError(f"{row.model}: the digests differ")
    except FailedError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("backend", nargs="?", default="jax", help="jax, tensorflow or torch")
    parser.add_argument("--row", choices=ROWS, help="all by default")
    given = parser.parse_args()
    main(given.backend, (given.row,) if given.row else tuple(ROWS))
