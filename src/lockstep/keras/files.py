"""Saving a model that several workers hold: one of them writes, all return when it is there."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from lockstep.errors import PeerError
from lockstep.job import Job

Write = Callable[[str], object]


def write_together(
    job: Job, path: os.PathLike[str] | str, write: Write, *, method: str, rename: bool
) -> None:
    """Call `write` once for every path that the workers want written, and wait until it has returned.

    All workers call this; those that name the same path as a worker before them only wait.

    Args:
        job: this worker's.
        path: where this worker wants it written.
        write: writes to the path it is given.
        method: names the call, for messages.
        rename: write a local path under a temporary name beside it and rename that, so that no reader
            ever sees half a file; for what is one file or one folder.

    Raises:
        OSError: whatever `write` raised, on the worker that wrote.
        PeerError: on the others, when the one that wrote for them has failed.
    """
    workers, own = job.view.workers, os.fspath(path)
    wanted = [blob.decode() for blob in job.communicator.gather(own.encode(), what=f"{method} to {own}")]
    writer = workers[wanted.index(own)]
    failure: Exception | None = None
    if writer == job.worker:
        try:
            if rename and "://" not in own:
                _write_whole(Path(own), write)
            else:
                write(own)
        except Exception as error:
            failure = error
    outcomes = job.communicator.gather(str(failure or "").encode(), what=f"the end of {method} to {own}")
    if failure is not None:
        raise failure
    if problem := outcomes[workers.index(writer)].decode():
        raise PeerError(f"worker {writer} could not write {own}: {problem}")


def _write_whole(final: Path, write: Write) -> None:
    # The end of the name tells Keras which format is meant.
    temporary = final.with_name(f".{os.getpid()}-{final.name}")
    try:
        write(str(temporary))
        if final.is_dir() and temporary.is_dir():
            shutil.rmtree(final)
        temporary.replace(final)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        else:
            temporary.unlink(missing_ok=True)
