"""The output of workers, in their logs and on the terminal."""

import os
import re
import select
from collections import deque
from collections.abc import Callable
from pathlib import Path

from lockstep.system.files import AppendFile, Complain

_PIECE = 4096
_MAX_LINE = 64 * 1024
_TAIL = 64 * 1024
_CONTROL = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


class Sink:
    """A terminal, pipe or file that may be slow; writing never blocks.

    Data is buffered until `flush` can write it. Once a write has failed, because the reader has closed the
    pipe or the disk is full, all data is discarded; the logs still have it.

    Attributes:
        descriptor: the descriptor of the file.
        pending: number of buffered bytes.
        taken: number of bytes passed to `write` so far.
        failure: why data is discarded; empty if none is.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.pending = 0
        self.taken = 0
        self.failure = ""
        self._queue: deque[bytes] = deque()

    def write(self, data: bytes) -> None:
        """Buffer `data`, and write as much as possible without blocking."""
        self.taken += len(data)
        if self.failure or not data:
            return
        self._queue.append(data)
        self.pending += len(data)
        self.flush()

    def flush(self) -> None:
        """Write as much as possible without blocking."""
        while self._queue and self._is_ready():
            piece, rest = self._queue[0][:_PIECE], self._queue[0][_PIECE:]
            try:
                written = os.write(self.descriptor, piece)
            except BlockingIOError:
                return
            except OSError as error:
                self._give_up(error.strerror or repr(error))
                return
            self.pending -= written
            self._queue.popleft()
            if remaining := piece[written:] + rest:
                self._queue.appendleft(remaining)

    def _is_ready(self) -> bool:
        # A pipe that polls as writable accepts PIPE_BUF bytes without blocking.
        poll = select.poll()
        poll.register(self.descriptor, select.POLLOUT)
        return bool(poll.poll(0))

    def _give_up(self, failure: str) -> None:
        self.failure = failure
        self._queue.clear()
        self.pending = 0


class LinePrefixer:
    """Forwards complete lines, each with a prefix, so that those of several workers do not mix.

    Args:
        prefix: the beginning of each line.
        write: receives the lines.
        keeps: returns whether to forward a line, given without its end; None to forward all.
    """

    def __init__(
        self,
        prefix: bytes,
        write: Callable[[bytes], object],
        keeps: Callable[[bytes], bool] | None = None,
    ) -> None:
        self._prefix = prefix
        self._write = write
        self._keeps = keeps
        self._open = b""

    def write(self, data: bytes) -> None:
        """Add `data`; an unterminated line is forwarded once it is 64 KiB long."""
        *lines, self._open = (self._open + data).split(b"\n")
        if len(self._open) > _MAX_LINE:
            lines.append(self._open)
            self._open = b""
        if self._keeps is not None:
            lines = list(filter(self._keeps, lines))
        self._write(b"".join(self._prefix + line + b"\n" for line in lines))

    def close(self) -> None:
        """Forward an unterminated last line."""
        if self._open:
            self.write(b"\n")


class Log:
    """A worker's log file, which it shares with earlier runs in the same folder."""

    def __init__(self, file: AppendFile) -> None:
        self._file = file

    @classmethod
    def open(cls, path: Path, complain: Complain) -> "Log":
        """Open `path` to append."""
        return cls(AppendFile.open(path, complain))

    @property
    def path(self) -> Path:
        """The path of the log."""
        return self._file.path

    def write(self, data: bytes) -> None:
        """Append `data`."""
        self._file.write(data)

    def tail(self, lines: int) -> list[str]:
        """Return the last readable lines that this run wrote, safe for a terminal."""
        try:
            size = os.fstat(self._file.descriptor).st_size
        except OSError:
            return []
        start = max(self._file.start, size - _TAIL)
        return last_lines(self._file.read(size - start, start), lines)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def last_lines(data: bytes, lines: int) -> list[str]:
    """Return the last lines of an output, safe for a terminal."""
    text = data.decode(errors="replace")
    return [_plain(line) for line in text.rstrip("\n").split("\n")][-lines:] if text else []


def _plain(line: str) -> str:
    # A progress bar redraws itself; only its last state is shown.
    return _CONTROL.sub("", line.rstrip("\r").rpartition("\r")[2])
