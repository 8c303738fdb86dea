"""Whether this user's limits on open files and processes suffice for a job."""

import os
import re
import resource
from pathlib import Path

from lockstep.errors import UnfitError
from lockstep.system.cgroups import read
from lockstep.system.prose import count

_FILES, _FILES_OF_WORKER = 32, 8
"""Descriptors of the agent: a fixed number, and a number per worker."""
_PROCESSES, _THREADS_OF_WORKER = 4, 12
"""Processes besides the workers; threads of a backend besides those that compute."""
_UID = re.compile(r"^Uid:\s*(\d+)", re.MULTILINE)
_THREADS = re.compile(r"^Threads:\s*(\d+)", re.MULTILINE)


def check_limits(workers: int, threads: int, proc: Path = Path("/proc")) -> None:
    """Check that a job can get the descriptors and processes that it needs.

    Args:
        workers: number of workers at the start of the job.
        threads: number of threads that compute one replica.
        proc: the mount point of procfs.

    Raises:
        UnfitError: a limit is too low; the message names it and the required number.
    """
    files, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], _FILES + _FILES_OF_WORKER * workers
    if files != resource.RLIM_INFINITY and files < needed:
        raise UnfitError(
            f"the limit on open files is {files}, and {count(workers, 'worker')} need {needed}: "
            f"raise it with ulimit -n {needed}, or use a smaller -n"
        )
    left, needed = processes_of_user_left(proc), _PROCESSES + workers * (_THREADS_OF_WORKER + threads)
    if left is not None and left < needed:
        raise UnfitError(
            f"the limit on this user's processes and threads leaves {left}, and {count(workers, 'worker')} "
            f"need {needed}: raise it with ulimit -u, stop other programs, or use a smaller -n"
        )


def processes_of_user_left(proc: Path) -> int | None:
    """Return how many more processes and threads this user may start; None without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    # The kernel does not apply the limit to root.
    if limit == resource.RLIM_INFINITY or os.getuid() == 0:
        return None
    return max(0, limit - threads_of(os.getuid(), proc))


def threads_of(user: int, proc: Path) -> int:
    """Return the number of threads of a user's processes, main threads included."""
    total = 0
    for status in map(read, proc.glob("[0-9]*/status")):
        owner, threads = _UID.search(status), _THREADS.search(status)
        if owner and threads and int(owner[1]) == user:
            total += int(threads[1])
    return total
