"""Reads the JSON lines of a run folder, and leaves out invalid lines.

The last line of a file may be incomplete, another version may have written it, and a file may contain
anything.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from lockstep.observability.bus import PublishedEvent
from lockstep.observability.events import recorded_fields
from lockstep.observability.measurements import LoadMeasured, MetricsRecorded, StepsMeasured

_CHUNK = 4 * 1024 * 1024
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Happening(msgspec.Struct, frozen=True):
    """An event as in `events.jsonl`, where any version may have written it.

    Attributes:
        time: the time at which it was published, in seconds since 1970.
        event: its name.
        worker: the worker that published it, or that it describes; None for the run.
        fields: the other fields.
    """

    time: float
    event: str
    worker: int | None
    fields: Mapping[str, Any]


# These are the fields of every line of `measurements.jsonl` beside its measurement, so that a line is decoded
# once.


class _StepsLine(StepsMeasured, frozen=True, kw_only=True, tag="steps"):
    time: float
    worker: int | None = None


class _MetricsLine(MetricsRecorded, frozen=True, kw_only=True, tag="metrics"):
    time: float
    worker: int | None = None


class _LoadLine(LoadMeasured, frozen=True, kw_only=True, tag="load"):
    time: float
    worker: int | None = None


_measurements: msgspec.json.Decoder[_StepsLine | _MetricsLine | _LoadLine] = msgspec.json.Decoder(
    _StepsLine | _MetricsLine | _LoadLine
)


def json_object(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a line, or None if the line contains anything else."""
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except _UNREADABLE:
        return None


def json_objects(text: bytes) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in the lines of a text."""
    for line in text.split(b"\n"):
        if (fields := json_object(line)) is not None:
            yield fields


def happening(line: bytes) -> Happening | None:
    """Return the event in a line of `events.jsonl`, or None if there is no event."""
    fields = json_object(line)
    if fields is None:
        return None
    try:
        time, event, worker = float(fields.pop("time")), fields.pop("event"), fields.pop("worker", None)
    except (KeyError, TypeError, ValueError):
        return None
    if not isinstance(event, str) or not (worker is None or isinstance(worker, int)):
        return None
    return Happening(time, event, worker, fields)


def happenings(text: bytes) -> Iterator[Happening]:
    """Yield the events in the lines of `events.jsonl`."""
    for line in text.split(b"\n"):
        if (event := happening(line)) is not None:
            yield event


def as_happening(published: PublishedEvent) -> Happening:
    """Return an event in the form of its line in `events.jsonl`."""
    fields = recorded_fields(published.event)
    worker = fields.pop("worker", published.worker)
    return Happening(published.time, fields.pop("event"), worker, fields)


def measurement(line: bytes) -> PublishedEvent | None:
    """Return the measurement in a line of `measurements.jsonl`, or None if there is no measurement."""
    try:
        event = _measurements.decode(line)
    except _UNREADABLE:
        return None
    return PublishedEvent(event.time, event.worker, event)


class GrowingFile:
    """The lines of a file that grows, and may appear later."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._inode: int | None = None

    def shrank(self) -> bool:
        """Whether the file has been replaced, or is shorter, since it was last read."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return self._inode is not None
        return status.st_size < self._offset or self._inode not in (None, status.st_ino)

    def lines(self) -> Iterator[bytes]:
        """Yield the complete lines since the last call."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            self._inode = os.fstat(file.fileno()).st_ino
            file.seek(self._offset)
            rest = b""
            while chunk := file.read(_CHUNK):
                *complete, rest = (rest + chunk).split(b"\n")
                for line in complete:
                    self._offset += len(line) + 1
                    if line:
                        yield line
