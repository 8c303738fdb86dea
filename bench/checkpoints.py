"""How long a checkpoint delays training: Lockstep, Keras's `model.save`, PyTorch's `async_save`.

    checkpoints.py [MODEL] [--turns N]

Every program trains the same large model and writes one checkpoint in the middle of each turn; the turn ends
when the checkpoint is on the disk. Lockstep and PyTorch train in two processes, plain Keras in one. All
processes are pinned and have one thread per core.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from checkpoint_cost import STEPS
from large_model import BYTES, SHOWN
from programs import environment
from report import print_row
from turns import FailedError, Program, take_turns

HERE = Path(__file__).parent
TURNS = 15
LOCKSTEP = "lockstep"
KERAS = "keras, model.save"
TORCH = "torch, async_save"
TORCH_REUSED = "torch, async_save, stager reused"


def through_lockstep(model: str, folder: Path, turns: int) -> Program:
    checkpoints = folder / "checkpoints"
    options = ["-n", "2", "--replicas", "2", "--threads-per-worker", "1", "--run-dir", str(folder / "run")]
    options += ["--checkpoint", str(checkpoints), "--checkpoint-every", str(STEPS), "--keep", "1"]
    script = [str(HERE / "checkpoints_keras.py"), LOCKSTEP, "lockstep", model, "-1", str(turns)]
    script.append(str(checkpoints))
    command = [sys.executable, "-m", "lockstep", "run", *options, *script]
    return Program(LOCKSTEP, [command], 2, 2, environment("jax", 1))


def plain(model: str, folder: Path, turns: int) -> Program:
    script = [sys.executable, str(HERE / "checkpoints_keras.py"), KERAS, "plain", model, "0", str(turns)]
    return Program(KERAS, [[*script, str(folder)]], 1, 1, environment("jax", 1))


def torch(name: str, stager: str, model: str, folder: Path, turns: int) -> Program:
    script = [sys.executable, str(HERE / "checkpoints_torch.py"), name, stager, model]
    checkpoints = str(folder / stager)
    commands = [[*script, str(process), str(turns), checkpoints] for process in (0, 1)]
    return Program(name, commands, 2, 2, environment("torch", 1))


def report(model: str, programs: list[Program]) -> None:
    print(
        f"a checkpoint of a state of {SHOWN[model]}, {len(programs[0].answers)} of each program: "
        "median (p10-p90)"
    )
    for program in programs:
        print_row(f"{program.name}: a step", values(program, "step"), "ms")
    for program in programs:
        to_reach = "20" if program.name == LOCKSTEP and model == "large" else ""
        print_row(
            f"{program.name}: the thread of the training is occupied", values(program, "call"), "ms", to_reach
        )
    for program in programs:
        print_row(
            f"{program.name}: the two steps at the checkpoint take longer by", values(program, "late"), "ms"
        )
    for program in programs:
        print_row(f"{program.name}: all steps after it take longer by", values(program, "slowed"), "ms")
    ours, *others = programs
    for other in others:
        pairs = zip(values(other, "call"), values(ours, "call"), strict=True)
        print_row(f"{other.name} / lockstep", [other / own for other, own in pairs], "times")


def values(program: Program, name: str) -> list[float]:
    """Return a measurement of each turn, that of the slower process."""
    return [max(answer[name] for answer in turn) for turn in program.answers]


def measure(model: str, turns: int) -> list[Program]:
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as name:
        folder = Path(name)
        programs = [through_lockstep(model, folder, turns), plain(model, folder, turns)]
        if model == "large":
            programs.append(torch(TORCH, "default", model, folder, turns))
        programs.append(torch(TORCH_REUSED, "reused", model, folder, turns))
        take_turns(folder, programs, turns)
    for program in programs:
        if min(values(program, "bytes")) < BYTES[model]:
            raise FailedError(f"{program.name}: a checkpoint is smaller than {BYTES[model] / 1e6:.0f} MB")
    return programs


def main(model: str = "large", turns: int = TURNS) -> None:
    try:
        report(model, measure(model, turns))
    except FailedError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="large", choices=BYTES)
    parser.add_argument("--turns", type=int, default=TURNS, help="at least 2")
    options = parser.parse_args()
    main(options.model, options.turns)
