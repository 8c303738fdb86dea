"""How long training pauses when a process is killed: Lockstep, torchrun and TensorFlow's strategy.

    recovery.py [--losses N]

The tutorial's CNN on JAX with three workers, one of which is killed and not replaced, against programs of two
processes that restart from their own checkpoints: DistributedDataParallel under torchrun, and tf_keras with
MultiWorkerMirroredStrategy and BackupAndRestore. This program ends and restarts all processes of the latter
as soon as one has ended. (Otherwise the remaining one fails after 4 to 16 seconds, even if the other one
restarts, and must restart as well.)

The programs take turns of one loss, alternately of the first and of another worker, at a random instant.
Processes are not pinned, so that the remaining ones can use all cores; each has one thread and 64 images per
replica. Other rows show Lockstep alone with a small model on inputs whose reading the workers divide.
"""

import argparse
import itertools
import os
import random
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from programs import environment
from reading_sources import DIVIDED
from report import print_row
from steps import Step, of, usual, watching
from turns import FailedError, free_ports

HERE = Path(__file__).parent
LOSSES = 10
STEPS = 200
"""The steps of an epoch: more than are measured, so that no epoch ends."""
EVERY = 25
"""Steps between two checkpoints of the peers."""
BEFORE = 40
AFTER = 40
CHANCE_SECONDS = 0.3
SETTLED = 3
"""Steps after which a program has its usual speed."""


@dataclass(frozen=True)
class RecoveringProgram:
    """A program that recovers from the loss of a process.

    Attributes:
        name: for the report.
        processes: the number of processes that train.
        left: the number of processes that train after a loss.
        commands: returns the commands that start it, with its own folder.
        variables: its environment variables.
        must_restart: whether this program must restart it after a loss.
    """

    name: str
    processes: int
    left: int
    commands: Callable[[Path], list[list[str]]]
    variables: dict[str, str]
    must_restart: bool = False


@dataclass(frozen=True)
class Loss:
    """The measurements of one loss, in seconds.

    Attributes:
        chief: whether the first worker was killed.
        before: a step before the loss.
        after: a step after the loss.
        gone: from the kill until the kernel reports the end of the process.
        pause: from the kill to the end of the next step, without that process.
        new: from the kill to the end of the next step that had not been taken before.
    """

    chief: bool
    before: float
    after: float
    gone: float
    pause: float
    new: float


def lockstep(folder: Path, model: str = "cnn") -> list[list[str]]:
    options = ["-n", "3", "--replicas", "3", "--max-restarts", "0", "--threads-per-worker", "1"]
    run = [sys.executable, "-m", "lockstep", "run", *options, "--run-dir", str(folder / "run")]
    return [[*run, str(HERE / "recovery_lockstep.py"), model, str(STEPS)]]


def torchrun(folder: Path) -> list[list[str]]:
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
    run = [sys.executable, "-m", "torch.distributed.run", *options]
    return [[*run, str(HERE / "recovery_ddp.py"), str(STEPS), str(folder), str(EVERY)]]


def mwms(folder: Path) -> list[list[str]]:
    script = [sys.executable, str(HERE / "recovery_mwms.py"), str(STEPS), str(folder), str(EVERY)]
    ports = list(map(str, free_ports(2)))
    return [[*script, str(process), *ports] for process in (0, 1)]


OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it, processes that torchrun restarts sometimes never connect (pytorch/pytorch#135712)."""

LOCKSTEP = RecoveringProgram("lockstep", 3, 2, lockstep, environment("jax", 1))
TORCHRUN = RecoveringProgram("torchrun, ddp", 2, 2, torchrun, environment("torch", 1) | OWN_STORE)
MWMS = RecoveringProgram("tf_keras, MWMS", 2, 2, mwms, environment("tensorflow", 1), must_restart=True)
PEERS = (TORCHRUN, MWMS)
INPUTS = [
    RecoveringProgram(f"lockstep, {name}", 3, 2, partial(lockstep, model=name), environment("jax", 1))
    for name in DIVIDED
]


def lose(program: RecoveringProgram, chief: bool, chance: random.Random) -> Loss:
    """Start a program, kill one of its processes, and measure the recovery."""
    with (
        tempfile.TemporaryDirectory(prefix="lockstep-bench-") as name,
        watching(Path(name), program.variables) as watch,
    ):
        for command in program.commands(Path(name)):
            watch.start(command)
        watch.until(lambda: watch.have_taken(program.processes, BEFORE), f"{program.name}: starting")
        watch.receive_for(chance.uniform(0, CHANCE_SECONDS))
        pids = {step.pid: step.worker for step in watch.steps}
        victim = sorted(pids, key=pids.__getitem__)[0 if chief else 1]
        killed, gone = kill(victim)
        if program.must_restart:
            watch.restart()

        def without_victim(step: Step) -> bool:
            """Whether a step belongs to a new view or to a new process."""
            return step.view > 1 or step.pid not in pids

        watch.until(
            lambda: watch.have_taken(program.left, AFTER, without_victim), f"{program.name}: recovery"
        )
    later = list(filter(without_victim, watch.steps))
    earlier = list(itertools.filterfalse(without_victim, watch.steps))
    observed = of(min(later, key=lambda step: step.worker).pid, later)
    known = max(step.number for step in earlier)
    return Loss(
        chief=chief,
        before=usual([step for step in of(victim, earlier) if step.time < killed][SETTLED:]),
        after=usual(observed[SETTLED:]),
        gone=gone - killed,
        pause=observed[0].time - killed,
        new=next(step.time for step in observed if step.number > known) - killed,
    )


def kill(pid: int) -> tuple[float, float]:
    """Kill a process; return the time of the kill and the time of its end."""
    descriptor = os.pidfd_open(pid)
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    select.select([descriptor], [], [])
    gone = time.monotonic()
    os.close(descriptor)
    return killed, gone


def report(losses: dict[str, list[Loss]]) -> None:
    ours = losses[LOCKSTEP.name]
    print(f"one process of the tutorial's CNN killed, {len(ours)} times each: median (p10-p90)")
    for program in (LOCKSTEP, *PEERS):
        print_row(f"{program.name}: a step", [loss.before for loss in losses[program.name]], "ms")
    print_row("lockstep: a step of the remaining workers", [loss.after for loss in ours], "ms")
    print_row("lockstep: kill to next step", [loss.pause for loss in ours], "ms")
    print_row("lockstep: part of it until the process has ended", [loss.gone for loss in ours], "ms")
    added = [loss.pause - loss.after for loss in ours]
    print_row("lockstep: kill to next step, minus a step of the remaining workers", added, "ms", "50")
    for kind, chief in (("the chief", True), ("another worker", False)):
        some = [loss.pause - loss.after for loss in ours if loss.chief == chief]
        print_row(f"lockstep: the same if {kind} is killed", some, "ms")
    for program in PEERS:
        peer = losses[program.name]
        print_row(f"{program.name}: kill to next step", [loss.pause for loss in peer], "s")
        print_row(f"{program.name}: kill to next step not taken before", [loss.new for loss in peer], "s")
    for program in PEERS:
        pairs = zip(losses[program.name], ours, strict=True)
        print_row(f"{program.name} / lockstep", [other.pause / own.pause for other, own in pairs], "times")


def report_inputs(count: int) -> None:
    """Measure and report losses of Lockstep with each kind of input that workers divide."""
    chance = random.Random(0)
    print(f"one process killed that trains on a costly input, {count} times each: median (p10-p90)")
    for program in INPUTS:
        losses = [lose(program, number % 2 == 0, chance) for number in range(count)]
        print_row(f"{program.name}: a step", [loss.before for loss in losses], "ms")
        print_row(f"{program.name}: a step of the remaining workers", [loss.after for loss in losses], "ms")
        added = [loss.pause - loss.after for loss in losses]
        print_row(f"{program.name}: kill to next step, minus such a step", added, "ms", "150")


def measure(count: int) -> dict[str, list[Loss]]:
    chance = random.Random(0)
    programs = (LOCKSTEP, *PEERS)
    losses: dict[str, list[Loss]] = {program.name: [] for program in programs}
    for number in range(count):
        for program in programs if number % 4 < 2 else reversed(programs):
            losses[program.name].append(lose(program, number % 2 == 0, chance))
    return losses


def main(count: int = LOSSES) -> None:
    try:
        report(measure(count))
        report_inputs(count)
    except FailedError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--losses", type=int, default=LOSSES, help="losses of each program; at least 4")
    main(parser.parse_args().losses)
