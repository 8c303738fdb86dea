"""Writes the events of a run to its folder: a JSON object per line, as docs/run-folder.md describes."""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from lockstep.observability.bus import Bus, PublishedEvent
from lockstep.observability.digest_log import DigestLog
from lockstep.observability.digest_records import WORKER_DIGESTS
from lockstep.observability.events import RUN_EVENTS, JobStarted, OutputLost, recorded_fields
from lockstep.observability.measurements import MEASUREMENTS
from lockstep.system.files import AppendFile, Complain
from lockstep.system.paths import RunPaths


@contextmanager
def recorded(events: Bus, paths: RunPaths, complain: Complain) -> Iterator[None]:
    """Write the events, measurements and digests of a run to its folder during the block."""

    def lose(text: str) -> None:
        complain(text)
        events.publish(OutputLost(text))

    with (
        EventLog.open(paths.events, lose) as log,
        EventLog.open(paths.measurements, lose) as figures,
        closing(DigestLog(paths.digests, encoded, lose)) as digests,
    ):
        events.subscribe(log.append, *RUN_EVENTS)
        events.subscribe(figures.append, *MEASUREMENTS)
        events.subscribe(digests.announce, JobStarted)
        events.subscribe(digests.append, *WORKER_DIGESTS)
        yield


class EventLog:
    """Appends events to a file.

    Each event is one `write` of one line, `{"time": ..., "event": ..., <fields>}`, so a killed run does not
    leave incomplete lines, and a reader can follow the file while it grows. Events of a worker have the field
    `worker`.
    """

    def __init__(self, file: AppendFile) -> None:
        self._file = file

    @classmethod
    def open(cls, path: Path, complain: Complain) -> Self:
        """Open `path` to append; an incomplete last line of an earlier run is terminated first."""
        file = AppendFile.open(path, complain)
        if file.start and file.read(1, file.start - 1) != b"\n":
            file.write(b"\n")
        return cls(file)

    def append(self, published: PublishedEvent) -> None:
        """Append one event; it is lost if the file cannot be written."""
        self._file.write(encoded(published))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def encoded(published: PublishedEvent) -> bytes:
    """Return the line of an event."""
    line = {"time": round(published.time, 3), **recorded_fields(published.event)}
    if published.worker is not None:
        line["worker"] = published.worker
    try:
        text = msgspec.json.encode(line)
    except UnicodeEncodeError:
        # JSON can escape each byte of a file name that is not UTF-8.
        text = json.dumps(line, ensure_ascii=False).encode(errors="backslashreplace")
    return text + b"\n"
