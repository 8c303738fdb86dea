"""The tutorial's CNN with two workers: Lockstep on a backend against PyTorch's DistributedDataParallel.

Each program also runs without an exchange (each process for itself): its own ceiling. And one worker
through Lockstep against plain Keras. All pinned, one thread a process, 64 images a process.
"""

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from cnn_model import BATCH
from turns import Program, Spread, take_turns

HERE = Path(__file__).parent
STEPS = 40
TURNS = 15

LOCKSTEP = Program("lockstep", 2)
ONE_WORKER = Program("lockstep, one worker", 1)
CEILING = Program("keras, no exchange", 2)
DDP = Program("ddp", 2)
DDP_CEILING = Program("torch, no exchange", 2)
SEAM = Program("lockstep, one replica", 1)
PLAIN = Program("keras", 1)
STARTED: list[subprocess.Popen[bytes]] = []
PROGRAMS = [LOCKSTEP, DDP, CEILING, DDP_CEILING, ONE_WORKER, SEAM, PLAIN]


def commands(program: Program) -> list[list[str]]:
    tail = [str(TURNS), str(STEPS)]
    keras = [str(HERE / "cnn_keras.py"), program.name]
    torch = [str(HERE / "cnn_ddp.py"), program.name]
    run = [sys.executable, "-m", "lockstep", "run", "--threads-per-worker", "1"]
    if program in (LOCKSTEP, ONE_WORKER, SEAM):
        replicas = 1 if program is SEAM else 2
        options = ["-n", str(program.processes), "--replicas", str(replicas)]
        folder = tempfile.mkdtemp(prefix="lockstep-bench-")
        return [[*run, *options, "--run-dir", folder, *keras, "0", "-1", *tail]]
    if program in (CEILING, PLAIN):
        return [[sys.executable, *keras, "1", str(i), *tail] for i in range(program.processes)]
    exchange = "1" if program is DDP else "0"
    return [[sys.executable, *torch, exchange, str(i), *tail] for i in range(program.processes)]


def start(program: Program, variables: dict[str, str], backend: str) -> None:
    fixed = {
        "NPROC": "1",
        "OMP_NUM_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "1",
    }
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": backend}
    for command in commands(program):
        STARTED.append(
            subprocess.Popen(command, env=os.environ | fixed | quiet | variables, stdin=subprocess.DEVNULL)
        )


def rates(program: Program) -> list[float]:
    """Images a second of each turn; two processes are as fast as the slower one."""
    replicas = 2 if program is ONE_WORKER else program.processes
    images = STEPS * BATCH * replicas
    return [images / max(answer["seconds"] for answer in turn) for turn in program.answers]


def ratios(program: Program, other: Program) -> Spread:
    return Spread.of([a / b for a, b in zip(rates(program), rates(other), strict=True)])


def results(program: Program) -> list[list[str]]:
    return [[answer["loss"] for answer in turn] for turn in program.answers]


def check() -> None:
    """Every figure below is worth nothing if the programs did not compute the same thing."""
    for program in (LOCKSTEP, DDP):
        assert all(len(set(turn)) == 1 for turn in results(program)), f"{program.name}: workers differ"
    assert [turn[:1] for turn in results(LOCKSTEP)] == results(ONE_WORKER), "two workers and one differ"
    assert results(SEAM) == results(PLAIN), "one replica and plain Keras differ"


def main(backend: str) -> None:
    for program in PROGRAMS:
        program.answers.clear()
    STARTED.clear()
    with tempfile.TemporaryDirectory() as folder:
        take_turns(Path(folder), PROGRAMS, partial(start, backend=backend), TURNS)
        statuses = [process.wait(60) for process in STARTED]
    if any(statuses):
        sys.exit(f"the programs ended with {statuses}")
    check()
    print(
        f"tutorial's CNN on {backend}, {BATCH} images a replica, {TURNS} turns of {STEPS} steps: "
        "median (p10-p90)"
    )
    for program in PROGRAMS:
        spread = Spread.of(rates(program))
        print(f"  {program.name:24} {spread.median:8,.0f} images/s ({spread.low:,.0f}-{spread.high:,.0f})")
    print(f"  two workers against ddp                  {ratios(LOCKSTEP, DDP)}   to reach 1.5")
    print(f"  two workers against own ceiling          {ratios(LOCKSTEP, CEILING)}   to reach 0.80")
    print(f"  ddp against own ceiling                  {ratios(DDP, DDP_CEILING)}")
    print(f"  one worker, two replicas, against keras  {ratios(ONE_WORKER, PLAIN)}")
    print(f"  one replica against keras                {ratios(SEAM, PLAIN)}   to reach 0.95")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "jax")
