"""The tutorial's CNN with two workers: Lockstep on a backend against the backend's own ways.

    cnn.py [jax | tensorflow | torch] [--turns N] [--steps N]

The peers are what the backend itself offers for two processes, and PyTorch's DistributedDataParallel for all.
Beside them: the same computation without an exchange, each program's own ceiling; one process on the cores of
two workers; one worker through Lockstep against plain Keras. All pinned, one thread a core, 64 images a
replica.
"""

import argparse
import importlib.util
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cnn_model import BATCH
from lockstep.config import _MALLOC
from turns import FailedError, Program, Spread, take_turns

HERE = Path(__file__).parent
STEPS = 40
TURNS = 15
NEAR = 1e-4
COMPARED = 8
"""Turns in which losses are compared: training multiplies differences of rounding."""
DRIFT = 0.2
"""A peer's loss may differ from Lockstep's by the part `NEAR` of it, which is rounding, and by the part
`DRIFT` of what was learned since the first turn: small differences grow."""

LOCKSTEP = "lockstep"
ONE_WORKER = "lockstep, one worker"
SEAM = "lockstep, one replica"
PLAIN = "keras"
BOTH_CORES = "keras, both cores"
CEILING = "keras, no exchange"
DATA_PARALLEL = "keras DataParallel"
MWMS = "tf_keras, MWMS"
KERAS_DDP = "ddp of keras"
KERAS_DDP_FUSED = "ddp of keras, fused Adam"
DDP = "ddp"
DDP_CEILING = "torch, no exchange"
KEPT = ", memory kept"

EXCHANGING = (LOCKSTEP, DATA_PARALLEL, MWMS, KERAS_DDP, KERAS_DDP_FUSED, DDP)
"""Programs of two processes that must hold the same weights."""


@dataclass(frozen=True)
class Ratio:
    """A row of the report: how many times as fast as another a program is."""

    label: str
    program: str
    other: str
    to_reach: str = ""


RATIOS = [
    Ratio("two workers against ddp", LOCKSTEP, DDP, "1.5"),
    Ratio("two workers against one process, both cores", LOCKSTEP, BOTH_CORES, "1.00"),
    Ratio("two workers against own ceiling", LOCKSTEP, CEILING, "0.80"),
    Ratio("ddp against own ceiling", DDP, DDP_CEILING),
    Ratio("one worker, two replicas, against keras", ONE_WORKER, PLAIN),
    Ratio("one replica against keras", SEAM, PLAIN, "0.95"),
]
PEER_RATIOS = {
    "jax": [
        Ratio("two workers against keras DataParallel", LOCKSTEP, DATA_PARALLEL, "2.2"),
        Ratio("two workers against tf_keras, MWMS", LOCKSTEP, MWMS, "3.3"),
    ],
    "tensorflow": [Ratio("two workers against tf_keras, MWMS", LOCKSTEP, MWMS, "2.5")],
    "torch": [
        Ratio("two workers against ddp of keras", LOCKSTEP, KERAS_DDP, "1.1"),
        Ratio("two workers against ddp of keras, fused Adam", LOCKSTEP, KERAS_DDP_FUSED),
    ],
}


@dataclass(frozen=True)
class Way:
    """How a program works that Lockstep has no part in.

    Its processes are started one by one, and get their numbers after the `script`'s own words.
    """

    name: str
    script: tuple[str, ...]
    backend: str
    processes: int = 2
    cores: int = 1


PEERS = {
    "jax": [
        Way(DATA_PARALLEL, ("cnn_data_parallel.py",), "jax"),
        Way(MWMS, ("cnn_mwms.py",), "tensorflow"),
    ],
    "tensorflow": [Way(MWMS, ("cnn_mwms.py",), "tensorflow")],
    "torch": [
        Way(KERAS_DDP, ("cnn_ddp.py", "keras", "adam", "1"), "torch"),
        Way(KERAS_DDP_FUSED, ("cnn_ddp.py", "keras", "fused", "1"), "torch"),
    ],
}
PYTORCH = [
    Way(DDP, ("cnn_ddp.py", "torch", "adam", "1"), "torch"),
    Way(DDP_CEILING, ("cnn_ddp.py", "torch", "adam", "0"), "torch"),
]


def plain_keras(backend: str) -> list[Way]:
    return [
        Way(PLAIN, ("cnn_keras.py", "plain"), backend, processes=1),
        Way(BOTH_CORES, ("cnn_keras.py", "both-cores"), backend, processes=1, cores=2),
        Way(CEILING, ("cnn_keras.py", "plain"), backend),
    ]


@dataclass(frozen=True)
class Length:
    """How long a measurement is."""

    turns: int
    steps: int

    @property
    def words(self) -> list[str]:
        return [str(self.turns), str(self.steps)]


def environment(backend: str, threads: int) -> dict[str, str]:
    names = ("NPROC", "OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3"}
    return {"KERAS_BACKEND": backend} | quiet | dict.fromkeys(names, str(threads))


def through_lockstep(
    name: str, workers: int, replicas: int, backend: str, length: Length, folder: Path
) -> Program:
    options = ["--threads-per-worker", "1", "-n", str(workers), "--replicas", str(replicas)]
    script = [str(HERE / "cnn_keras.py"), name, "lockstep", "-1", *length.words]
    command = [sys.executable, "-m", "lockstep", "run", *options, "--run-dir", str(folder), *script]
    return Program(name, [command], workers, replicas, environment(backend, 1))


