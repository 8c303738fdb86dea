"""The cost of several replicas per worker, workers that share cores, and custom loops: the tutorial's CNN.

    placement.py [--turns N]

On JAX, with two cores: four replicas on two workers against two replicas with the same global batch; eight
workers that share the cores against two workers, both with eight replicas. On TensorFlow: a custom loop, with
`strategy.run` in a `tf.function`, against `fit`.
"""

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from models import MODELS
from programs import HERE, Work, run_lockstep, train_lockstep
from report import print_regime, print_row
from results import Results, losses, require, states
from turns import FailedError, Program, take_turns

TURNS = 10
NEAR = 1e-3
"""The relative difference of losses that another order of additions may cause."""
WORK = Work.of("cnn", TURNS)


def pair(
    programs: list[Program], folder: Path, label: str, works: tuple[Work, Work], to_reach: str, *, equal: bool
) -> None:
    """Print the speed of the first program relative to the second; if `equal`, their bits must be equal."""
    ours, other = programs
    regime = take_turns(folder, programs, works[0].turns)
    for turn, (our, their) in enumerate(zip(losses(ours), losses(other), strict=True)):
        same = {state for program in programs for state in states(program.answers[turn])}
        require(len(same) == 1 or not equal, f"{ours.name} and {other.name} differ in turn {turn}")
        require(abs(our - their) <= NEAR * their or turn > 0, f"{ours.name} computes something else")
    print(label)
    print_regime(regime)
    rates = [
        Results("", programs, work).rates(program) for program, work in zip(programs, works, strict=True)
    ]
    for program, each in zip(programs, rates, strict=True):
        print_row(program.name, each, "examples/s")
    print_row(f"{ours.name} / {other.name}", [a / b for a, b in zip(*rates, strict=True)], "times", to_reach)


def more_replicas(folder: Path, turns: int) -> None:
    whole = replace(WORK, turns=turns)
    half = replace(whole, batch=whole.batch // 2)
    programs = [
        train_lockstep("four replicas", 2, 4, "jax", half, folder / "four"),
        train_lockstep("two replicas", 2, 2, "jax", whole, folder / "two"),
    ]
    title = f"{MODELS['cnn'].title} on jax, 2 workers, a global batch of {2 * whole.batch}"
    pair(programs, folder, title, (half, whole), "0.95", equal=False)


def more_workers(folder: Path, turns: int) -> None:
    work = replace(WORK, turns=turns, steps=WORK.steps // 2)
    programs = [
        train_lockstep("eight workers", 8, 8, "jax", work, folder / "eight"),
        train_lockstep("two workers", 2, 8, "jax", work, folder / "two"),
    ]
    title = f"{MODELS['cnn'].title} on jax, 2 cores, 8 replicas of {work.batch}"
    pair(programs, folder, title, (work, work), "0.85", equal=True)


def own_loop(folder: Path, turns: int) -> None:
    work = replace(WORK, turns=turns)
    name = "a custom loop"
    script = [str(HERE / "training_loop.py"), name, work.model, *work.arguments]
    programs = [
        run_lockstep(name, script, 2, 2, "tensorflow", folder / "loop"),
        train_lockstep("fit", 2, 2, "tensorflow", work, folder / "fit"),
    ]
    title = f"{MODELS['cnn'].title} on tensorflow, 2 workers, 2 replicas of {work.batch}"
    pair(programs, folder, title, (work, work), "", equal=False)


def main(turns: int = TURNS) -> None:
    for compare in (more_replicas, more_workers, own_loop):
        try:
            with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as name:
                compare(Path(name), turns)
        except FailedError as error:
            sys.exit(str(error))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=TURNS, help="turns per pair; at least 2")
    main(parser.parse_args().turns)
