"""Detects files that several workers write. Pure."""

from pathlib import Path

from lockstep.system.prose import name_workers

_MOST_FILES = 10_000
_MOST_LINES = 5
_UNLESS = (
    " unless it also trains or creates something that all workers need; then give each worker its own file"
)


class FileConflicts:
    """Detects files that several workers write; warns once per file, and only about the first few files.

    Files to which workers append are counted separately, because they contain the data several times.

    Args:
        folder: the user's current folder; messages name files in it by relative paths.

    Attributes:
        unnamed: number of files that several workers write and that no message names.
    """

    def __init__(self, folder: Path) -> None:
        self.unnamed = 0
        self._folder = folder
        self._writers: dict[tuple[int | None, str], set[int]] = {}
        self._conflicts: dict[tuple[int | None, str], bool] = {}
        self._named = {False: 0, True: 0}

    def opened(
        self,
        worker: int,
        path: str,
        line: str,
        running: frozenset[int],
        host: int | None = None,
        *,
        appends: bool = False,
        library: str = "",
    ) -> tuple[bool, str]:
        """Note that a worker opens a file for writing.

        Return whether it is the first conflict about this file, and the warning to show, if any; otherwise
        empty.

        Args:
            worker: its id.
            path: the path of the file, absolute.
            line: the line of the script, such as `train.py:41`.
            running: the live workers; a file that only ended workers wrote is not a conflict.
            host: the host to which the file belongs; None if hosts share it.
            appends: whether it appends to the file.
            library: the library that opens it for this line; empty if none does.
        """
        file = host, path
        if file not in self._writers and len(self._writers) >= _MOST_FILES:
            return False, ""
        writers = self._writers.setdefault(file, set())
        others = (writers & running) - {worker}
        writers.add(worker)
        first, named = file not in self._conflicts, self._conflicts.get(file, False)
        if not others or named or not (first or appends):
            return False, ""
        self._conflicts[file] = self._named[appends] < _MOST_LINES
        if not self._conflicts[file]:
            self.unnamed += first
            return first, ""
        self.unnamed -= not first
        self._named[appends] += 1
        both = name_workers(tuple(sorted((min(others), worker))))
        does, so = ("append to", ", so it has each line several times") if appends else ("write", "")
        # The line may do more than write: workers that skip training let the others wait.
        where, unless = (f"{line}, in {library}", _UNLESS) if library else (line, "")
        return first, (
            f"{both} both {does} {self._shown(path)} ({where}){so}; every worker runs the whole script: "
            f"guard the line with if lockstep.is_chief():{unless}"
        )

    def _shown(self, path: str) -> str:
        file = Path(path)
        return str(file.relative_to(self._folder) if file.is_relative_to(self._folder) else file)
