"""Reports of files that a script opens for writing; the coordinator detects conflicts between workers.

In a job that only checks a script, the script must not change anything outside of its process.

Only files opened by Python are reported, not those opened by libraries in C (HDF5, TensorFlow's own files).
"""

import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from lockstep.system.landlock import can_restrict
from lockstep.worker.program_sources import is_program, library_name

_NEW = os.O_CREAT | os.O_TRUNC | os.O_APPEND
"""The flags with which `open` creates, empties or appends to a file: `w`, `x` and `a`, not `r+`."""
_WRITES = os.O_WRONLY | os.O_RDWR
_EFFECTS = frozenset(
    {
        *("open", "os.remove", "os.rmdir", "shutil.rmtree", "os.rename"),
        *("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec"),
        *("socket.connect", "socket.sendto", "socket.sendmsg"),
    }
)
"""The audit events of calls that change something outside of the process."""
_NO_DATABASE = "unable to open database file"
_REFUSED = ("permission denied", "readonly database", _NO_DATABASE)
"""Texts of errors of files that cannot be written, in lower case; the last two are SQLite's."""
_last_database: list[str] = []
"""The database to which a script that is only checked has last connected: SQLite's errors do not name it."""
_MOST = 1000
_SYSTEM = ("/dev", "/proc", "/sys")
_OF_MACHINES = (".lock", ".pyc")
_IMPORT = "<frozen importlib."
_LOCKSTEP = f"{Path(__file__).parents[1]}{os.sep}"

Tell = Callable[[str, str, bool, str], object]
"""Takes the absolute path of a file, the line of the program that opens it, such as `train.py:41`, whether it
appends, and the library that opens it for that line; empty if none does."""


def watch_writes(places: "LibraryFolders", tell: Tell) -> None:
    """Report, from now on, each file that this process opens for writing, and again if it appends.

    There are at most a thousand reports. Forked processes do not report. The hook cannot be removed.
    """
    process, seen = os.getpid(), set[tuple[str, bool]]()

    def opened(path: Any, appends: bool, caller: FrameType) -> None:
        if isinstance(path, int) or len(seen) >= _MOST or os.getpid() != process:
            return
        absolute = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - several times faster
        if (absolute, appends) in seen or places.are_not_the_program_s(absolute):
            return
        line = line_of_program(caller)
        if line is not None:
            seen.add((absolute, appends))
            tell(absolute, line, appends, library_of(caller))

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open":
            return
        try:
            if arguments[2] & _NEW:
                opened(arguments[0], bool(arguments[2] & os.O_APPEND), sys._getframe(1))
        except Exception:
            # An error here would be raised by the program's `open`.
            return

    sys.addaudithook(hook)


