"""The logs of a run's workers: shown one after the other, and followed while they grow."""

import os
import re
from collections.abc import Callable, Collection
from pathlib import Path

from lockstep.system.files import open_regular
from lockstep.system.output import LinePrefixer
from lockstep.system.paths import RunPaths, worker_of_log

_PIECE = 256 * 1024

Write = Callable[[bytes], object]


def list_logs(folder: Path) -> dict[int, Path]:
    """Return the paths of the logs in a run folder, by worker in ascending order; no symbolic links.

    Raises:
        OSError: the folder cannot be read.
    """
    workers = (worker for path in folder.iterdir() if (worker := worker_of_log(path.name)) is not None)
    logs = {worker: RunPaths(folder).log(worker) for worker in sorted(workers)}
    return {worker: path for worker, path in logs.items() if path.is_file() and not path.is_symlink()}


class WorkerLogs:
    """Writes the logs of a run, and later their new lines, in constant memory.

    A log that is shown alone is written as it is. Otherwise complete lines are written, those longer than
    64 KiB in parts.

    Args:
        folder: the folder of the run.
        workers: the workers whose logs to show; empty for all workers, including those that start later.
        prefixed: whether each line begins with its worker, as in `[worker 1] `.
        pattern: a pattern that the shown lines must contain; None for all lines.
        write: writes bytes.
    """

    def __init__(
        self,
        folder: Path,
        workers: Collection[int],
        *,
        prefixed: bool,
        pattern: re.Pattern[str] | None,
        write: Write,
    ) -> None:
        self._folder = folder
        self._workers = frozenset(workers)
        self._prefixed = prefixed
        self._pattern = pattern
        self._write = write
        self._logs: dict[int, GrowingLog] = {}

    def advance(self) -> None:
        """Write the new lines of the logs since the last call, worker by worker.

        A log that has become shorter, or was replaced, is shown from its start; one that is missing is
        skipped.

        Raises:
            OSError: a log cannot be read, or `write` raised it.
        """
        self._find()
        for log in self._logs.values():
            log.advance()

    def finish(self) -> None:
        """Write the new lines of the logs, including last lines without an end; raises as `advance`."""
        self._find()
        for log in self._logs.values():
            log.finish()

    def _find(self) -> None:
        for worker, path in list_logs(self._folder).items():
            if worker not in self._logs and (not self._workers or worker in self._workers):
                self._logs[worker] = GrowingLog(path, self._outlet(worker))

    def _outlet(self, worker: int) -> Write | LinePrefixer:
        prefix = f"[worker {worker}] ".encode() if self._prefixed else b""
        if not prefix and self._pattern is None:
            return self._write
        return LinePrefixer(prefix, self._write, self._is_wanted)

    def _is_wanted(self, line: bytes) -> bool:
        return self._pattern is None or self._pattern.search(line.decode(errors="replace")) is not None


def follow(
    logs: "WorkerLogs | GrowingLog", is_running: Callable[[], bool], rest: Callable[[], object]
) -> None:
    """Write the logs of a running job, or one log, until it has ended.

    Args:
        logs: the logs to write.
        is_running: whether the job still runs.
        rest: called between two looks at the logs.

    Raises:
        OSError: see `WorkerLogs.advance`, or `rest` raised it.
    """
    while is_running():
        logs.advance()
        rest()
    # The job may have written more before its end.
    logs.finish()


class GrowingLog:
    """A log, and the position up to which it was read.

    Args:
        path: the path of the log.
        outlet: receives the bytes.
        position: the byte with which to begin.
    """

    def __init__(self, path: Path, outlet: Write | LinePrefixer, position: int = 0) -> None:
        self._path = path
        self._outlet = outlet
        self._write = outlet.write if isinstance(outlet, LinePrefixer) else outlet
        self._file: tuple[int, int] | None = None
        self._position = position

    def advance(self) -> None:
        """Write new bytes up to the present end, because another log may wait."""
        try:
            status = self._path.stat()
            if self._file == (status.st_dev, status.st_ino) and status.st_size == self._position:
                return
            descriptor = open_regular(self._path)
        except FileNotFoundError:
            return
        try:
            status = os.fstat(descriptor)
            file = status.st_dev, status.st_ino
            if self._file not in (None, file) or status.st_size < self._position:
                self.end_line()
                self._position = 0
            self._file = file
            while left := status.st_size - self._position:
                piece = os.pread(descriptor, min(left, _PIECE), self._position)
                if not piece:
                    return
                self._position += len(piece)
                self._write(piece)
        finally:
            os.close(descriptor)

    def finish(self) -> None:
        """Write new bytes, and the end of an unterminated line."""
        self.advance()
        self.end_line()

    def end_line(self) -> None:
        """Write an unterminated line."""
        if isinstance(self._outlet, LinePrefixer):
            self._outlet.close()
