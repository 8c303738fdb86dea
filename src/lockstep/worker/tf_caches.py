"""Files of `tf.data.Dataset.cache(filename)`: one worker of a job fills the file, others have their own.

TensorFlow refuses a second process that fills the same file. A file that an earlier run has completed serves
all workers. The files of the other workers are beside it and end with their worker. The same is true of
pipelines that a program makes for each replica, whose elements differ.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from lockstep.system.mounts import is_shared
from lockstep.worker.import_hooks import when_imported
from lockstep.worker.patch_registry import PATCHES

_COMPLETE = ".index"
"""At the end of the name of a file that exists once a cache is complete."""


class CacheOwner(NamedTuple):
    """The facts about the worker of this process that matter for caches.

    Attributes:
        worker: its id.
        is_first: whether it has begun as the chief of the job.
        leads_host: whether it has begun as the first worker of its host.
    """

    worker: int
    is_first: bool
    leads_host: bool


class _Caches:
    """The caches of this process.

    Attributes:
        owner: this worker; None outside of a job.
        replica: the replica of the pipeline that the program is making; None elsewhere.
    """

    def __init__(self) -> None:
        self.owner: CacheOwner | None = None
        self.replica: int | None = None
        self._created: set[str] = set()

    def path(self, filename: str) -> str:
        """Return the path of the file that this process reads and fills for `filename`."""
        if self.owner is None or not filename:
            return filename
        if self.replica is None:
            shared = "://" in filename or is_shared(Path(filename).absolute())
            if (self.owner.is_first if shared else self.owner.leads_host) or _exists(filename + _COMPLETE):
                return filename
        of = "" if self.replica is None else f".replica-{self.replica}"
        path = f"{filename}{of}.worker-{self.owner.worker}"
        if path not in self._created:
            # An earlier run has left the file.
            _remove(path)
            self._created.add(path)
        return path

    def remove(self) -> None:
        """Remove the files that no other process uses."""
        for path in self._created:
            _remove(path)
        self._created.clear()


_caches = _Caches()


def divide_caches(owner: CacheOwner) -> Callable[[], None]:
    """Give this process its own files when it imports TensorFlow; return a function that removes them."""
    _caches.owner = owner
    when_imported({"tensorflow": _patch})
    return _caches.remove


@contextmanager
def caches_of_replica(replica: int) -> Iterator[None]:
    """Mark the block, in which the program makes the pipeline of a replica."""
    before, _caches.replica = _caches.replica, replica
    try:
        yield
    finally:
        _caches.replica = before


def _patch(tensorflow: ModuleType) -> None:
    if not PATCHES.has(__name__):
        PATCHES.wrap(__name__, tensorflow.data.Dataset, "cache", _cache_in_own_file)


def _cache_in_own_file(
    original: Callable[..., Any], dataset: Any, filename: Any = "", *args: Any, **kwargs: Any
) -> Any:
    if isinstance(filename, str | os.PathLike):
        filename = _caches.path(os.fspath(filename))
    return original(dataset, filename, *args, **kwargs)


def _exists(path: str) -> bool:
    return bool(sys.modules["tensorflow"].io.gfile.exists(path))


def _remove(path: str) -> None:
    """Remove the files of a cache."""
    gfile = sys.modules["tensorflow"].io.gfile
    pattern = "".join(f"[{letter}]" if letter in "*?[" else letter for letter in path)
    for suffix in (".index", ".data-*", "_*.index", "_*.data-*", "_*.lockfile", ".tmp*"):
        for file in gfile.glob(pattern + suffix):
            gfile.remove(file)
