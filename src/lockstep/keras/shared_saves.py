"""Saving a model that several workers hold: whoever comes first writes, and nobody reads half a file."""

import os
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
from lockstep.keras.state.variables import model_state
from lockstep.system.files import FOLDER_MODE
from lockstep.system.locks import wait_for_lock
from lockstep.system.notes import note
from lockstep.system.paths import RunPaths
from lockstep.worker.job import Job

Write = Callable[[str], object]

_SAY_EVERY_SECONDS = 10.0
_PATIENCE_SECONDS = 600.0


def write_once(
    notes: Path, path: os.PathLike[str] | str, state: bytes, write: Write, *, rename: bool
) -> None:
    """Write a file that other workers may be writing too; return when it is there.

    Workers that save the same state to the same path share the work: the first to come writes, the others
    wait for it. A worker that comes alone simply writes. If the one that writes ends halfway, the next one
    does it.

    Args:
        notes: a folder that the workers share, for notes on what has been written.
        path: where this worker wants it written.
        state: what is to be written, as bytes that are equal only for equal contents.
        write: writes to the path it is given.
        rename: write a local path under a temporary name beside it and rename that, so that no reader
            ever sees half a file; for what is one file or one folder.

    Raises:
        OSError: whatever `write` raises.
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


class Saves:
    """Saving in a job: each method stands for one of Keras's, which is its `original`."""

    def __init__(self, job: Job, backend: Backend) -> None:
        self._job = job
        self._backend = backend

    def save(
        self, original: Callable[..., Any], model: Any, filepath: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Save in whichever way `original` does, once for all workers that save the same state there."""
        if self._job.context.folder is None or len(self._job.view.workers) == 1:
            original(model, filepath, *args, **kwargs)
            return
        arrays = [self._backend.concrete(value) for value in model_state(model).values()]
        purpose = f"{original.__name__} {args} {sorted(kwargs.items())}".encode()
        sharded = "max_shard_size" in kwargs or len(args) > 1
        write_once(
            RunPaths(self._job.context.folder).saved,
            filepath,
            digest_arrays(arrays, purpose),
            lambda path: original(model, path, *args, **kwargs),
            # Shards are several files; and what must not be overwritten has to be seen by Keras.
            rename=not sharded and kwargs.get("overwrite", args[0] if args else True) is True,
        )


@contextmanager
def _locked(file: Path, path: str) -> Iterator[int]:
    """Hold the lock of a note for the block; a process that dies lets go of it."""
    said = 0.0

    def waiting(waited: float) -> None:
        nonlocal said
        if waited - said > _SAY_EVERY_SECONDS:
            said = waited
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
            if final.is_dir() and temporary.is_dir():
                shutil.rmtree(final)
            temporary.replace(final)
    except OSError as error:
        raise OSError(f"cannot write {final}: {error}") from error


@contextmanager
def _beside(final: Path) -> Iterator[Path]:
    """Give a temporary path on the disk of `final`; what is there at the end of the block is removed.

    The end of its name tells Keras which format is meant. It is in a folder of its own: where several users
    can write, another one could have put a link under any name that can be guessed.
    """
    if final.parent.is_dir():
        own = Path(tempfile.mkdtemp(prefix=".", dir=final.parent))
        temporary = own / final.name
    else:
        # Some ways to save make the folders above.
        own = temporary = final.with_name(f".{os.getpid()}-{final.name}")
    try:
        yield temporary
    finally:
        if own.is_dir():
            shutil.rmtree(own)
        else:
            own.unlink(missing_ok=True)
