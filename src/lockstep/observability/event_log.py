"""What happened in a run, a JSON object a line."""

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from lockstep.system.clock import Clock
from lockstep.system.files import AppendFile, Complain

_RESERVED = ("time", "event")


class EventLog:
    """Appends events to a file.

    Each event is one `write` of one line, `{"time": ..., "event": ..., <fields>}`, so that lines of
    a run that was killed are whole, and a reader can follow the file while it grows.
    """

    def __init__(self, file: AppendFile, clock: Clock) -> None:
        self._file = file
        self._clock = clock

    @classmethod
    def open(cls, path: Path, clock: Clock, complain: Complain) -> Self:
        """Open `path` to append; a line that an earlier run left unfinished is ended first."""
        file = AppendFile.open(path, complain)
        if file.start and file.read(1, file.start - 1) != b"\n":
            file.write(b"\n")
        return cls(file, clock)

    def write(self, event: str, /, **fields: Any) -> None:
        """Append one event; fields called `time` or `event` get a trailing underscore."""
        safe = {f"{name}_" if name in _RESERVED else name: value for name, value in fields.items()}
        line = {"time": round(self._clock.wall(), 3), "event": event, **safe}
        self._file.write(msgspec.json.encode(line, enc_hook=repr) + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
