"""Detects files that several workers write. Pure."""

from pathlib import Path

from lockstep.system.prose import name_workers

_MOST_FILES = 10_000
_MOST_LINES = 5


class FileConflicts:
    """Detects files that several workers write; warns once per file, and only of the first few.

    Args:
        folder: the user's current folder; messages name files in it by relative paths.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writers: dict[tuple[int | None, str], set[int]] = {}
        self._told: set[tuple[int | None, str]] = set()

    def opened(
        self, worker: int, path: str, line: str, running: frozenset[int], host: int | None = None
    ) -> str | None:
        """Note that a worker opens a file for writing; return the warning to show, if any.

        Args:
            worker: its id.
            path: of the file, absolute.
            line: of the script, such as `train.py:41`.
            running: the live workers; a file that only ended workers wrote is no conflict.
            host: the host to which the file belongs; None if hosts share it.
        """
        file = host, path
        if file not in self._writers and len(self._writers) >= _MOST_FILES:
            return None
        writers = self._writers.setdefault(file, set())
        others = (writers & running) - {worker}
        writers.add(worker)
        if not others or file in self._told or len(self._told) > _MOST_LINES:
            return None
        self._told.add(file)
        if len(self._told) > _MOST_LINES:
            return "several workers write more files; they are not listed"
        both = name_workers(tuple(sorted((min(others), worker))))
        return (
            f"{both} both write {self._shown(path)} ({line}); every worker runs the whole script: guard the "
            "line with if lockstep.is_chief():"
        )

    def _shown(self, path: str) -> str:
        file = Path(path)
        return str(file.relative_to(self._folder) if file.is_relative_to(self._folder) else file)
