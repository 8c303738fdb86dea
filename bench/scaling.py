"""How the cost of a step grows with workers, parameters and batch: dense models on JAX, on two cores.

    scaling.py [--turns N]

The report shows each measured point and the prediction of a model that is fitted to all points.
"""

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from models.dense import MILLIONS
from programs import Work, train_lockstep
from report import Spread, print_regime
from results import require, states
from turns import FailedError, Program, take_turns

CORES = 2
TURNS = 5
STEPS = 10


@dataclass(frozen=True)
class Point:
    """A training whose steps are measured; `batch` is the number of examples per replica."""

    workers: int
    replicas: int
    millions: float
    batch: int

    def __str__(self) -> str:
        return f"{self.workers} workers, {self.replicas} replicas of {self.batch}, {self.millions:g} M"

    @property
    def factors(self) -> tuple[float, ...]:
        """The factors of the model's costs on one core; see `COSTS`."""
        busy = min(self.workers, CORES)
        workers, replicas = self.workers / busy, self.replicas / busy
        size = self.millions
        return workers, workers * size, replicas, replicas * size, replicas * size * self.batch


COSTS = (
    "a worker",
    "a worker and a million parameters (the update, the sum)",
    "a replica",
    "a replica and a million parameters (its gradients)",
    "a replica, a million parameters and an example (forward and backward)",
)
SHARED = [Point(workers, 8, 3, 16) for workers in (1, 2, 4, 8)]
"""The same computation with different numbers of workers."""
POINTS = (
    [Point(2, 2, millions, 64) for millions in MILLIONS]
    + [Point(2, 2, 3, batch) for batch in (16, 256)]
    + SHARED
)


def program(point: Point, turns: int, folder: Path) -> Program:
    work = Work(f"dense-{point.millions:g}", point.batch, turns, STEPS)
    name = str(point)
    return train_lockstep(name, point.workers, point.replicas, "jax", work, folder / name)


def fitted(measured: list[float]) -> np.ndarray:
    """Return the costs, at least zero, with the least relative errors of the measured milliseconds."""
    factors = np.array([point.factors for point in POINTS]) / np.array(measured)[:, None]
    return nnls(factors, np.ones(len(POINTS)))[0]


def measure(turns: int) -> None:
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as name:
        programs = [program(point, turns, Path(name)) for point in POINTS]
        regime = take_turns(Path(name), programs, turns)
    shared = [program.answers for program in programs if program.name in map(str, SHARED)]
    for turn in zip(*shared, strict=True):
        require(len({state for answers in turn for state in states(answers)}) == 1, "workers differ")
    spreads = [
        Spread.of([1e3 * max(answer["seconds"] for answer in turn) / STEPS for turn in program.answers])
        for program in programs
    ]
    costs = fitted([spread.median for spread in spreads])
    print(
        f"dense models on jax, {CORES} cores, {turns} turns of {STEPS} steps: a step in ms (p10-p90), "
        "and fitted"
    )
    print_regime(regime)
    for point, spread in zip(POINTS, spreads, strict=True):
        print(f"  {point!s:61} {spread}   {np.dot(point.factors, costs):.2f}")
    for cost, value in zip(COSTS, costs, strict=True):
        print(f"  {cost:70} {value:.3f} ms")


def main(turns: int = TURNS) -> None:
    try:
        measure(turns)
    except FailedError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=TURNS, help="at least 2")
    main(parser.parse_args().turns)
