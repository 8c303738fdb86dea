"""Settings of the Linux kernel for processes: adopting orphans, dying with the parent, and priority."""

import ctypes
import os
import signal
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_ATTEMPTS = 5
_PAUSE = 0.1


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with(parent: int) -> None:
    """Have this process killed when `parent`, which started it, ends; at once if it has already ended."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have ended before the call above.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def keep_priority() -> None:
    """Give a new session the nice value of this process, which leads it.

    Linux may weigh sessions against each other first, and begins with the usual priority for each new one
    (autogroup, see sched(7)). Then nice values count only within a session.
    """
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    if nice > 0:
        for _ in range(_ATTEMPTS):
            try:
                Path("/proc/self/autogroup").write_text(str(nice))
            except BlockingIOError:
                # From users other than root, the kernel accepts one request in a tenth of a second.
                time.sleep(_PAUSE)
            except OSError:
                return
            else:
                return


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")
