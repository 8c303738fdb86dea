"""Files that only grow, written while something more important goes on."""

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
        """Open or make the file at `path`.

        Raises:
            OSError: it cannot be opened.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        return cls(path, descriptor, os.fstat(descriptor).st_size, complain)

    def write(self, data: bytes) -> None:
        """Append `data`, or lose it if the disk is full."""
        try:
            while data and not self._lost:
                data = data[os.write(self.descriptor, data) :]
        except OSError as error:
            self._lost = True
            self._complain(f"cannot write {self.path}: {error.strerror}; what follows in it is lost")

    def close(self) -> None:
        """Close the file."""
        os.close(self.descriptor)
