"""The time from the command to the end of the first step: Lockstep, cold and warm, and torchrun.

    launching.py [BACKEND ...] [--launches N]

The tutorial's CNN with two processes of one thread each, not pinned. "Cold" is with an empty cache of
compiled code, "warm" is the same command again; only JAX compiles. Other rows show the same script in one
process of plain Keras. The files of all libraries have been read before. Each job takes a few steps and ends;
the jobs take turns, in alternating order. The weights of both workers, cold and warm, must be equal, bit for
bit.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from programs import environment
from report import print_row
from steps import watching
from turns import FailedError, ended

HERE = Path(__file__).parent
LAUNCHES = 4
END_SECONDS = 60.0
TORCHRUN = "torchrun, ddp"
ALONE = "plain keras, {}"
ROWS = {
    "jax": ("jax, cold", "jax, warm"),
    "tensorflow": ("tensorflow",),
    "torch": ("torch",),
}
"""The jobs of each backend, in order."""


def launch(
    command: list[str], variables: dict[str, str], folder: Path, processes: int = 2
) -> tuple[float, str]:
    """Start a job; return the seconds until all processes have taken a step, and their common result."""
    with watching(folder, variables) as watch:
        begun = time.monotonic()
        process = watch.start(command)
        watch.until(lambda: watch.have_taken(processes, 1), " ".join(command))
        first = {step.pid: step.time for step in reversed(watch.steps)}
        seconds = max(first.values()) - begun
        if ended(process, END_SECONDS):
            raise FailedError(f"{command}: ended with {process.returncode}")
    results = {file.read_text() for file in folder.glob("result-*")}
    if len(results) != 1:
        raise FailedError(f"{command}: the processes have {len(results)} different results")
    return seconds, results.pop()


def lockstep(backend: str, cache: Path) -> tuple[float, str]:
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as name:
        folder = Path(name)
        options = ["-n", "2", "--threads-per-worker", "1", "--run-dir", str(folder / "run")]
        command = [
            sys.executable,
            "-m",
            "lockstep",
            "run",
            *options,
            str(HERE / "launching_lockstep.py"),
            name,
        ]
        return launch(command, environment(backend, 1) | {"XDG_CACHE_HOME": str(cache)}, folder)


def alone(backend: str) -> float:
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as name:
        command = [sys.executable, str(HERE / "launching_lockstep.py"), name]
        return launch(command, environment(backend, 1), Path(name), processes=1)[0]


def torchrun() -> float:
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as name:
        options = ["--standalone", "--nproc-per-node", "2"]
        command = [sys.executable, "-m", "torch.distributed.run", *options]
        command += [str(HERE / "launching_ddp.py"), name]
        return launch(command, environment("torch", 1), Path(name))[0]


def round_of(backend: str, seconds: dict[str, list[float]]) -> None:
    """Launch a backend's jobs."""
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as name:
        results = []
        for row in ROWS[backend]:
            taken, result = lockstep(backend, Path(name))
            seconds[row].append(taken)
            results.append(result)
    seconds[ALONE.format(backend)].append(alone(backend))
    if len(set(results)) > 1:
        raise FailedError(f"{backend}: the results with cached code differ")


def measure(backends: list[str], count: int) -> None:
    names = [row for backend in backends for row in ROWS[backend]]
    others = [TORCHRUN, *map(ALONE.format, backends)]
    seconds: dict[str, list[float]] = {name: [] for name in (*names, *others)}
    for backend in backends:
        # This reads all files from the disk.
        with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as name:
            lockstep(backend, Path(name))
    torchrun()
    for number in range(count):
        for backend in (*backends, TORCHRUN) if number % 2 == 0 else (TORCHRUN, *reversed(backends)):
            if backend == TORCHRUN:
                seconds[TORCHRUN].append(torchrun())
            else:
                round_of(backend, seconds)
    print(
        f"from the command to the end of the first step, two processes, {count} times each: median (p10-p90)"
    )
    for name, values in seconds.items():
        print_row(name, values, "s")
    for name in names:
        pairs = zip(seconds[TORCHRUN], seconds[name], strict=True)
        print_row(f"torchrun / Lockstep on {name}", [other / own for other, own in pairs], "times", "1.5")
    for backend in backends:
        pairs = zip(seconds[ALONE.format(backend)], seconds[ROWS[backend][0]], strict=True)
        print_row(f"plain keras / Lockstep on {ROWS[backend][0]}", [a / b for a, b in pairs], "times")


def main(backends: list[str] | None = None, count: int = LAUNCHES) -> None:
    try:
        measure(backends or list(ROWS), count)
    except (FailedError, subprocess.SubprocessError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "backends", nargs="*", metavar="BACKEND", help="jax, tensorflow, torch; all by default"
    )
    parser.add_argument("--launches", type=int, default=LAUNCHES, help="launches of each job; at least 2")
    given = parser.parse_args()
    main(given.backends, given.launches)
