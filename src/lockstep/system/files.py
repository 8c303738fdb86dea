"""Lockstep's own files: opening them safely, and appending to them while training runs."""

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

Complain = Callable[[str], None]

FOLDER_MODE = 0o775
"""The mode of new folders: they are not writable for all users, whatever the umask allows."""

_ALWAYS = os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK


@contextlib.contextmanager
def closed_after(descriptor: int) -> Iterator[int]:
    """Yield an open descriptor, and close it after the block."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_own(path: Path, flags: int) -> int:
    """Open a regular file in a folder of Lockstep's; return its descriptor.

    Raises:
        OSError: see `open_in`; or the folder is writable for all users, who could place other files in it.
    """
    with closed_after(os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as folder:
        mode = stat.S_IMODE(os.fstat(folder).st_mode)
        if mode & stat.S_IWOTH:
            raise PermissionError(
                errno.EPERM, f"every user may write to it (mode {mode:o}; chmod o-w prevents that)"
            )
        return open_in(folder, path.name, flags)


def open_in(folder: int, name: str, flags: int) -> int:
    """Open a regular file in a folder; return its descriptor.

    This never follows a link and never blocks, because another user may have replaced the file.

    Args:
        folder: descriptor of the folder.
        name: the name of the file in it.
        flags: the flags of `os.open`.

    Raises:
        OSError: it cannot be opened, is a link, or is not a regular file.
    """
    try:
        descriptor = os.open(name, flags | os.O_NOFOLLOW | _ALWAYS, 0o666, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, f"{name} in it is a symbolic link") from None
        raise
    return _regular(descriptor, name)


def open_regular(path: Path) -> int:
    """Open a file for reading; return its descriptor. This never blocks.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    return _regular(os.open(path, os.O_RDONLY | _ALWAYS), path.name)


def read_regular(path: Path) -> bytes:
    """Return the contents of a file.

    Raises:
        OSError: it cannot be read, is not a regular file, or does not fit into memory.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        try:
            return file.read()
        except MemoryError:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) from None


def replace(path: Path, data: bytes) -> None:
    """Write a whole file: a reader gets either the previous contents or `data`.

    Raises:
        OSError: it cannot be written; the previous contents remain.
    """
    new = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        new.write_bytes(data)
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def _regular(descriptor: int, name: str) -> int:
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, f"{name} is not a regular file")


class AppendFile:
    """A file to append to; a failure to write is reported once, and training continues.

    Data that cannot be written is lost, and the next data begins a line.

    Attributes:
        path: the path of the file.
        descriptor: a descriptor that is open for reading and appending.
        start: the file's size when it was opened.
    """

    def __init__(self, path: Path, descriptor: int, complain: Complain) -> None:
        self.path = path
        self.descriptor = descriptor
        self.start = os.fstat(descriptor).st_size
        self._complain = complain
        self._has_complained = self._has_gap = self._is_in_line = False

    @classmethod
    def open(cls, path: Path, complain: Complain) -> "AppendFile":
        """Open or create a file in a folder of Lockstep's; if that fails, everything written is lost."""
        try:
            return cls(path, open_own(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), complain)
        except OSError as error:
            opened = cls(path, os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), complain)
            opened._tell(error)
            return opened

    def write(self, data: bytes) -> None:
        """Append `data`, or lose it if that fails."""
        if self._has_gap and self._is_in_line:
            data = b"\n" + data
        try:
            while data:
                written = os.write(self.descriptor, data)
                self._is_in_line, data = data[written - 1 : written] != b"\n", data[written:]
            self._has_gap = False
        except OSError as error:
            self._has_gap = True
            self._tell(error)

    def read(self, count: int, start: int) -> bytes:
        """Return up to `count` bytes from `start` on, or empty bytes if they cannot be read."""
        try:
            return os.pread(self.descriptor, count, start)
        except OSError:
            return b""

    def _tell(self, error: OSError) -> None:
        if not self._has_complained:
            self._has_complained = True
            self._complain(f"cannot write {self.path}: {error.strerror}; data that cannot be written is lost")

    def close(self) -> None:
        """Close the file."""
        # On a network file system, the error of an earlier write may appear only now.
        with contextlib.suppress(OSError):
            os.close(self.descriptor)