def refuse_effects(places: "LibraryFolders", refuse: Callable[[str], object]) -> None:
    """From now on, prevent the program from changing anything outside of this process.

    It may not write, delete or rename files that are its results, start other programs, or connect to a
    service. Temporary files and those of libraries are not results. The hook cannot be removed.

    Args:
        places: recognizes the files of libraries.
        refuse: called with a description of the refused call, such as `train.py:41 writes out.csv`. An error
            that it raises is raised by the program's call.
    """
    process = os.getpid()
    temporary, work = f"{Path(tempfile.gettempdir())}{os.sep}", f"{Path.cwd()}{os.sep}"

    def is_result(path: Any, folder: Any = -1) -> bool:
        if not isinstance(path, str | bytes | os.PathLike):
            return False
        absolute = os.path.abspath(os.path.join(_path_of(folder), os.fsdecode(path)))  # noqa: PTH100, PTH118
        if absolute.startswith(temporary) and not absolute.startswith(work):
            return False
        return not places.are_not_the_program_s(absolute)

    def is_service(path: str) -> bool:
        # Processes that the script forks have their sockets in its temporary folder.
        return not path.startswith((temporary, *_SYSTEM))

    def effect(event: str, arguments: tuple[Any, ...]) -> str:
        """Return the effect of a call, as a predicate, or an empty string if it is allowed."""
        match event:
            case "open" if isinstance(arguments[2], int) and arguments[2] & _WRITES:
                return f"writes {os.fsdecode(arguments[0])}" if is_result(arguments[0]) else ""
            case "os.remove" | "os.rmdir" | "shutil.rmtree":
                return f"deletes {os.fsdecode(arguments[0])}" if is_result(*arguments[:2]) else ""
            case "os.rename":
                old, new, *folders = arguments
                results = map(is_result, (old, new), folders)
                return f"renames {os.fsdecode(old)}" if any(results) else ""
            case "subprocess.Popen" | "os.system" | "os.posix_spawn" | "os.exec":
                return "starts a program"
            # A service of this machine, such as one that records experiments, also keeps the data that it
            # receives.
            case "socket.connect" | "socket.sendto" | "socket.sendmsg" if isinstance(arguments[1], tuple):
                return f"connects to {arguments[1][0]}"
            case "socket.connect" if isinstance(arguments[1], str) and is_service(arguments[1]):
                return f"connects to {arguments[1]}"
        return ""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "sqlite3.connect":
            _last_database[:] = [os.fsdecode(arguments[0])]
        if event not in _EFFECTS or os.getpid() != process:
            return
        if (predicate := effect(event, arguments)) and (
            line := line_of_program(sys._getframe(1))
        ) is not None:
            refuse(f"{line} {predicate}")

    sys.addaudithook(hook)


def is_refused_write(error: BaseException) -> bool:
    """Whether an error of a script that is only checked may come from a write that Landlock refused.

    Landlock does not refuse to read, or to create a database in a folder that does not exist.
    """
    text = str(error).lower()
    if not can_restrict() or not any(refused in text for refused in _REFUSED):
        return False
    if _NO_DATABASE in text and _last_database:
        path = Path(_last_database[0].removeprefix("file:").partition("?")[0])
        return path.absolute().parent.is_dir()
    refused = error.filename if isinstance(error, PermissionError) else None
    return refused is None or _is_readable_or_absent(refused)


def _is_readable_or_absent(path: Any) -> bool:
    try:
        os.stat(path)  # noqa: PTH116 - a descriptor, too
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return os.access(path, os.R_OK)


def _path_of(folder: Any) -> str:
    """Return the path of an open folder, or an empty string for the current folder."""
    if not isinstance(folder, int) or folder < 0:
        return ""
    try:
        return os.readlink(f"/proc/self/fd/{folder}")  # noqa: PTH115 - as above
    except OSError:
        return ""


class LibraryFolders:
    """The folders in which libraries and Lockstep save their own files.

    Args:
        folders: Lockstep's folders, of the run, the cache and checkpoints.
        home: the user's home; its hidden folders belong to libraries.
        work: the script's current folder, which may be below a hidden folder.
    """

    def __init__(self, folders: Iterable[Path], home: Path, work: Path) -> None:
        self._folders = tuple(f"{folder}{os.sep}" for folder in (*folders, *_SYSTEM))
        self._home = f"{home}".rstrip(os.sep) + os.sep
        self._work = f"{work}{os.sep}"

    def are_not_the_program_s(self, path: str) -> bool:
        """Whether the file at an absolute path is not one of the program's results."""
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
    """Return the innermost line of the program on the stack of a frame.

    It is None if there is code of Lockstep in between, which writes on only one worker, or an import, during
    which libraries write caches.
    """
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith((_LOCKSTEP, _IMPORT)):
            return None
        if is_program(file):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def library_of(frame: FrameType | None) -> str:
    """Return the library whose code is innermost on a stack, or an empty string if the program's is."""
    while frame is not None and not is_program(frame.f_code.co_filename):
        if name := library_name(frame.f_code.co_filename):
            return name
        frame = frame.f_back
    return ""
