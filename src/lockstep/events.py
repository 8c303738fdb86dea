"""What happened in a run, a JSON object a line."""

import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from lockstep.clock import Clock

_RESERVED = ("time", "event")


class EventLog:
    """Appends events to a file.

    Each event is one `write` of one line, `{"time": ..., "event": ..., <fields>}`, so that lines of
    a run that was killed are whole, and a reader can follow the file while it grows.
    """

    def __init__(self, descriptor: int, clock: Clock) -> None:
        self._descriptor = descriptor
        self._clock = clock

    @classmethod
    def open(cls, path: Path, clock: Clock) -> Self:
        """Open `path` to append; a line that an earlier run left unfinished is ended first."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            os.write(descriptor, b"\n")
        return cls(descriptor, clock)

    def write(self, event: str, /, **fields: Any) -> None:
        """Append one event; fields called `time` or `event` get a trailing underscore."""
        safe = {f"{name}_" if name in _RESERVED else name: value for name, value in fields.items()}
        line = {"time": round(self._clock.wall(), 3), "event": event, **safe}
        os.write(self._descriptor, msgspec.json.encode(line, enc_hook=repr) + b"\n")

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
