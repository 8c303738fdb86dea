"""The files of a run folder that an object store lacks, and those that may be uploaded now. Pure.

Logs grow at their end, but a store replaces whole objects. So a large file is uploaded less often: all
uploads together take at most `RATE` on average, and a log of 100 MB is at most 100 s behind.
"""

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import NamedTuple

import msgspec

from lockstep.errors import CheckpointError, UnknownFormatError
from lockstep.system.paths import is_transient

INDEX = ".lockstep-run.json"
"""The object that lists the others."""
EVERY = 30.0
"""Seconds between two uploads of a file that grows, at least."""
LARGE = 1_000_000
"""Bytes from which a file counts as large."""
RATE = 1_000_000
"""Bytes per second that uploads of large files take on average, at most."""
LAST_SECONDS = 60.0
"""Seconds that the rest has at the end, besides those for its bytes at `RATE`."""

_FORMAT = 1


class RunIndex(msgspec.Struct, frozen=True):
    """The object that lists the files of a run folder in a store.

    Attributes:
        format: the version of these fields.
        holder: the token of the run that uploads. A run that finds another token there stops uploading.
        files: their names. The next file to upload may be missing.
    """

    format: int = _FORMAT
    holder: str = ""
    files: tuple[str, ...] = ()


class FileState(NamedTuple):
    """The size of a file, and the time of its last change, in nanoseconds."""

    size: int
    modified: int


class UploadedFile(NamedTuple):
    """The state of a file when it was uploaded, and the time of the upload, in seconds."""

    state: FileState
    at: float


def changed(files: Mapping[str, FileState], uploaded: Mapping[str, UploadedFile]) -> list[str]:
    """Return the names of the files that the store lacks or has in an earlier state, the smallest first."""
    names = [name for name in files if name not in uploaded or uploaded[name].state != files[name]]
    return sorted(names, key=lambda name: (files[name].size, name))


def due(files: Mapping[str, FileState], uploaded: Mapping[str, UploadedFile], now: float) -> list[str]:
    """Return the names of the files to upload now, the smallest first."""
    names = changed(files, uploaded)
    large = sum(files[name].size for name in names if files[name].size > LARGE)

    def may(name: str) -> bool:
        wait = max(EVERY, large / RATE) if files[name].size > LARGE else EVERY
        return name not in uploaded or now - uploaded[name].at >= wait

    return [name for name in names if may(name)]


def is_kept(name: str) -> bool:
    """Whether a file of a run folder belongs in the store: it has a printable name, and outlives the run."""
    return name.isprintable() and name != INDEX and not is_transient(name)


def read_index(data: bytes, url: str) -> RunIndex:
    """Decode the index of a store.

    Raises:
        CheckpointError: it is damaged.
        UnknownFormatError: another version has written it.
    """
    try:
        index = msgspec.json.decode(data, type=RunIndex)
    except ValueError as error:
        raise CheckpointError(f"{url}/{INDEX} is damaged: {error}; give another URL, or remove it") from None
    if index.format != _FORMAT:
        raise UnknownFormatError.of(f"{url}/{INDEX}", index.format, _FORMAT)
    if outside := [name for name in index.files if not _is_below(name)]:
        raise CheckpointError(
            f"{url}/{INDEX} is damaged: it names {outside[0]!r}; give another URL, or remove it"
        )
    return index


def _is_below(name: str) -> bool:
    """Whether a file's name is below the folder. Anyone with access to the store may have set it."""
    path = PurePosixPath(name)
    return is_kept(name) and not path.is_absolute() and ".." not in path.parts and str(path) == name
