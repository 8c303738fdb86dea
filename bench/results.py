"""The results of programs that have trained a model: whether they computed the same, and how fast."""

import statistics
from dataclasses import dataclass

from models import MODELS
from programs import (
    BOTH_CORES,
    DATA_PARALLEL,
    EXCHANGING,
    LOCKSTEP,
    MODEL_PARALLEL,
    ONE_WORKER,
    PLAIN,
    REUSED,
    SEAM,
    TF_BOTH_CORES,
    Work,
)
from report import print_row
from turns import FailedError, Program

DRIFT = 0.2
"""The loss of a peer may differ from Lockstep's by the fraction `near` of it, because of rounding, and by the
fraction `DRIFT` of the progress since the first turn, because small differences grow."""


@dataclass(frozen=True)
class Ratio:
    """A row of the report: the speed of a program relative to another."""

    label: str
    program: str
    other: str
    to_reach: str = ""


class Results:
    """The results of the programs of a backend."""

    def __init__(self, backend: str, programs: list[Program], work: Work) -> None:
        self.programs = programs
        self._backend = backend
        self._work = work
        self._model = MODELS[work.model]

    def rates(self, program: Program) -> list[float]:
        """Return the examples per second in each turn; the slower process counts."""
        examples = self._work.steps * self._work.batch * program.replicas
        return [examples / max(answer["seconds"] for answer in turn) for turn in program.answers]

    def processor_times(self, program: Program) -> list[float]:
        """Return the seconds of processor time of all processes in each turn."""
        return [sum(answer["processor"] for answer in turn) for turn in program.answers]

    def variants(self, name: str) -> list[Program]:
        return [program for program in self.programs if program.name in (name, name + REUSED)]

    def best(self, name: str) -> Program:
        return max(self.variants(name), key=lambda program: statistics.median(self.rates(program)))

    def without_slower_variants(self) -> list[Program]:
        """Return the programs without the slower variants of those that run in two variants."""
        return [
            program for program in self.programs if program is self.best(program.name.removesuffix(REUSED))
        ]

    def states_of(self, name: str) -> list[list[tuple[str, str]]]:
        (program,) = self.variants(name)
        return all_states(program)

    def check(self) -> None:
        """Check that the programs computed the same: otherwise the figures mean nothing."""
        for program in [program for name in EXCHANGING for program in self.variants(name)]:
            same = all(len(set(states(turn))) == 1 for turn in program.answers)
            require(same, f"{program.name}: the weights or losses of the processes differ")
        for program in self.variants(ONE_WORKER):
            two = [turn[:1] for turn in self.states_of(LOCKSTEP)]
            require(two == all_states(program), "the results of two workers and of one differ")
        for program in self.variants(PLAIN):
            require(
                self.states_of(SEAM) == all_states(program),
                f"the results of one replica and of {program.name} differ",
            )
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
        variant = REUSED if other.name.endswith(REUSED) else ""
        print_row(ratio.label + variant, [a / b for a, b in pairs], "times", ratio.to_reach)

    def _comparable(self) -> list[str]:
        """Return the names of the programs that compute the same mathematics as Lockstep."""
        at_once = (
            {BOTH_CORES, TF_BOTH_CORES, DATA_PARALLEL, MODEL_PARALLEL}
            if self._model.batch_statistics
            else set()
        )
        squared = {BOTH_CORES} if self._model.sparse and self._backend == "tensorflow" else set()
        return [name for name in (*EXCHANGING, BOTH_CORES, TF_BOTH_CORES) if name not in at_once | squared]

    def _check_near(self, program: Program) -> None:
        """Check that the losses are near Lockstep's, in the turns in which rounding is small."""
        (lockstep,) = self.variants(LOCKSTEP)
        compared = self._model.compared
        ours = losses(lockstep)[:compared]
        for turn, (our, their) in enumerate(zip(ours, losses(program)[:compared], strict=True)):
            near = abs(their - our) <= self._model.near * our + DRIFT * abs(our - ours[0])
            require(
                near, f"{program.name} computes something else: in turn {turn} its loss is {their}, not {our}"
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
