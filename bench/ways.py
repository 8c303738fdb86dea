"""The programs that train a model: through Lockstep, and in the other ways that there are."""

import sys
from dataclasses import dataclass
from pathlib import Path

from lockstep.system.environment import _MALLOC
from models import MODELS
from turns import Program

HERE = Path(__file__).parent
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
TF_BOTH_CORES = "keras on tensorflow, both cores"
KEPT = ", memory kept"

EXCHANGING = (LOCKSTEP, DATA_PARALLEL, MWMS, KERAS_DDP, KERAS_DDP_FUSED, DDP)
"""Programs of two processes that must hold the same weights."""


@dataclass(frozen=True)
class Work:
    """What the programs of a measurement do in each turn.

    Attributes:
        model: its name in `MODELS`.
        batch: examples a replica.
        turns: how many.
        steps: of a turn.
    """

    model: str
    batch: int
    turns: int
    steps: int

    @classmethod
    def of(cls, model: str, turns: int, steps: int | None = None) -> "Work":
        """Return the work for a model with a batch of its own, and its steps where none are given."""
        return cls(model, MODELS[model].batch, turns, steps or MODELS[model].steps)

    @property
    def words(self) -> list[str]:
        return [str(self.batch), str(self.turns), str(self.steps)]


@dataclass(frozen=True)
class Way:
    """How a program works that Lockstep has no part in.

    Its processes are started one by one: `script NAME MODEL WORDS PROCESS BATCH TURNS STEPS`.
    """

    name: str
    script: str
    words: tuple[str, ...]
    backend: str
    processes: int = 2
    cores: int = 1


PEERS = {
    "jax": [
        Way(DATA_PARALLEL, "training_data_parallel.py", (), "jax"),
        Way(MWMS, "training_mwms.py", (), "tensorflow"),
    ],
    "tensorflow": [Way(MWMS, "training_mwms.py", (), "tensorflow")],
    "torch": [
        Way(KERAS_DDP, "training_ddp.py", ("keras", "adam", "1"), "torch"),
        Way(KERAS_DDP_FUSED, "training_ddp.py", ("keras", "fused", "1"), "torch"),
    ],
}


def plain_keras(backend: str) -> list[Way]:
    return [
        Way(PLAIN, "training_keras.py", ("plain",), backend, processes=1),
        Way(BOTH_CORES, "training_keras.py", ("both-cores",), backend, processes=1, cores=2),
        Way(CEILING, "training_keras.py", ("plain",), backend),
    ]


def beyond(backend: str) -> list[Way]:
    """Return the ways past Keras and the backend: PyTorch's, and the fastest single process."""
    others = [
        Way(DDP, "training_ddp.py", ("torch", "adam", "1"), "torch"),
        Way(DDP_CEILING, "training_ddp.py", ("torch", "adam", "0"), "torch"),
    ]
    if backend != "tensorflow":
        fast = ("both-cores",)
        others.append(Way(TF_BOTH_CORES, "training_keras.py", fast, "tensorflow", processes=1, cores=2))
    return others


def environment(backend: str, threads: int) -> dict[str, str]:
    names = ("NPROC", "OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3"}
    return {"KERAS_BACKEND": backend} | quiet | dict.fromkeys(names, str(threads))


def run_lockstep(
    name: str, script: list[str], workers: int, replicas: int, backend: str, folder: Path
) -> Program:
    """Return the program of a script that `lockstep run` starts."""
    options = ["--threads-per-worker", "1", "-n", str(workers), "--replicas", str(replicas)]
    command = [sys.executable, "-m", "lockstep", "run", *options, "--run-dir", str(folder), *script]
    return Program(name, [command], workers, replicas, environment(backend, 1))


def through_lockstep(
    name: str, workers: int, replicas: int, backend: str, work: Work, folder: Path
) -> Program:
    """Return the program that trains through Lockstep."""
    script = [str(HERE / "training_keras.py"), name, work.model, "lockstep", "-1", *work.words]
    return run_lockstep(name, script, workers, replicas, backend, folder)


def directly(way: Way, work: Work) -> list[Program]:
    """Return the program; one of PyTorch also with what Lockstep tells glibc for PyTorch, as it may help."""
    programs = [assembled(way, way.name, work, {})]
    if way.backend == "torch":
        programs.append(assembled(way, way.name + KEPT, work, _MALLOC))
    return programs


def assembled(way: Way, name: str, work: Work, variables: dict[str, str]) -> Program:
    script = [sys.executable, str(HERE / way.script), name, work.model, *way.words]
    commands = [[*script, str(process), *work.words] for process in range(way.processes)]
    replicas = way.processes * way.cores
    return Program(name, commands, way.processes, replicas, environment(way.backend, way.cores) | variables)
