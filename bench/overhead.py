"""The overhead of fault tolerance without faults: this tree against the last commit without fault tolerance.

    overhead.py [--sessions N] [--turns N] [--steps N]

The tutorial's CNN on JAX with two workers, from this tree and from the last commit in which a job could not
continue without a worker. Both programs stay alive and take turns; each session starts them again, in the
other order. Workers are pinned and have one thread per core and 64 images per replica; the bits must be equal
in every turn.
"""

import argparse
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from programs import Work, train_lockstep
from report import print_row
from results import Results, all_states, require
from turns import FailedError, take_turns

REPOSITORY = Path(__file__).parents[1]
BEFORE = "7a8b40afeac90531480bc5015e15b2b0d25ddec1"
"""The last commit before views, with which a job continues without a lost worker."""
SESSIONS = 3
TURNS = 20
STEPS = 40


def sources(commit: str, folder: Path) -> Path:
    """Extract the sources of a commit to `folder`; return the folder of the packages."""
    archive = folder / "sources.tar"
    command = ["git", "-C", str(REPOSITORY), "archive", "-o", str(archive), commit, "src"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise FailedError(f"this needs the repository with its history: {result.stderr.strip()}")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    return folder / "src"


def session(work: Work, reverse: bool) -> list[list[float]]:
    """Return the images per second of both programs in each turn, this tree first."""
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as path:
        folder = Path(path)
        programs = []
        for name, tree in (("now", REPOSITORY / "src"), ("before", sources(BEFORE, folder))):
            program = train_lockstep(name, 2, 2, "jax", work, folder / name)
            program.variables["PYTHONPATH"] = str(tree)
            programs.append(program)
        take_turns(folder, programs[::-1] if reverse else programs, work.turns)
    require(
        all_states(programs[0]) == all_states(programs[1]),
        "the bits of this tree and of the earlier commit differ",
    )
    measured = Results("jax", programs, work)
    return [measured.rates(program) for program in programs]


def measure(sessions: int, work: Work) -> None:
    now: list[float] = []
    before: list[float] = []
    for number in range(sessions):
        rates = session(work, number % 2 == 1)
        now += rates[0]
        before += rates[1]
    print(
        f"the tutorial's CNN on jax, no faults, {sessions} sessions of {work.turns} turns of {work.steps} "
        "steps: median (p10-p90)"
    )
    print_row("lockstep, this tree", now, "examples/s")
    print_row(f"lockstep without fault tolerance ({BEFORE[:7]})", before, "examples/s")
    pairs = zip(now, before, strict=True)
    print_row("this tree / before", [a / b for a, b in pairs], to_reach="0.98")


def main(sessions: int = SESSIONS, turns: int = TURNS, steps: int = STEPS) -> None:
    try:
        measure(sessions, Work.of("cnn", turns, steps))
    except FailedError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, default=SESSIONS)
    parser.add_argument("--turns", type=int, default=TURNS, help="turns per session; at least 2")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps per turn")
    options = parser.parse_args()
    main(options.sessions, options.turns, options.steps)
