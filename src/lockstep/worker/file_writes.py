"""Files that a script opens for writing: each worker tells the agent, which finds those of several workers.

Only what Python opens is seen, not what libraries open in C (HDF5, TensorFlow's own files).
"""

import os
import stat
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from lockstep.worker.program_sources import is_program

_NEW = os.O_CREAT | os.O_TRUNC | os.O_APPEND
"""What `open` has in its flags where it makes a file, empties it or appends: `w`, `x` and `a`, not `r+`."""
_MOST = 1000
_SYSTEM = ("/dev", "/proc", "/sys")
_OF_MACHINES = (".lock", ".pyc")
_IMPORT = "<frozen importlib."
_LOCKSTEP = f"{Path(__file__).parents[1]}{os.sep}"

Tell = Callable[[str, str], object]
"""Takes the absolute path of a file, and the line of the program that opens it, as `train.py:41`."""


def watch_writes(places: "LibraryFolders", tell: Tell) -> None:
    """From now on, tell once of each file that this process opens for writing, up to a thousand.

    Processes that it forks tell nothing. Python cannot stop to watch any more.
    """
    process, seen = os.getpid(), set[str]()

    def opened(path: Any, caller: FrameType) -> None:
        if isinstance(path, int) or len(seen) >= _MOST or os.getpid() != process:
            return
        absolute = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - several times faster
        if absolute in seen or places.are_not_the_program_s(absolute):
            return
        line = line_of_program(caller)
        if line is not None:
            seen.add(absolute)
            tell(absolute, line)

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open":
            return
        try:
            if arguments[2] & _NEW:
                opened(arguments[0], sys._getframe(1))
        except Exception:
            # What this raises, the program's `open` would raise.
            return

    sys.addaudithook(hear)


class LibraryFolders:
    """Where libraries, and Lockstep, keep files of their own.

    Args:
        folders: Lockstep's: the run's, and that of checkpoints.
        home: of the user; its hidden folders are of libraries.
        work: where the script runs, which may be below a hidden folder.
    """

    def __init__(self, folders: Iterable[Path], home: Path, work: Path) -> None:
        self._folders = tuple(f"{folder}{os.sep}" for folder in (*folders, *_SYSTEM))
        self._home = f"{home}".rstrip(os.sep) + os.sep
        self._work = f"{work}{os.sep}"

    def are_not_the_program_s(self, path: str) -> bool:
        """Whether a program does not mean a file at an absolute path as one of its results."""
        if path.endswith(_OF_MACHINES) or path.startswith(self._folders):
            return True
        if path.startswith(f"{self._home}."):
            top, below, _ = path.removeprefix(self._home).partition(os.sep)
            if below and not self._work.startswith(f"{self._home}{top}{os.sep}"):
                return True
        try:
            return not stat.S_ISREG(os.stat(path).st_mode)  # noqa: PTH116 - as above
        except OSError:
            return False


def line_of_program(frame: FrameType | None) -> str | None:
    """Return the innermost line of the program that leads to a frame.

    None where Lockstep is between, which writes on one worker, or an import, for which libraries keep files.
    """
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith((_LOCKSTEP, _IMPORT)):
            return None
        if is_program(file):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return None
