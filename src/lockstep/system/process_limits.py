"""Whether this user's limits on open files and processes are sufficient for a job."""

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


def check_limits(workers: int, threads: int) -> None:
    """Check that a job can get the descriptors and processes that it needs.

    Args:
        workers: number of workers at the start of the job.
        threads: number of threads that compute one replica.

    Raises:
        UnfitError: a limit is too low; the message names it and the required number.
    """
    if why := shortage(workers, threads, open_files(), processes_of_user_left(Path("/proc"))):
        raise UnfitError(why)


def shortage(workers: int, threads: int, files: int | None, processes: int | None) -> str:
    """Return which limit of a host is too low for its workers, and the remedy; otherwise an empty string.

    Args:
        workers: number of workers on the host.
        threads: number of threads that compute one replica.
        files: the limit on open files of a process; None if there is none.
        processes: the number of processes and threads that the user may still start; None without a limit.
    """
    needed = _FILES + _FILES_OF_WORKER * workers
    if files is not None and files < needed:
        return (
            f"the limit on open files is {files}, and {count(workers, 'worker')} need {needed}: "
            f"raise it with ulimit -n {needed}, or use a smaller -n"
        )
    needed = _PROCESSES + workers * (_THREADS_OF_WORKER + threads)
    if processes is not None and processes < needed:
        return (
            f"the limit on this user's processes and threads leaves {processes}, and "
            f"{count(workers, 'worker')} need {needed}: raise it with ulimit -u, stop other programs, or use "
            "a smaller -n"
        )
    return ""


def open_files() -> int | None:
    """Return the limit on open files of this process, or None if there is none."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def processes_of_user_left(proc: Path = Path("/proc")) -> int | None:
    """Return the number of processes and threads that this user may still start, or None without a limit."""
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
