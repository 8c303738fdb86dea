"""Files that only grow, written while something more important goes on."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

Complain = Callable[[str], None]


class AppendFile:
    """A file to append to; when it cannot be written any more, that is said once and training goes on.

    Attributes:
        path: of the file.
        descriptor: open for reading and appending.
        start: the file's size when it was opened.
    """

    def __init__(self, path: Path, descriptor: int, start: int, complain: Complain) -> None:
        self.path = path
        self.descriptor = descriptor
        self.start = start
        self._complain = complain
        self._lost = False

    @classmethod
    def open(cls, path: Path, complain: Complain) -> "AppendFile":
        """Open or make the file at `path`; where that fails, all that is written is lost."""
        flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags | os.O_CREAT, 0o666)
            return cls(path, descriptor, os.fstat(descriptor).st_size, complain)
        except OSError as error:
            opened = cls(path, os.open(os.devnull, flags), 0, complain)
            opened._lose(error)
            return opened

    def write(self, data: bytes) -> None:
        """Append `data`, or lose it if that fails."""
        try:
            while data and not self._lost:
                data = data[os.write(self.descriptor, data) :]
        except OSError as error:
            self._lose(error)

    def read(self, count: int, start: int) -> bytes:
        """Return up to `count` bytes from `start` on; none if they cannot be read."""
        try:
            return os.pread(self.descriptor, count, start)
        except OSError:
            return b""

    def _lose(self, error: OSError) -> None:
        self._lost = True
        self._complain(f"cannot write {self.path}: {error.strerror}; what follows in it is lost")

    def close(self) -> None:
        """Close the file."""
        # What the disk of another machine has refused may show itself only now.
        with contextlib.suppress(OSError):
            os.close(self.descriptor)
