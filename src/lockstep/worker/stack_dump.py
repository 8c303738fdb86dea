"""The Python stack of a worker, even of one that blocks the interpreter."""

import faulthandler
import os
import re
import signal
from pathlib import Path

from lockstep.system.files import open_own

STACK_SIGNAL = signal.SIGRTMAX - 1
"""Requests the stack of a worker; nothing else uses this signal."""

_HEADINGS = ("Thread 0x", "Current thread 0x")
# These frames start a script, and are not the user's.
_STARTING = re.compile(
    r'File "(.*/lockstep/(launcher/(fork_server|worker)_main|worker/script)\.py|<frozen runpy>)"'
)


def write_when_asked(path: Path) -> None:
    """Make this process append the stacks of its threads to `path` on each `STACK_SIGNAL`."""
    try:
        descriptor = open_own(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    except OSError:
        # Even if the stack cannot be written, the signal must not end this process.
        descriptor = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    faulthandler.register(STACK_SIGNAL, file=descriptor, all_threads=True)


def innermost(dump: str, frames: int) -> list[str]:
    """Return the innermost frames, the innermost first, of the thread that Python would interrupt.

    Args:
        dump: the output of `write_when_asked`: a section per thread, the main thread's last.
        frames: maximum number of lines.
    """
    lines = dump.rstrip("\n").split("\n")
    starts = [number for number, line in enumerate(lines) if line.startswith(_HEADINGS)]
    if not starts:
        return []
    current = next((start for start in starts if lines[start].startswith("Current")), starts[-1])
    section = lines[current + 1 :]
    end = next((number for number, line in enumerate(section) if not line.startswith("  ")), len(section))
    return [line.strip() for line in section[:end] if not _STARTING.search(line)][:frames]
