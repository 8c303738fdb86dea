"""Saving a model that several workers hold: the first worker writes, and no reader sees a partial file.

Workers that save the same state to the same path share the work. The first one writes under a temporary name
that it renames, and the others wait for its lock on a record in the run's folder. The kernel frees the lock
of a worker that dies. Each host has its own run folder, so workers of different hosts do not share these
records. If they share a disk, each host writes under its own temporary name, and renames a whole file.
"""

import contextlib
import errno
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import xxhash

from lockstep.data.digest import digest_arrays
from lockstep.errors import DisagreementError, PeerStuckError
from lockstep.keras.backends.contract import Backend
from lockstep.keras.variables import model_state
from lockstep.system.files import FOLDER_MODE, closed_after
from lockstep.system.locks import wait_for_lock
from lockstep.system.notes import NOTE_EVERY, note
from lockstep.system.paths import RunPaths
from lockstep.worker.job import Job

Write = Callable[[str], object]

_PATIENCE_SECONDS = 600.0
_OCCASIONS = 16
"""The number of occasions that a record keeps: one worker may be some saves ahead of another."""


class Occasion(NamedTuple):
    """The point of the program at which a worker saves.

    Attributes:
        name: the name of the point, at which all workers have equal states; equal on all of them.
        worker: the worker that saves.
    """

    name: str
    worker: int


def write_once(
    notes: Path,
    path: os.PathLike[str] | str,
    state: bytes,
    write: Write,
    *,
    rename: bool,
    occasion: Occasion | None = None,
) -> None:
    """Write a file that other workers may also write, and return when it exists.

    Workers that save the same state to the same path share the work: the first one writes, and the others
    wait for it. If the writer ends before it is done, the next worker writes.

    Args:
        notes: a folder shared by the workers, for records of what was written.
        path: the file to write.
        state: identifies the contents: bytes that are equal only for equal contents.
        write: writes to a path, its argument.
        rename: whether to write a local file under a temporary name beside it and to rename that, so that no
            reader ever sees a partial file. The result is one file or folder, and files beside it to which it
            refers.
        occasion: the occasion on which this worker saves; None if others may save a different state.

    Raises:
        DisagreementError: another worker has saved a different state on this occasion.
        OSError: `write` raised it.
        PeerStuckError: another worker has been writing for too long.
    """
    target = os.fspath(path)
    absolute = target if "://" in target else str(Path(target).absolute())
    with _record(notes, absolute, target) as record:
        if occasion is not None:
            record.add(occasion, state, f"saves {target}")
        if record.state == state.hex() and ("://" in target or Path(target).exists()):
            return
        record.state = ""
        record.write()
        if rename and "://" not in target:
            _write_whole(Path(target), write)
        else:
            write(target)
        record.state = state.hex()


