"""What it costs to survive where nobody dies: today's Lockstep against the last one that survived nothing.

    overhead.py [--sessions N] [--turns N] [--steps N]

The tutorial's CNN on JAX with two workers, from this tree and from the one of the commit before a job could
go on without a worker, which git keeps. Both stay alive and take turns; for each session they are started
anew, in the other order. All pinned, one thread a core, 64 images a replica; the bits have to be equal in
every turn.
"""

import argparse
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from measured import Measured, all_states, require
from rows import print_row
from turns import FailedError, take_turns
from ways import Work, through_lockstep

REPOSITORY = Path(__file__).parents[1]
BEFORE = "7a8b40afeac90531480bc5015e15b2b0d25ddec1"
"""The last commit before views, which let a job go on without a worker."""
SESSIONS = 3
TURNS = 20
STEPS = 40


def sources(commit: str, folder: Path) -> Path:
    """Bring a commit's sources into `folder`; return where Python finds them."""
    archive = folder / "sources.tar"
    command = ["git", "-C", str(REPOSITORY), "archive", "-o", str(archive), commit, "src"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise FailedError(f"needs the repository with its history: {result.stderr.strip()}")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    return folder / "src"


def session(work: Work, reverse: bool) -> list[list[float]]:
    """Return images a second of both, today's first, in each turn."""
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as path:
        folder = Path(path)
        programs = []
        for name, tree in (("today", REPOSITORY / "src"), ("before", sources(BEFORE, folder))):
            program = through_lockstep(name, 2, 2, "jax", work, folder / name)
            program.variables["PYTHONPATH"] = str(tree)
            programs.append(program)
        take_turns(folder, programs[::-1] if reverse else programs, work.turns)
    require(all_states(programs[0]) == all_states(programs[1]), "today's bits are not those of before")
    measured = Measured("jax", programs, work)
    return [measured.rates(program) for program in programs]


def measure(sessions: int, work: Work) -> None:
    today: list[float] = []
    before: list[float] = []
    for number in range(sessions):
        rates = session(work, number % 2 == 1)
        today += rates[0]
        before += rates[1]
    print(
        f"tutorial's CNN on jax, nobody dies, {sessions} sessions of {work.turns} turns of {work.steps} "
        "steps: median (p10-p90)"
    )
    print_row("lockstep today", today, "examples/s")
    print_row(f"lockstep before it survived anything ({BEFORE[:7]})", before, "examples/s")
    pairs = zip(today, before, strict=True)
    print_row("today / before", [ours / theirs for ours, theirs in pairs], to_reach="0.98")


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
    parser.add_argument("--turns", type=int, default=TURNS, help="of each session; at least 2")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each turn")
    options = parser.parse_args()
    main(options.sessions, options.turns, options.steps)
