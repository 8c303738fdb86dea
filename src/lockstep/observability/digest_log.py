"""Writes the digest log, a folder of segments of JSON lines that stays below a size; see docs/run-folder.md.

A coordinator that takes over a job begins a new segment, so only the process that created a segment appends
to it. When the log reaches its limit, segments are thinned, beginning with those that were thinned least.
Only the steps whose number the stride of the segment divides remain in it.
"""

import contextlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from lockstep.observability.bus import PublishedEvent
from lockstep.observability.run_lines import json_object
from lockstep.system.files import FOLDER_MODE, AppendFile, Complain, open_own, read_regular

LIMIT = 256 * 1024 * 1024
SEGMENT = 4 * 1024 * 1024
SEGMENT_NAME = re.compile(r"[0-9]{6,}\.jsonl")
_FIRST_LINE = 4096
_LARGEST_STRIDE = 1 << 20
"""A segment that would need a larger stride has nothing else to drop: it is removed."""


@dataclass
class _Segment:
    path: Path
    size: int
    stride: int


class DigestLog:
    """Appends to the digest log in a folder, which the first event creates.

    Args:
        folder: the folder of the log.
        encode: returns the line of an event.
        complain: shows a line if the log cannot be written. The rest of the log is then lost.
        limit: maximum bytes of all segments.
        segment: bytes from which a new segment begins.
    """

    def __init__(
        self,
        folder: Path,
        encode: Callable[[PublishedEvent], bytes],
        complain: Complain,
        limit: int = LIMIT,
        segment: int = SEGMENT,
    ) -> None:
        self._folder = folder
        self._encode = encode
        self._complain = complain
        self._limit = limit
        self._segment = segment
        self._closed: list[_Segment] = []
        self._open: _Segment | None = None
        self._file: AppendFile | None = None
        self._waiting: list[bytes] = []
        self._lost = False

    def announce(self, published: PublishedEvent) -> None:
        """Append an event, but only when another one follows."""
        self._waiting.append(self._encode(published))

    def append(self, published: PublishedEvent) -> None:
        """Append an event."""
        lines, self._waiting = [*self._waiting, self._encode(published)], []
        for line in lines:
            self._write(line)

    def close(self) -> None:
        """Close the open segment."""
        if self._file is not None:
            self._file.close()

    def _write(self, line: bytes) -> None:
        if self._lost:
            return
        try:
            if self._open is None or self._open.size >= self._segment:
                self._begin_segment()
            assert self._open is not None
            assert self._file is not None
            self._file.write(line)
            self._open.size += len(line)
            while self._closed and self._size() > self._limit:
                self._thin()
        except OSError as error:
            self._lost = True
            self._complain(
                f"cannot write {self._folder}: {error.strerror}; the rest of the digest log is lost"
            )

    def _size(self) -> int:
        return sum(each.size for each in self._closed) + (self._open.size if self._open else 0)

    def _begin_segment(self) -> None:
        if self._open is None:
            self._folder.mkdir(FOLDER_MODE, exist_ok=True)
            self._closed = [
                _Segment(path, path.stat().st_size, _stride_of(path)) for path in segments(self._folder)
            ]
        else:
            self._closed.append(self._open)
            self.close()
        number = max((int(each.path.stem) for each in self._closed), default=0)
        descriptor = None
        while descriptor is None:
            number += 1
            path = self._folder / f"{number:06}.jsonl"
            with contextlib.suppress(FileExistsError):
                descriptor = open_own(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_EXCL)
        self._file = AppendFile(path, descriptor, self._complain)
        first = _header(1)
        self._file.write(first)
        self._open = _Segment(path, len(first), 1)

    def _thin(self) -> None:
        each = min(self._closed, key=lambda segment: segment.stride)
        each.stride *= 2
        if each.stride > _LARGEST_STRIDE:
            each.path.unlink(missing_ok=True)
            self._closed.remove(each)
            return
        text = thinned(read_regular(each.path), each.stride)
        new = each.path.with_suffix(".new")
        descriptor = open_own(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with os.fdopen(descriptor, "wb") as file:
            file.write(text)
        new.replace(each.path)
        each.size = len(text)


def segments(folder: Path) -> list[Path]:
    """Return the segments of a digest log, the oldest first, or an empty list if there is no log."""
    paths = [path for path in folder.glob("*.jsonl") if SEGMENT_NAME.fullmatch(path.name)]
    return sorted(paths, key=lambda path: int(path.stem))


def thinned(text: bytes, stride: int) -> bytes:
    """Return a segment without the steps whose number `stride` does not divide; the first step stays."""
    lines = [_header(stride)]
    for line in text.splitlines(keepends=True):
        record = json_object(line)
        match record:
            case None | {"event": "segment"}:
                continue
            case {"event": "digests", "steps": [*steps]}:
                record["steps"] = [step for step in steps if _stays(step, stride)]
                if not record["steps"]:
                    continue
                line = msgspec.json.encode(record) + b"\n"
        lines.append(line)
    return b"".join(lines)


def _stays(step: Any, stride: int) -> bool:
    number = step.get("step", 0) if isinstance(step, dict) else 0
    return number == 1 or number % stride == 0


def _header(stride: int) -> bytes:
    return msgspec.json.encode({"event": "segment", "stride": stride}) + b"\n"


def _stride_of(path: Path) -> int:
    with path.open("rb") as file:
        first = file.readline(_FIRST_LINE)
    stride = (json_object(first) or {}).get("stride")
    return stride if isinstance(stride, int) else 1