class SharedSaves:
    """The saving methods of models in a job. They replace Keras's own, which are passed as `original`."""

    def __init__(self, job: Job, backend: Backend, occasion: Callable[[], str]) -> None:
        self._job = job
        self._backend = backend
        self._occasion = occasion
        self._last: dict[str, tuple[str, int]] = {}

    def save(
        self, original: Callable[..., Any], model: Any, filepath: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Save like `original`, once for all workers that save the same state to the same path."""
        if self._job.context.folder is None:
            original(model, filepath, *args, **kwargs)
            return
        purpose = f"{original.__name__} {args} {sorted(kwargs.items())}"
        sharded = "max_shard_size" in kwargs or len(args) > 1
        write_once(
            RunPaths(self._job.context.folder).saved,
            filepath,
            self._digest(model, purpose),
            lambda path: original(model, path, *args, **kwargs),
            occasion=self._occasion_of(os.fspath(filepath)),
            # Keras must get a file that it may not overwrite, and names shards after their file.
            rename=kwargs.get("overwrite", args[0] if args else True) is True
            and not (sharded and not Path(filepath).absolute().parent.is_dir()),
        )

    def compare(self, point: str, model: Any) -> None:
        """Check that other workers have the same state of `model` at this point, without waiting for them.

        Args:
            point: the name of the point of the program.
            model: the model, whose state is in its variables.

        Raises:
            DisagreementError: another worker of the same host has a different state.
        """
        occasion = self._occasion_of(point)
        if self._job.context.folder is not None and occasion is not None:
            with _record(RunPaths(self._job.context.folder).saved, point, point) as record:
                record.add(occasion, self._digest(model, point), f"reaches {point}")

    def _digest(self, model: Any, purpose: str) -> bytes:
        arrays = [self._backend.to_numpy(value) for value in model_state(model).values()]
        return digest_arrays(arrays, purpose.encode())

    def _occasion_of(self, path: str) -> Occasion | None:
        """Return the occasion on which this worker saves to a path. It may save there several times."""
        if self._job.settings.allow_unlike or self._job.joins:
            return None
        name = self._occasion()
        last_name, count = self._last.get(path, ("", 0))
        self._last[path] = name, count + 1 if last_name == name else 1
        return Occasion(f"{name}, save {self._last[path][1]}", self._job.worker)


class _Record(msgspec.Struct):
    """The states that workers have saved to one path, in a file that is locked while the record is used.

    Attributes:
        state: the state that was saved last, in hexadecimal; empty while it is being written.
        occasions: the states of the last occasions, each with the worker that has saved it.
    """

    state: str = ""
    occasions: dict[str, tuple[str, int]] = {}
    descriptor: int = -1

    def add(self, occasion: Occasion, state: bytes, action: str) -> None:
        """Add the state of a worker on an occasion.

        Raises:
            DisagreementError: another worker had a different state.
        """
        saved_state, other = self.occasions.setdefault(occasion.name, (state.hex(), occasion.worker))
        if saved_state != state.hex():
            raise DisagreementError(
                f"worker {occasion.worker} {action} with different weights, or arguments, from worker "
                f"{other} at the same place in the script: look for weights that depend on the worker or on "
                "the time; code that changes the model on one worker only must also save it only there",
                (occasion.worker,),
            )
        while len(self.occasions) > _OCCASIONS:
            del self.occasions[next(iter(self.occasions))]

    def write(self) -> None:
        """Write the record to its file."""
        data = msgspec.json.encode({"state": self.state, "occasions": self.occasions})
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, data, 0)


@contextmanager
def _record(notes: Path, key: str, path: str) -> Iterator[_Record]:
    """Read the record for a key, hold its lock during the block, and write the record afterwards."""
    notes.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
    with _locked(notes / xxhash.xxh3_128_hexdigest(key.encode()), path) as descriptor:
        data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        record = _Record()
        with contextlib.suppress(msgspec.DecodeError):
            record = msgspec.json.decode(data, type=_Record)
        record.descriptor = descriptor
        yield record
        record.write()


@contextmanager
def _locked(file: Path, path: str) -> Iterator[int]:
    """Hold the lock of a record for the block; the kernel releases it if the process dies."""
    reported = 0.0

    def waiting(waited: float) -> None:
        nonlocal reported
        if waited - reported > NOTE_EVERY:
            reported = waited
            note(f"this worker has waited {waited:.0f} s for another worker that writes {path}")

    descriptor = wait_for_lock(file, _PATIENCE_SECONDS, waiting)
    if descriptor is None:
        raise PeerStuckError(
            f"another worker has been writing {path} for {_PATIENCE_SECONDS:.0f} s; check whether its disk "
            "responds"
        )
    with closed_after(descriptor):
        yield descriptor


def _write_whole(final: Path, write: Write) -> None:
    try:
        with _beside(final) as temporary:
            write(str(temporary))
            if temporary.parent != final.parent:
                # These are shards, to which the last file refers.
                for other in sorted(temporary.parent.iterdir()):
                    if other != temporary:
                        other.replace(final.with_name(other.name))
            if temporary.is_dir():
                _replace_folder(temporary, final)
            else:
                temporary.replace(final)
    except OSError as error:
        raise OSError(f"cannot write {final}: {error}") from error


def _replace_folder(temporary: Path, final: Path) -> None:
    """Rename a folder. A worker on another host may do the same at the same time."""
    while True:
        try:
            temporary.replace(final)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        # A folder with contents can only be moved away.
        away = Path(tempfile.mkdtemp(prefix=".", dir=final.parent))
        with contextlib.suppress(FileNotFoundError):
            final.rename(away / final.name)
        shutil.rmtree(away)


@contextmanager
def _beside(final: Path) -> Iterator[Path]:
    """Yield a temporary path on the disk of `final`; remove its contents at the end of the block.

    The suffix of its name tells Keras the format. The path is in a new folder, because in a folder to which
    several users can write, another user could create a link under any predictable name.
    """
    if final.parent.is_dir():
        folder = Path(tempfile.mkdtemp(prefix=".", dir=final.parent))
        temporary = folder / final.name
    else:
        # Some ways to save create the parent folders.
        folder = temporary = final.with_name(f".{secrets.token_hex(8)}-{final.name}")
    try:
        yield temporary
    finally:
        if folder.is_dir():
            shutil.rmtree(folder)
        else:
            folder.unlink(missing_ok=True)
