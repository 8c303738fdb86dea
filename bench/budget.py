"""The budget of a step: what each part of it takes, with two workers of Lockstep.

    budget.py [jax | tensorflow | torch] [MODEL] [--turns N] [--workers N] [--replicas N]

The parts add up to the step of the program in which each of them is waited for. Beside it, the step of the
same workers as they are, and that of plain Keras in as many processes without an exchange: what is between
them is what remains to be won. Pinned, one thread a worker.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from budget_parts import PARTS
from cnn import HERE, environment
from models import MODELS
from rows import print_row
from turns import FailedError, Program, take_turns

TURNS = 15
WATCHED, AS_IS, PLAIN = "lockstep, watched", "lockstep", "keras, no exchange"


def through_lockstep(
    name: str, script: list[str], workers: int, replicas: int, backend: str, folder: Path
) -> Program:
    options = ["--threads-per-worker", "1", "-n", str(workers), "--replicas", str(replicas)]
    command = [sys.executable, "-m", "lockstep", "run", *options, "--run-dir", str(folder), *script]
    return Program(name, [command], workers, replicas, environment(backend, 1))


def measure(backend: str, name: str, workers: int, replicas: int, turns: int) -> None:
    model = MODELS[name]
    length = [str(turns), str(model.steps)]
    trains = str(HERE / "training_keras.py")
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as path:
        folder = Path(path)
        sizes = (workers, replicas, backend)
        watched = [str(HERE / "budget_keras.py"), WATCHED, name, *length]
        as_is = [trains, AS_IS, name, "lockstep", "-1", *length]
        plain = [
            [sys.executable, trains, PLAIN, name, "plain", str(process), *length]
            for process in range(workers)
        ]
        programs = [
            through_lockstep(WATCHED, watched, *sizes, folder / "watched"),
            through_lockstep(AS_IS, as_is, *sizes, folder / "as-is"),
            Program(PLAIN, plain, workers, workers, environment(backend, 1)),
        ]
        take_turns(folder, programs, turns)
    print(
        f"the budget of a step: {model.title} on {backend}, {workers} workers, {replicas} replicas of "
        f"{model.batch} examples, {turns} turns of {model.steps} steps"
    )
    report(programs, model.steps)


def report(programs: list[Program], steps: int) -> None:
    watched, *others = programs
    for part in PARTS:
        each = [
            statistics.fmean(answer["parts"].get(part, 0.0) for answer in turn) for turn in watched.answers
        ]
        print_row(part, each, "ms")
    whole = [statistics.fmean(sum(answer["parts"].values()) for answer in turn) for turn in watched.answers]
    print_row("together: a step, each part waited for", whole, "ms")
    for program in others:
        slowest = [max(answer["seconds"] for answer in turn) / steps for turn in program.answers]
        print_row(f"a step of {program.name}", slowest, "ms")


def main(backend: str, model: str, workers: int, replicas: int, turns: int) -> None:
    try:
        measure(backend, model, workers, replicas, turns)
    except FailedError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("backend", nargs="?", default="jax", choices=("jax", "tensorflow", "torch"))
    parser.add_argument("model", nargs="?", default="cnn", choices=MODELS)
    parser.add_argument("--turns", type=int, default=TURNS, help="at least 2")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=2)
    options = parser.parse_args()
    main(options.backend, options.model, options.workers, options.replicas, options.turns)
