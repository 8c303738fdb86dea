"""The logs of workers, by pages and by search; a log may have any size."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from lockstep.monitoring.worker_logs import list_logs
from lockstep.system.files import open_regular
from lockstep.system.paths import RunPaths

PAGE = 64 * 1024
"""The size of a page in bytes, at most."""

MOST_FOUND = 100
"""The number of lines that a search returns at most."""

_CHUNK = 4 * 1024 * 1024
_MOST_SEARCHED = 32 * _CHUNK
_LONGEST = 400
_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-Z\\-_])|\x08")


@dataclass(frozen=True)
class LogPage:
    """Complete lines of a log, from byte `start` to `stop` of `size`."""

    text: str
    start: int
    stop: int
    size: int


@dataclass(frozen=True)
class FoundLine:
    """A line that contains the text, and the byte at which it starts."""

    start: int
    text: str


@dataclass(frozen=True)
class SearchResult:
    """The lines that a search has found, and the byte at which to continue it; None at the end of the log."""

    found: tuple[FoundLine, ...]
    resume: int | None
    size: int


def log_sizes(folder: Path) -> dict[int, int]:
    """Return the size of the log of each worker, in bytes."""
    return {worker: path.stat().st_size for worker, path in list_logs(folder).items()}


def read_page(folder: Path, worker: int, start: int | None = None, before: int | None = None) -> LogPage:
    """Return a page of a log.

    Args:
        folder: the folder of the run.
        worker: the worker of the log.
        start: the byte at which the page starts, the beginning of a line.
        before: instead, the byte at which it ends. Without both, the page is the last one.

    Raises:
        OSError: the log cannot be read.
    """
    with os.fdopen(open_regular(RunPaths(folder).log(worker)), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if start is not None:
            start = min(max(start, 0), size)
            file.seek(start)
            data = file.read(PAGE)
            if start + len(data) < size:
                # A line that is longer than a page is divided.
                data = data[: data.rfind(b"\n") + 1] or data
            return LogPage(readable(data), start, start + len(data), size)
        stop = min(size if before is None else max(before, 0), size)
        first = max(0, stop - PAGE)
        file.seek(first)
        data = file.read(stop - first)
    if first:
        line = data.find(b"\n", 0, -1) + 1
        first, data = first + line, data[line:]
    return LogPage(readable(data), first, first + len(data), size)


def search(folder: Path, worker: int, text: str, *, case: bool, start: int = 0) -> SearchResult:
    """Return the lines of a log that contain a text.

    A call reads a limited part of the log; continue at `SearchResult.resume`.

    Args:
        folder: the folder of the run.
        worker: the worker of the log.
        text: the text to find, not empty.
        case: whether the case of ASCII letters counts; that of other letters always does.
        start: the byte at which to start, the beginning of a line.

    Raises:
        OSError: the log cannot be read.
    """
    wanted = text.encode(errors="replace")
    wanted = wanted if case else wanted.lower()
    lines: list[FoundLine] = []
    with os.fdopen(open_regular(RunPaths(folder).log(worker)), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        at, until = max(0, start), min(size, max(0, start) + _MOST_SEARCHED)
        while at < until:
            file.seek(at)
            data = file.read(_CHUNK)
            if not data:
                return SearchResult(tuple(lines), None, size)
            if at + len(data) < size:
                data = data[: data.rfind(b"\n") + 1] or data
            looked, offset = data if case else data.lower(), 0
            while (hit := looked.find(wanted, offset)) >= 0:
                first = data.rfind(b"\n", 0, hit) + 1
                end = data.find(b"\n", hit)
                end = len(data) if end < 0 else end
                # In a long line, the text is in the middle.
                shown = max(first, min(hit - _LONGEST // 2, end - _LONGEST))
                lines.append(FoundLine(at + first, readable(data[shown : min(end, shown + _LONGEST)])))
                offset = end + 1
                if len(lines) == MOST_FOUND:
                    return SearchResult(tuple(lines), at + offset if at + offset < size else None, size)
            at += len(data)
    return SearchResult(tuple(lines), at if at < size else None, size)


def readable(data: bytes) -> str:
    """Return text of a log as a terminal shows it: without escapes, and with the last state of each line."""
    text = _ESCAPES.sub("", data.decode(errors="replace"))
    if "\r" not in text:
        return text
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
