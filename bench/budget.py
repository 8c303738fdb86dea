"""The budget of a step: the time of each part, with two workers of Lockstep.

    budget.py [jax | tensorflow | torch] [MODEL] [--turns N] [--workers N] [--replicas N]

Each part finishes before the next one starts, so the parts add up to a step. Other rows show a step of the
same workers without this division, and a step of plain Keras in as many processes that exchange nothing: the
difference is the possible gain. Workers are pinned and have one thread each.
"""

import argparse
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from budget_ledger import PARTS
from models import MODELS
from programs import CEILING, HERE, LOCKSTEP, Work, peer_programs, plain_keras, run_lockstep, train_lockstep
from report import print_regime, print_row
from turns import FailedError, Program, take_turns

TURNS = 12
DIVIDED = "lockstep, divided"


def measure(backend: str, work: Work, workers: int, replicas: int) -> None:
    script = [str(HERE / "budget_keras.py"), DIVIDED, work.model, *work.arguments]
    (ceiling,) = [way for way in plain_keras(backend) if way.name == CEILING]
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as name:
        folder = Path(name)
        programs = [
            run_lockstep(DIVIDED, script, workers, replicas, backend, folder / "divided"),
            train_lockstep(LOCKSTEP, workers, replicas, backend, work, folder / "as-is"),
            # For PyTorch, the variant that reuses memory.
            peer_programs(replace(ceiling, processes=workers), work)[-1],
        ]
        regime = take_turns(folder, programs, work.turns)
    print(
        f"budget of a step: {MODELS[work.model].title} on {backend}, {workers} workers, {replicas} "
        f"replicas of {work.batch} examples, {work.turns} turns of {work.steps} steps"
    )
    print_regime(regime)
    report(programs, work.steps)


def report(programs: list[Program], steps: int) -> None:
    divided, *others = programs
    for part in PARTS:
        each = [
            statistics.fmean(answer["parts"].get(part, 0.0) for answer in turn) for turn in divided.answers
        ]
        print_row(part, each, "ms")
    whole = [statistics.fmean(sum(answer["parts"].values()) for answer in turn) for turn in divided.answers]
    print_row("sum of the parts", whole, "ms")
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
