"""Saving a model that several workers hold: the first worker writes, and no reader sees a partial file."""

import contextlib
import errno
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from lockstep.data.digest import digest_arrays
from lockstep.errors import PeerStuckError
from lockstep.keras.backends.contract import Backend
from lockstep.keras.variables import model_state
from lockstep.system.files import FOLDER_MODE
from lockstep.system.locks import wait_for_lock
from lockstep.system.notes import note
from lockstep.system.paths import RunPaths
from lockstep.worker.job import Job

Write = Callable[[str], object]

_NOTE_EVERY_SECONDS = 10.0
_PATIENCE_SECONDS = 600.0


def write_once(
    notes: Path, path: os.PathLike[str] | str, state: bytes, write: Write, *, rename: bool
) -> None:
    """Write a file that other workers may also write; return when it exists.

    Workers that save the same state to the same path share the work: the first one writes, and the others
    wait for it. If the writer ends before it is done, the next worker writes.

    Args:
        notes: a folder shared by the workers, for records of what was written.
        path: the file to write.
        state: identifies the contents: bytes that are equal only for equal contents.
        write: writes to the path that it is given.
        rename: write a local file under a temporary name beside it and rename that, so that no reader ever
            sees a partial file; only for a file or folder, and files beside it to which it refers.

    Raises:
        OSError: any that `write` raises.
        PeerStuckError: another worker has been writing for 10 minutes.
    """
    own = os.fspath(path)
    notes.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
    absolute = own if "://" in own else str(Path(own).absolute())
    file = notes / xxhash.xxh3_128_hexdigest(absolute.encode())
    with _locked(file, own) as descriptor:
        if os.pread(descriptor, len(state) + 1, 0) == state and ("://" in own or Path(own).exists()):
            return
        os.ftruncate(descriptor, 0)
        if rename and "://" not in own:
            _write_whole(Path(own), write)
        else:
            write(own)
        os.pwrite(descriptor, state, 0)


class SharedSaves:
    """The saving methods of models in a job; replaces Keras's own, which are passed as `original`."""

    def __init__(self, job: Job, backend: Backend) -> None:
        self._job = job
        self._backend = backend

    def save(
        self, original: Callable[..., Any], model: Any, filepath: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Save like `original`, once for all workers that save the same state to the same path."""
        if self._job.context.folder is None:
            original(model, filepath, *args, **kwargs)
            return
        arrays = [self._backend.to_numpy(value) for value in model_state(model).values()]
        purpose = f"{original.__name__} {args} {sorted(kwargs.items())}".encode()
        sharded = "max_shard_size" in kwargs or len(args) > 1
        write_once(
            RunPaths(self._job.context.folder).saved,
            filepath,
            digest_arrays(arrays, purpose),
            lambda path: original(model, path, *args, **kwargs),
            # Keras must see a file that it must not overwrite, and names shards after their file.
            rename=kwargs.get("overwrite", args[0] if args else True) is True
            and not (sharded and not Path(filepath).absolute().parent.is_dir()),
        )


@contextmanager
def _locked(file: Path, path: str) -> Iterator[int]:
    """Hold the lock of a record for the block; the kernel releases it if the process dies."""
    reported = 0.0

    def waiting(waited: float) -> None:
        nonlocal reported
        if waited - reported > _NOTE_EVERY_SECONDS:
            reported = waited
            note(f"has waited {waited:.0f} s for another worker that writes {path}")

    descriptor = wait_for_lock(file, _PATIENCE_SECONDS, waiting)
    if descriptor is None:
        raise PeerStuckError(
            f"another worker has been writing {path} for {_PATIENCE_SECONDS:.0f} s; check whether its disk "
            "responds"
        )
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _write_whole(final: Path, write: Write) -> None:
    try:
        with _beside(final) as temporary:
            write(str(temporary))
            if temporary.parent != final.parent:
                # Shards, to which the last file refers.
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
    """Rename a folder; a worker on another host may do the same at the same time."""
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
    """Yield a temporary path on the disk of `final`; remove what is there at the end of the block.

    The suffix of its name tells Keras the format. It is in a new folder: in a folder that several users can
    write to, another user could place a link under any predictable name.
    """
    if final.parent.is_dir():
        own = Path(tempfile.mkdtemp(prefix=".", dir=final.parent))
        temporary = own / final.name
    else:
        # Some ways to save create the parent folders.
        own = temporary = final.with_name(f".{secrets.token_hex(8)}-{final.name}")
    try:
        yield temporary
    finally:
        if own.is_dir():
            shutil.rmtree(own)
        else:
            own.unlink(missing_ok=True)