def directly(way: Way, length: Length) -> list[Program]:
    """Return the program; one of PyTorch also with what Lockstep tells glibc for PyTorch, as it may help."""
    programs = [assembled(way, way.name, length, {})]
    if way.backend == "torch":
        programs.append(assembled(way, way.name + KEPT, length, _MALLOC))
    return programs


def assembled(way: Way, name: str, length: Length, variables: dict[str, str]) -> Program:
    script = [sys.executable, str(HERE / way.script[0]), name, *way.script[1:]]
    commands = [[*script, str(process), *length.words] for process in range(way.processes)]
    replicas = way.processes * way.cores
    return Program(name, commands, way.processes, replicas, environment(way.backend, way.cores) | variables)


class Measured:
    """The programs of a backend, after their turns."""

    def __init__(self, programs: list[Program], length: Length) -> None:
        self.programs = programs
        self._images = length.steps * BATCH

    def rates(self, program: Program) -> list[float]:
        """Images a second of each turn; two processes are as fast as the slower one."""
        images = self._images * program.replicas
        return [images / max(answer["seconds"] for answer in turn) for turn in program.answers]

    def variants(self, name: str) -> list[Program]:
        return [program for program in self.programs if program.name in (name, name + KEPT)]

    def best(self, name: str) -> Program:
        return max(self.variants(name), key=lambda program: statistics.median(self.rates(program)))

    def results(self, name: str) -> list[list[tuple[str, str]]]:
        (program,) = self.variants(name)
        return [states(turn) for turn in program.answers]

    def check(self) -> None:
        """Every figure is worth nothing if the programs did not compute the same thing."""
        for program in [program for name in EXCHANGING for program in self.variants(name)]:
            same = all(len(set(states(turn))) == 1 for turn in program.answers)
            require(same, f"{program.name}: the processes have different weights or losses")
        two = [turn[:1] for turn in self.results(LOCKSTEP)]
        require(two == self.results(ONE_WORKER), "two workers and one differ")
        for program in self.variants(PLAIN):
            plain = [states(turn) for turn in program.answers]
            require(self.results(SEAM) == plain, f"one replica and {program.name} differ")
        self.check_near()

    def check_near(self) -> None:
        """Who computes the same mathematics follows the same curve, until rounding has grown too large."""
        (lockstep,) = self.variants(LOCKSTEP)
        ours = losses(lockstep)[:COMPARED]
        for program in [program for name in (*EXCHANGING, BOTH_CORES) for program in self.variants(name)]:
            for turn, (our, their) in enumerate(zip(ours, losses(program)[:COMPARED], strict=True)):
                near = abs(their - our) <= NEAR * our + DRIFT * abs(our - ours[0])
                message = (
                    f"{program.name} trains something else: in turn {turn} its loss is {their}, not {our}"
                )
                require(near, message)

    def report(self) -> None:
        for program in self.programs:
            spread = Spread.of(self.rates(program))
            print(
                f"  {program.name:40} {spread.median:8,.0f} images/s ({spread.low:,.0f}-{spread.high:,.0f})"
            )

    def report_ratio(self, ratio: Ratio) -> None:
        ours, other = self.best(ratio.program), self.best(ratio.other)
        pairs = zip(self.rates(ours), self.rates(other), strict=True)
        note = f"   to reach {ratio.to_reach}" if ratio.to_reach else ""
        kept = KEPT if other.name.endswith(KEPT) else ""
        print(f"  {ratio.label + kept:61} {Spread.of([a / b for a, b in pairs])}{note}")


def states(turn: list[dict[str, str]]) -> list[tuple[str, str]]:
    return [(answer["loss"], answer["weights"]) for answer in turn]


def losses(program: Program) -> list[float]:
    return [float.fromhex(turn[0]["loss"]) for turn in program.answers]


def require(holds: bool, message: str) -> None:
    if not holds:
        raise FailedError(message)


def measure(backend: str, length: Length) -> None:
    ways = plain_keras(backend) + PEERS[backend] + PYTORCH
    if MWMS in [way.name for way in ways] and importlib.util.find_spec("tf_keras") is None:
        # Not in the extra `bench`: it asks for `tensorflow`, whose files would replace tensorflow-cpu's.
        raise FailedError("needs Keras 2: pip install --no-deps tf_keras, of TensorFlow's minor version")
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        programs = [
            through_lockstep(name, workers, replicas, backend, length, Path(folder) / name)
            for name, workers, replicas in ((LOCKSTEP, 2, 2), (ONE_WORKER, 1, 2), (SEAM, 1, 1))
        ]
        programs += [program for way in ways for program in directly(way, length)]
        take_turns(Path(folder), programs, length.turns)
    measured = Measured(programs, length)
    measured.check()
    print(
        f"tutorial's CNN on {backend}, {BATCH} images a replica, {length.turns} turns of {length.steps} "
        "steps: median (p10-p90)"
    )
    measured.report()
    for ratio in PEER_RATIOS[backend] + RATIOS:
        measured.report_ratio(ratio)


def main(backend: str, turns: int = TURNS, steps: int = STEPS) -> None:
    try:
        measure(backend, Length(turns, steps))
    except FailedError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("backend", nargs="?", default="jax", choices=PEERS)
    parser.add_argument("--turns", type=int, default=TURNS, help="at least 2")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each turn")
    options = parser.parse_args()
    main(options.backend, options.turns, options.steps)
