"""Downloads with `keras.utils.get_file`: one worker of a host downloads, and the others wait.

There is a lock for each origin in the user's cache folder. A record in the run's folder gives the n-th call
of every worker the same result.
"""

import hashlib
import json
import os
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from lockstep.errors import PeerStuckError
from lockstep.observability.events import DownloadAwaited
from lockstep.system.environment import cache_folder
from lockstep.system.files import closed_after, open_regular
from lockstep.system.locks import wait_for_lock
from lockstep.system.paths import RunPaths
from lockstep.system.thread_value import ThreadValue
from lockstep.worker.import_hooks import when_imported
from lockstep.worker.patch_registry import PATCHES
from lockstep.worker.private_modules import KERAS_DOWNLOADS

_FIRST_REPORT = 5.0
_REPORT_EVERY = 30.0
_PATIENCE = 3600.0
"""Seconds that a worker waits for a download of another process."""
_MOST_HOLDER = 8192


@cache
def patch_get_file() -> None:
    """Patch `get_file` so that workers take turns, in this process or a forked one, after `share_downloads`.

    Call this before Keras is imported, because datasets keep the function that they find at their import.
    """
    when_imported({KERAS_DOWNLOADS: _patch})


def share_downloads(run: Path, agent: int, worker: int, publish: Callable[[DownloadAwaited], None]) -> None:
    """Let this worker take turns in `get_file` with the others.

    Workers that make the same call share its result: the first downloads, checks and unpacks the file.

    Args:
        run: the run's folder.
        agent: process id of the agent.
        worker: this worker's id.
        publish: called with an event while this worker waits for another download.
    """
    patch_get_file()
    folders = (cache_folder() / "downloads", run / "downloads")
    # An earlier run may have used the same folder.
    _taking_part[:] = [Turns(folders, RunPaths(run).downloaded, f"{agent} {run}", worker, publish)]
    os.register_at_fork(after_in_child=_taking_part.clear)


class Turns:
    """The turns of one worker: the process that holds the lock of an origin downloads from there.

    The kernel releases the lock of a process that ends, so the next worker retries an incomplete download.

    Args:
        folders: candidates for the folder of locks, of which the first usable one is used. Other jobs of this
            user with the same folder wait.
        record: the file in which the workers of the job record their downloads.
        job: identifies the job.
        worker: this worker's id.
        publish: called with an event while this worker waits for another download.
        patience: seconds to wait for another process.
    """

    def __init__(
        self,
        folders: tuple[Path, ...],
        record: Path,
        job: str,
        worker: int,
        publish: Callable[[DownloadAwaited], None],
        patience: float = _PATIENCE,
    ) -> None:
        self._folders = folders
        self._record = record
        self._job = job
        self._worker = worker
        self._publish = publish
        self._patience = patience
        self._calls: Counter[str] = Counter()

    def take(self, origin: str, name: str, purpose: str, download: Callable[[], str]) -> str:
        """Return the result of `download`, or its result on another worker that made the same call.

        Args:
            origin: the address; two downloads from it never run at the same time.
            name: the name of the file, for messages.
            purpose: all arguments of the call; the n-th call with equal ones is the same on every worker.
            download: downloads the file; if it raises, the next worker calls its own.

        Raises:
            PeerStuckError: another process has been downloading for an hour.
        """
        self._calls[purpose] += 1
        call = _digest(f"{self._job} {purpose} {self._calls[purpose]}")
        with self._locked(_digest(origin), name):
            path = self._done(call)
            if path is None:
                path = download()
                self._note(call, path)
            return path

    @contextmanager
    def _locked(self, origin: str, name: str) -> Iterator[None]:
        file, descriptor = self._lock(origin, name)
        try:
            holder = {"job": self._job, "worker": self._worker, "process": os.getpid(), "host": _host()}
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(holder).encode(), 0)
            # The name is unique to this host and lock: any other process that wrote it has ended.
            with _partial_name.within(f".{_digest(f'{_host()} {file}')}.part"):
                yield
        finally:
            os.close(descriptor)

    def _lock(self, origin: str, name: str) -> tuple[Path, int]:
        reported = _FIRST_REPORT - _REPORT_EVERY

        def waiting(waited: float) -> None:
            nonlocal reported
            if waited - reported >= _REPORT_EVERY:
                reported = waited
                self._publish(DownloadAwaited(name, self._holder(file), round(waited)))

        refused: OSError | None = None
        for folder in self._folders:
            file = folder / origin
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                descriptor = wait_for_lock(file, self._patience, waiting)
            except OSError as error:
                refused = error
            else:
                if descriptor is None:
                    raise PeerStuckError(
                        f"{self._holder(file)} has not downloaded {name} within {self._patience:g} s; check "
                        "whether its network and disk respond, or download the file before the job"
                    )
                return file, descriptor
        raise refused or OSError("there is no folder for locks")

    def _holder(self, file: Path) -> str:
        """Name the holder of a lock."""
        try:
            with closed_after(open_regular(file)) as descriptor:
                holder = json.loads(os.pread(descriptor, _MOST_HOLDER, 0))
            worker, process, host = holder["worker"], holder["process"], holder.get("host", _host())
            if holder["job"] == self._job:
                return f"worker {worker}"
            # Another host of this job has another run folder.
            return f"another job (process {process})" if host == _host() else f"process {process} on {host}"
        except (OSError, ValueError, KeyError, TypeError):
            # It has only just acquired the lock.
            return "another process"

    def _done(self, call: str) -> str | None:
        """Return the path that a worker returned from a call, if it still exists."""
        try:
            lines = self._record.read_text(errors="surrogateescape").split("\n")
        except FileNotFoundError:
            return None
        for line in lines:
            done, _, path = line.partition(" ")
            if done == call and Path(path).exists():
                return path
        return None

    def _note(self, call: str, path: str) -> None:
        if "\n" not in path:
            with self._record.open("a", errors="surrogateescape") as file:
                file.write(f"{call} {path}\n")


def _patch(file_utils: ModuleType) -> None:
    PATCHES.wrap(__name__, file_utils, "get_file", _get_in_turn)
    PATCHES.wrap(__name__, file_utils, "urlretrieve", _retrieve_whole)


def _get_in_turn(
    get_file: Callable[..., Any], fname: Any = None, origin: Any = None, *args: Any, **kwargs: Any
) -> Any:
    if not _taking_part or not isinstance(origin, str):
        return get_file(fname, origin, *args, **kwargs)
    purpose = repr((fname, origin, args, sorted(kwargs.items())))
    name = str(fname or Path(urllib.parse.urlsplit(origin).path).name)
    return _taking_part[0].take(origin, name, purpose, lambda: get_file(fname, origin, *args, **kwargs))


def _retrieve_whole(
    urlretrieve: Callable[..., Any], url: str, filename: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Rename the file when it is complete, so that a killed process does not leave a partial file."""
    partial = _partial_name.value
    if partial is None or filename is None:
        return urlretrieve(url, filename, *args, **kwargs)
    final = Path(os.path.realpath(filename))
    beside = final.with_name(partial)
    try:
        _, headers = urlretrieve(url, beside, *args, **kwargs)
        beside.replace(final)
    finally:
        beside.unlink(missing_ok=True)
    return filename, headers


def _host() -> str:
    return os.uname().nodename


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]


_partial_name: ThreadValue[str | None] = ThreadValue(None)
"""The name of the file into which this thread downloads."""
_taking_part: list[Turns] = []
