"""The programs that have trained a model, after their turns: whether they did the same, and how fast."""

import statistics
from dataclasses import dataclass

from models import MODELS
from rows import print_row
from turns import FailedError, Program
from ways import (
    BOTH_CORES,
    DATA_PARALLEL,
    EXCHANGING,
    KEPT,
    LOCKSTEP,
    ONE_WORKER,
    PLAIN,
    SEAM,
    TF_BOTH_CORES,
    Work,
)

DRIFT = 0.2
"""A peer's loss may differ from Lockstep's by the model's part `near` of it, which is rounding, and by the
part `DRIFT` of what was learned since the first turn: small differences grow."""


@dataclass(frozen=True)
class Ratio:
    """A row of the report: how many times as fast as another a program is."""

    label: str
    program: str
    other: str
    to_reach: str = ""


class Measured:
    """The programs of a backend, after their turns."""

    def __init__(self, backend: str, programs: list[Program], work: Work) -> None:
        self.programs = programs
        self._backend = backend
        self._work = work
        self._model = MODELS[work.model]

    def rates(self, program: Program) -> list[float]:
        """Examples a second of each turn; two processes are as fast as the slower one."""
        examples = self._work.steps * self._work.batch * program.replicas
        return [examples / max(answer["seconds"] for answer in turn) for turn in program.answers]

    def variants(self, name: str) -> list[Program]:
        return [program for program in self.programs if program.name in (name, name + KEPT)]

    def best(self, name: str) -> Program:
        return max(self.variants(name), key=lambda program: statistics.median(self.rates(program)))

    def without_slower_variants(self) -> list[Program]:
        """Return the programs, and of those that run twice the faster one."""
        return [program for program in self.programs if program is self.best(program.name.removesuffix(KEPT))]

    def results(self, name: str) -> list[list[tuple[str, str]]]:
        (program,) = self.variants(name)
        return all_states(program)

    def check(self) -> None:
        """Every figure is worth nothing if the programs did not compute the same thing."""
        for program in [program for name in EXCHANGING for program in self.variants(name)]:
            same = all(len(set(states(turn))) == 1 for turn in program.answers)
            require(same, f"{program.name}: the processes have different weights or losses")
        for program in self.variants(ONE_WORKER):
            two = [turn[:1] for turn in self.results(LOCKSTEP)]
            require(two == all_states(program), "two workers and one differ")
        for program in self.variants(PLAIN):
            require(self.results(SEAM) == all_states(program), f"one replica and {program.name} differ")
        for name in self._comparable():
            for program in self.variants(name):
                self._check_near(program)

    def report(self) -> None:
        for program in self.programs:
            print_row(program.name, self.rates(program), "examples/s")

    def report_ratio(self, ratio: Ratio) -> None:
        if not (self.variants(ratio.program) and self.variants(ratio.other)):
            return
        ours, other = self.best(ratio.program), self.best(ratio.other)
        pairs = zip(self.rates(ours), self.rates(other), strict=True)
        kept = KEPT if other.name.endswith(KEPT) else ""
        print_row(ratio.label + kept, [a / b for a, b in pairs], "times", ratio.to_reach)

    def _comparable(self) -> list[str]:
        """Return the names of the programs that compute the same mathematics as Lockstep."""
        at_once = {BOTH_CORES, TF_BOTH_CORES, DATA_PARALLEL} if self._model.batch_statistics else set()
        squared = {BOTH_CORES} if self._model.sparse and self._backend == "tensorflow" else set()
        return [name for name in (*EXCHANGING, BOTH_CORES, TF_BOTH_CORES) if name not in at_once | squared]

    def _check_near(self, program: Program) -> None:
        """Who computes the same mathematics follows the same curve, until rounding has grown too large."""
        (lockstep,) = self.variants(LOCKSTEP)
        compared = self._model.compared
        ours = losses(lockstep)[:compared]
        for turn, (our, their) in enumerate(zip(ours, losses(program)[:compared], strict=True)):
            near = abs(their - our) <= self._model.near * our + DRIFT * abs(our - ours[0])
            require(
                near, f"{program.name} trains something else: in turn {turn} its loss is {their}, not {our}"
            )


def states(turn: list[dict[str, str]]) -> list[tuple[str, str]]:
    return [(answer["loss"], answer["weights"]) for answer in turn]


def all_states(program: Program) -> list[list[tuple[str, str]]]:
    return [states(turn) for turn in program.answers]


def losses(program: Program) -> list[float]:
    return [float.fromhex(turn[0]["loss"]) for turn in program.answers]


def require(holds: bool, message: str) -> None:
    if not holds:
        raise FailedError(message)
