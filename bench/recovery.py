"""How long training pauses when one of its processes is killed: Lockstep, torchrun and TensorFlow's strategy.

    recovery.py [--losses N]

The tutorial's CNN on JAX with three workers, of which one is killed and not replaced, against programs of two
processes that begin anew from a checkpoint of their own: DistributedDataParallel under torchrun, and tf_keras
with MultiWorkerMirroredStrategy and BackupAndRestore, whose processes are all ended and started again here as
soon as one is seen to be gone. (Else the one that is left fails after 4 to 16 seconds, even if the other one
comes back, and has to be started again as well.)

The programs take turns, a loss each, of the first worker and of another in turn, at a random instant. Nobody
is pinned, for whoever is left has all cores; one thread a process, 64 images a replica.
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
from pathlib import Path

from rows import print_row
from steps import Step, of, usual, watching
from turns import FailedError, free_ports
from ways import environment

HERE = Path(__file__).parent
LOSSES = 10
STEPS = 200
"""Of an epoch: more than are taken, so that no epoch ends."""
EVERY = 25
"""Steps between two checkpoints of the peers."""
BEFORE = 40
AFTER = 40
CHANCE_SECONDS = 0.3
SETTLED = 3
"""Steps after which a program is back at its usual pace."""


@dataclass(frozen=True)
class Way:
    """A program.

    Attributes:
        name: for the report.
        processes: how many train.
        left: how many train after one was lost.
        commands: start it in a folder of its own.
        variables: its own part of the environment.
        again: whether it has to be started again when a process is gone.
    """

    name: str
    processes: int
    left: int
    commands: Callable[[Path], list[list[str]]]
    variables: dict[str, str]
    again: bool = False


@dataclass(frozen=True)
class Loss:
    """What one loss has cost.

    Attributes:
        chief: whether it was the first worker's.
        before: seconds of a step before it.
        after: seconds of a step after it.
        gone: seconds from the kill until the kernel shows that the process has ended.
        pause: seconds from the kill to the end of the next step, taken without that process.
        new: seconds from the kill to the end of the next step that had not been taken before.
    """

    chief: bool
    before: float
    after: float
    gone: float
    pause: float
    new: float


def lockstep(folder: Path) -> list[list[str]]:
    options = ["-n", "3", "--replicas", "3", "--max-restarts", "0", "--threads-per-worker", "1"]
    run = [sys.executable, "-m", "lockstep", "run", *options, "--run-dir", str(folder / "run")]
    return [[*run, str(HERE / "recovery_lockstep.py"), "cnn", str(STEPS)]]


def torchrun(folder: Path) -> list[list[str]]:
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
    run = [sys.executable, "-m", "torch.distributed.run", *options]
    return [[*run, str(HERE / "recovery_ddp.py"), str(STEPS), str(folder), str(EVERY)]]


def mwms(folder: Path) -> list[list[str]]:
    script = [sys.executable, str(HERE / "recovery_mwms.py"), str(STEPS), str(folder), str(EVERY)]
    ports = list(map(str, free_ports(2)))
    return [[*script, str(process), *ports] for process in (0, 1)]


OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it, processes that torchrun has started again sometimes never meet (pytorch/pytorch#135712)."""

LOCKSTEP = Way("lockstep", 3, 2, lockstep, environment("jax", 1))
TORCHRUN = Way("torchrun, ddp", 2, 2, torchrun, environment("torch", 1) | OWN_STORE)
MWMS = Way("tf_keras, MWMS", 2, 2, mwms, environment("tensorflow", 1), again=True)
PEERS = (TORCHRUN, MWMS)


def lose(way: Way, chief: bool, chance: random.Random) -> Loss:
    """Start a program, kill one of its processes, and see how it goes on."""
    with (
        tempfile.TemporaryDirectory(prefix="lockstep-bench-") as name,
        watching(Path(name), way.variables) as watch,
    ):
        for command in way.commands(Path(name)):
            watch.start(command)
        watch.until(lambda: watch.have_taken(way.processes, BEFORE), f"{way.name}: starting")
        watch.hear_for(chance.uniform(0, CHANCE_SECONDS))
        pids = {step.pid: step.worker for step in watch.steps}
        victim = sorted(pids, key=pids.__getitem__)[0 if chief else 1]
        killed, gone = kill(victim)
        if way.again:
            watch.start_again()

        def without_victim(step: Step) -> bool:
            """Whether a step is of a new view, or of a new process."""
            return step.view > 1 or step.pid not in pids

        watch.until(lambda: watch.have_taken(way.left, AFTER, without_victim), f"{way.name}: going on")
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
    """Kill a process; return when that was and when it had ended."""
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
    for way in (LOCKSTEP, *PEERS):
        print_row(f"{way.name}: a step", [loss.before for loss in losses[way.name]], "ms")
    print_row("lockstep: a step of those who are left", [loss.after for loss in ours], "ms")
    print_row("lockstep: kill to next step", [loss.pause for loss in ours], "ms")
    print_row("lockstep: of it, until the process has ended", [loss.gone for loss in ours], "ms")
    beyond = [loss.pause - loss.after for loss in ours]
    print_row("lockstep: the same, beyond a step of those who are left", beyond, "ms", "50")
    for kind, chief in (("the chief", True), ("another", False)):
        some = [loss.pause - loss.after for loss in ours if loss.chief == chief]
        print_row(f"lockstep: the same, where {kind} is lost", some, "ms")
    for way in PEERS:
        theirs = losses[way.name]
        print_row(f"{way.name}: kill to next step", [loss.pause for loss in theirs], "s")
        print_row(f"{way.name}: kill to next step not taken before", [loss.new for loss in theirs], "s")
    for way in PEERS:
        pairs = zip(losses[way.name], ours, strict=True)
        print_row(f"{way.name} / lockstep", [their.pause / our.pause for their, our in pairs], "times")


def measure(count: int) -> dict[str, list[Loss]]:
    chance = random.Random(0)
    ways = (LOCKSTEP, *PEERS)
    losses: dict[str, list[Loss]] = {way.name: [] for way in ways}
    for number in range(count):
        for way in ways if number % 4 < 2 else reversed(ways):
            losses[way.name].append(lose(way, number % 2 == 0, chance))
    return losses


def main(count: int = LOSSES) -> None:
    try:
        report(measure(count))
    except FailedError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--losses", type=int, default=LOSSES, help="of each program; at least 4")
    main(parser.parse_args().losses)
