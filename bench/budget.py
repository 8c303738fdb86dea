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
from dataclasses import replace
from pathlib import Path

from budget_parts import PARTS
from models import MODELS
from rows import print_row
from turns import FailedError, Program, print_regime, take_turns
from ways import CEILING, HERE, LOCKSTEP, Work, directly, plain_keras, run_lockstep, through_lockstep

TURNS = 12
WATCHED = "lockstep, watched"


def measure(backend: str, work: Work, workers: int, replicas: int) -> None:
    script = [str(HERE / "budget_keras.py"), WATCHED, work.model, *work.words]
    (ceiling,) = [way for way in plain_keras(backend) if way.name == CEILING]
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as name:
        folder = Path(name)
        programs = [
            run_lockstep(WATCHED, script, workers, replicas, backend, folder / "watched"),
            through_lockstep(LOCKSTEP, workers, replicas, backend, work, folder / "as-is"),
            # Of PyTorch's variants, the one with the memory kept.
            directly(replace(ceiling, processes=workers), work)[-1],
        ]
        regime = take_turns(folder, programs, work.turns)
    print(
        f"the budget of a step: {MODELS[work.model].title} on {backend}, {workers} workers, {replicas} "
        f"replicas of {work.batch} examples, {work.turns} turns of {work.steps} steps"
    )
    print_regime(regime)
    report(programs, work.steps)


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
        measure(backend, Work.of(model, turns), workers, replicas)
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
