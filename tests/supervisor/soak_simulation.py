"""Simulates jobs in virtual time on all cores, beyond those of `make test`: soak_simulation.py [JOBS]

The status is 1 if a job breaks a guarantee; its seed is shown.
"""

import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import chain

from test_simulation import BLOCK, SCHEDULES, check_job


def failures(first: int, end: int) -> list[str]:
    """The seeds of a block of jobs that fail, and why."""
    found = []
    for seed in range(first, min(first + BLOCK, end)):
        try:
            check_job(seed)
        except Exception as error:
            found.append(f"seed {seed}: {error!r:.1000}")
    return found


def main(jobs: int = 100_000) -> int:
    end = SCHEDULES + jobs
    with ProcessPoolExecutor() as pool:
        found = list(chain(*pool.map(partial(failures, end=end), range(SCHEDULES, end, BLOCK))))
    print(*found, f"{jobs} simulated jobs, {len(found)} failed", sep="\n", flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
