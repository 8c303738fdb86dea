"""Two trees of Lockstep against each other: the same training with two workers, in alternating turns."""

import argparse
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from programs import Work, train_lockstep
from report import print_row
from results import Results, all_states, require
from turns import FailedError, Program, take_turns

REPOSITORY = Path(__file__).parents[1]

Tree = Callable[[Path], Path]
"""Returns the folder of the packages of a tree, given an empty folder."""
Beside = Callable[[Path, list[Program]], AbstractContextManager[object]]


def this_tree(folder: Path) -> Path:
    return REPOSITORY / "src"


def of_commit(commit: str) -> Tree:
    """Return the tree of a commit."""

    def extract(folder: Path) -> Path:
        archive = folder.with_suffix(".tar")
        command = ["git", "-C", str(REPOSITORY), "archive", "-o", str(archive), commit, "src"]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise FailedError(f"this needs the repository with its history: {result.stderr.strip()}")
        with tarfile.open(archive) as files:
            files.extractall(folder, filter="data")
        return folder / "src"

    return extract


def without(file: str, line: str) -> Tree:
    """Return this tree without a line of a file, which is there once."""

    def edit(folder: Path) -> Path:
        copy = shutil.copytree(REPOSITORY / "src", folder / "src")
        text = (copy / file).read_text()
        if text.count(line) != 1:
            raise FailedError(f"{file} has not the line that this measurement leaves out: {line.strip()}")
        (copy / file).write_text(text.replace(line, ""))
        return copy

    return edit


def compare(
    work: Work,
    sessions: int,
    names: tuple[str, str],
    trees: tuple[Tree, Tree],
    title: str,
    to_reach: str,
    options: tuple[Sequence[str], Sequence[str]] = ((), ()),
    backend: str = "jax",
    beside: Beside = lambda folder, programs: nullcontext(),
) -> None:
    """Print the rates of two trees with two workers, and paired ratios.

    Both programs stay alive and take turns; each session starts them again, in the other order. The bits must
    be equal in every turn.

    Args:
        work: what to train.
        sessions: how often to start the programs.
        names: of the trees, for the rows.
        trees: the first is compared with the second.
        title: of the table.
        to_reach: the ratio that is aimed at.
        options: of `lockstep run` for each tree.
        backend: on which they train.
        beside: what to do during a session, given the run folder of the first program, and the programs.

    Raises:
        FailedError: a program failed, or the bits differ.
    """
    rates: tuple[list[float], list[float]] = ([], [])
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(sessions):
        with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as path:
            folder = Path(path)
            programs = []
            for at, (name, tree) in enumerate(zip(names, trees, strict=True)):
                where = folder / f"tree-{at}"
                where.mkdir()
                program = train_lockstep(name, 2, 2, backend, work, folder / f"run-{at}", options[at])
                program.variables["PYTHONPATH"] = str(tree(where))
                programs.append(program)
            with beside(folder / "run-0", programs):
                take_turns(folder, programs[::-1] if number % 2 else programs, work.turns)
            require(all_states(programs[0]) == all_states(programs[1]), "the bits of the trees differ")
            measured = Results(backend, programs, work)
            for at, program in enumerate(programs):
                rates[at].extend(measured.rates(program))
                times[at].extend(measured.processor_times(program))
    print(f"{title}, {sessions} sessions of {work.turns} turns of {work.steps} steps: median (p10-p90)")
    for name, each in zip(names, rates, strict=True):
        print_row(name, each, "examples/s")
    ratio = [first / second for first, second in zip(*rates, strict=True)]
    print_row(f"{names[0]} / {names[1]}", ratio, to_reach=to_reach)
    print_row("the same, processor time", [first / second for first, second in zip(*times, strict=True)])


def parser(
    description: str | None, sessions: int, turns: int, steps: int | None = None
) -> argparse.ArgumentParser:
    """Return a parser of the numbers that `compare` needs, with these defaults."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--sessions", type=int, default=sessions)
    made.add_argument("--turns", type=int, default=turns, help="turns per session; at least 2")
    made.add_argument("--steps", type=int, default=steps, help="steps per turn")
    return made
