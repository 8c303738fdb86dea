"""The programs that train a model: Lockstep, and those with which it is compared."""

import os
import sys
from collections.abc import Sequence
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
MODEL_PARALLEL = "keras ModelParallel"
MWMS = "tf_keras, MWMS"
KERAS_DDP = "ddp of keras"
KERAS_DDP_FUSED = "ddp of keras, fused Adam"
DDP = "ddp"
DDP_CEILING = "torch, no exchange"
TF_BOTH_CORES = "keras on tensorflow, both cores"
REUSED = ", memory reused"

EXCHANGING = (LOCKSTEP, DATA_PARALLEL, MODEL_PARALLEL, MWMS, KERAS_DDP, KERAS_DDP_FUSED, DDP)
"""Programs of two processes that must have equal weights."""


@dataclass(frozen=True)
class Work:
    """The work of the programs of a measurement.

    Attributes:
        model: its name in `MODELS`.
        batch: examples per replica.
        turns: the number of turns.
        steps: the number of steps per turn.
    """

    model: str
    batch: int
    turns: int
    steps: int

    @classmethod
    def of(cls, model: str, turns: int, steps: int | None = None) -> "Work":
        """Return the work for a model with its batch size, and by default its number of steps."""
        return cls(model, MODELS[model].batch, turns, steps or MODELS[model].steps)

    @property
    def arguments(self) -> list[str]:
        return [str(self.batch), str(self.turns), str(self.steps)]


@dataclass(frozen=True)
class PeerProgram:
    """A program without Lockstep.

    Each process is started separately: `script NAME MODEL ARGUMENTS PROCESS BATCH TURNS STEPS`. The packages
    in the folder `packages`, if any, precede the installed ones.
    """

    name: str
    script: str
    arguments: tuple[str, ...]
    backend: str
    processes: int = 2
    cores: int = 1
    packages: str = ""


PEERS = {
    "jax": [
        PeerProgram(DATA_PARALLEL, "training_data_parallel.py", ("data",), "jax"),
        PeerProgram(MODEL_PARALLEL, "training_data_parallel.py", ("model",), "jax"),
        PeerProgram(MWMS, "training_mwms.py", (), "tensorflow"),
    ],
    "tensorflow": [PeerProgram(MWMS, "training_mwms.py", (), "tensorflow")],
    "torch": [
        PeerProgram(KERAS_DDP, "training_ddp.py", ("keras", "adam", "2"), "torch"),
        PeerProgram(KERAS_DDP_FUSED, "training_ddp.py", ("keras", "fused", "2"), "torch"),
    ],
}


def plain_keras(backend: str) -> list[PeerProgram]:
    return [
        PeerProgram(PLAIN, "training_keras.py", ("plain",), backend, processes=1),
        PeerProgram(BOTH_CORES, "training_keras.py", ("both-cores",), backend, processes=1, cores=2),
        PeerProgram(CEILING, "training_keras.py", ("plain",), backend),
    ]


def nightly_keras(folder: str) -> list[PeerProgram]:
    """Return the strategy of Keras on PyTorch, with a Keras that has one, in `folder`."""
    return [PeerProgram(DATA_PARALLEL, "training_torch_parallel.py", (), "torch", packages=folder)]


def beyond_keras(backend: str) -> list[PeerProgram]:
    """Return programs with neither Keras nor the backend: PyTorch's, and the fastest single process."""
    others = [
        PeerProgram(DDP, "training_ddp.py", ("torch", "adam", "2"), "torch"),
        PeerProgram(DDP_CEILING, "training_ddp.py", ("torch", "adam", "0"), "torch"),
    ]
    if backend != "tensorflow":
        fast = ("both-cores",)
        others.append(
            PeerProgram(TF_BOTH_CORES, "training_keras.py", fast, "tensorflow", processes=1, cores=2)
        )
    return others


def environment(backend: str, threads: int) -> dict[str, str]:
    names = ("NPROC", "OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
    # The comparison beside each run would take time from some turns.
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "LOCKSTEP_WITNESS": "off"}
    return {"KERAS_BACKEND": backend} | quiet | dict.fromkeys(names, str(threads))


def run_lockstep(
    name: str,
    script: list[str],
    workers: int,
    replicas: int,
    backend: str,
    folder: Path,
    more: Sequence[str] = (),
) -> Program:
    """Return the program that runs a script with `lockstep run`, perhaps with more options."""
    options = ["--threads-per-worker", "1", "-n", str(workers), "--replicas", str(replicas), *more]
    command = [sys.executable, "-m", "lockstep", "run", *options, "--run-dir", str(folder), *script]
    return Program(name, [command], workers, replicas, environment(backend, 1))


def train_lockstep(
    name: str,
    workers: int,
    replicas: int,
    backend: str,
    work: Work,
    folder: Path,
    more: Sequence[str] = (),
) -> Program:
    """Return the program that trains a model with Lockstep, perhaps with more options."""
    return run_lockstep(name, training_script(name, work), workers, replicas, backend, folder, more)


def training_script(name: str, work: Work) -> list[str]:
    """Return the script that trains a model in a worker, and its arguments."""
    return [str(HERE / "training_keras.py"), name, work.model, "lockstep", "-1", *work.arguments]


def peer_programs(peer: PeerProgram, work: Work) -> list[Program]:
    """Return the program; for PyTorch, also a variant with the settings of glibc that Lockstep uses."""
    programs = [peer_program(peer, peer.name, work, {})]
    if peer.backend == "torch":
        programs.append(peer_program(peer, peer.name + REUSED, work, _MALLOC))
    return programs


def peer_program(peer: PeerProgram, name: str, work: Work, variables: dict[str, str]) -> Program:
    script = [sys.executable, str(HERE / peer.script), name, work.model, *peer.arguments]
    commands = [[*script, str(process), *work.arguments] for process in range(peer.processes)]
    replicas = peer.processes * peer.cores
    variables = environment(peer.backend, peer.cores) | variables
    if peer.packages:
        paths = [peer.packages, os.environ.get("PYTHONPATH", "")]
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return Program(name, commands, peer.processes, replicas, variables)
