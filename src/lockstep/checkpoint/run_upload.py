"""A run folder in an object store: a process beside the job uploads the parts that have grown.

The job writes its local folder as it does without a store. The process reads the folder, and neither it nor
the store can stop or delay the job. It outlives the command. It notices the command's end through a pipe, and
then uploads the rest within a limit.

An index (`RunIndex`) lists the objects, and has the token of the run that uploads. Each command puts a new
token there before its job begins. A process that finds another token stops uploading, so an earlier run that
still exists on some machine does not change anything: it is fenced like a writer of checkpoints
(`mirror.py`). The folder also records the token (`store_mark`), so that the next command knows whether the
store or the folder has the newest files.

The process is not forked after it has used the store, because the library has threads of its own.
"""

import contextlib
import itertools
import os
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import msgspec

from lockstep.checkpoint.object_store import RETRY_SECONDS, SHORT_RETRY_SECONDS, Conflict, ObjectStore
from lockstep.checkpoint.run_files import (
    EVERY,
    INDEX,
    LARGE,
    LAST_SECONDS,
    RATE,
    FileState,
    RunIndex,
    UploadedFile,
    changed,
    due,
    is_kept,
    read_index,
)
from lockstep.errors import CheckpointError, ConfigError, UnfitError
from lockstep.system.child_process import command_of
from lockstep.system.exit_status import STOP_SIGNALS, describe_exit
from lockstep.system.files import FOLDER_MODE, open_regular, replace
from lockstep.system.notes import NOTE_EVERY, note
from lockstep.system.paths import RunPaths, is_verdict
from lockstep.system.prose import count, size_text

_PAUSE = 5.0
"""Seconds between two tries at the end."""
_NICE = 10


def _open(url: str, retry_seconds: float = RETRY_SECONDS) -> ObjectStore:
    # Folders on a disk know no conditional replacement.
    return ObjectStore(url, conditional=not url.startswith("file:"), retry_seconds=retry_seconds)


def _read(store: ObjectStore) -> tuple[RunIndex | None, str | None]:
    content = store.read(INDEX)
    return (None, None) if content is None else (read_index(content[0], store.url), content[1])


def _write(store: ObjectStore, index: RunIndex, tag: str | None) -> None:
    """Replace the index that has a tag; raise Conflict if it has another one."""
    try:
        store.replace(INDEX, msgspec.json.encode(index), tag)
    except NotImplementedError:
        raise ConfigError(
            f"{store.url} does not support conditional writes, without which two runs could damage each "
            "other's files there: use another store"
        ) from None


def _unsteady(store: ObjectStore) -> CheckpointError:
    return CheckpointError(f"{store.url}/{INDEX} changes while it is written; try again")


# ------------------------------------------------------------------------------------------- at the start


def prepare(url: str, folder: Path) -> None:
    """Take a place in a store for a run folder, and fetch the files of an earlier run there, if any.

    Files of the folder that do not belong to that run, or have grown without the store, move to another
    folder.

    Args:
        url: the prefix.
        folder: the folder of this machine, which exists and is locked.

    Raises:
        CheckpointError: the store cannot be read or written.
        ConfigError: the folder cannot be written, or the store does not support conditional writes.
        UnfitError: obstore is not installed.
    """
    store = _open(url, SHORT_RETRY_SECONDS)
    holder, marks = secrets.token_hex(8), _marks(folder)
    for is_last in (False, False, True):
        index, tag = _read(store)
        is_newest = index is None or not index.files or index.holder in marks
        if is_newest and files_of(folder):
            # The folder remains the newest one, whether or not this process survives the request.
            _mark(folder, holder, *((index.holder,) if index is not None else marks))
        try:
            _write(store, RunIndex(holder=holder, files=() if index is None else index.files), tag)
            break
        except Conflict:
            if is_last:
                raise _unsteady(store) from None
    if index is not None and not is_newest:
        _replace_files(store, index, folder)
    _mark(folder, holder)


def _replace_files(store: ObjectStore, index: RunIndex, folder: Path) -> None:
    """Move the files of a folder aside, and fetch those of a store."""
    fetched = RunPaths(folder).fetched
    shutil.rmtree(fetched, ignore_errors=True)
    try:
        fetched.mkdir(FOLDER_MODE)
        note(f"fetching {count(len(index.files), 'file')} of an earlier run from {store.url}")
        _fetch(store, index, fetched, lambda name: True)
        names = [name for name in _names(folder) if not is_verdict(name)]
        aside = _free_name(folder)
        _move_files(folder, aside)
        if all(_begins_with(fetched / name, aside / name) for name in names):
            # The earlier run continued the run of this folder.
            shutil.rmtree(aside, ignore_errors=True)
        else:
            note(f"{folder} had files of another run, which are in {aside} now")
        _move_files(fetched, folder)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}") from None
    finally:
        shutil.rmtree(fetched, ignore_errors=True)


def _names(folder: Path) -> list[str]:
    """Return the names of all files of a run, including links and files that are never uploaded."""
    paths = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    names = [path.relative_to(folder).as_posix() for path in paths]
    return [name for name in names if is_kept(name) or not name.isprintable()]


def _begins_with(path: Path, beginning: Path) -> bool:
    """Whether a file begins with the content of another one."""
    try:
        with path.open("rb") as file, beginning.open("rb") as other:
            while piece := other.read(LARGE):
                if file.read(len(piece)) != piece:
                    return False
    except OSError:
        return False
    return True


def _free_name(folder: Path) -> Path:
    names = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2))
    return next(name for name in names if not os.path.lexists(name))


def _move_files(folder: Path, to: Path) -> None:
    """Move all but the lock of a run folder."""
    to.mkdir(FOLDER_MODE, exist_ok=True)
    for path in folder.iterdir():
        if path not in (RunPaths(folder).lock, RunPaths(folder).fetched):
            path.rename(to / path.name)


def fetch_run(url: str, folder: Path, wanted: Callable[[str], bool]) -> None:
    """Copy files of a run folder from a store to an existing folder.

    Args:
        url: the prefix.
        folder: the folder to which to copy them.
        wanted: returns whether to copy the file with a name.

    Raises:
        CheckpointError: the store cannot be read.
        ConfigError: the store has no run there, or the folder cannot be written.
        UnfitError: obstore is not installed.
    """
    store = _open(url, SHORT_RETRY_SECONDS)
    index, _ = _read(store)
    if index is None or RunPaths(Path()).events.name not in index.files:
        raise ConfigError(f"there is no run in {url}")
    _fetch(store, index, folder, wanted)
    if not RunPaths(folder).events.exists():
        # The run has just begun, or was killed when it began.
        raise ConfigError(f"there is no run in {url}")


def _fetch(store: ObjectStore, index: RunIndex, folder: Path, wanted: Callable[[str], bool]) -> None:
    # A file may be absent: the run was killed before it could upload it.
    sizes = {name: size for name in filter(wanted, index.files) if (size := store.size(name)) is not None}
    left, noted = sum(sizes.values()), time.monotonic()
    for name, size in sizes.items():
        path = folder / name
        try:
            path.parent.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
            with path.open("wb") as file:
                for part in store.parts(name, size):
                    file.write(part)
                    left -= len(part)
                    if time.monotonic() - noted >= NOTE_EVERY:
                        noted = time.monotonic()
                        note(f"fetching {size_text(left)} more of the run from {store.url}")
        except FileNotFoundError:
            raise CheckpointError(
                f"{store.url}/{name} changes while it is read; wait for the run to end"
            ) from None
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def _marks(folder: Path) -> tuple[str, ...]:
    try:
        return tuple(RunPaths(folder).store_mark.read_text().split())
    except (OSError, ValueError):
        return ()


def _mark(folder: Path, *holders: str) -> None:
    path = RunPaths(folder).store_mark
    try:
        replace(path, " ".join(holders).encode())
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


# --------------------------------------------------------------------------------------- while a job runs


class _TakenOver(Exception):
    """Another process uploads to the prefix."""


class RunUpload:
    """Uploads the growth of a run folder.

    Args:
        folder: the folder.
        url: the prefix.
        holder: the token of the run there.
        connect: opens the store.
        say: shows a note.
        now: the time in seconds.
        wait: waits for some seconds.
    """

    def __init__(
        self,
        folder: Path,
        url: str,
        holder: str,
        connect: Callable[[str], ObjectStore] = _open,
        say: Callable[[str], None] = note,
        now: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self._folder = folder
        self._url = url
        self._connect = connect
        self._say = say
        self._now = now
        self._wait = wait
        self._store: ObjectStore | None = None
        self._holder = holder
        self._taken_over = False
        self._uploaded: dict[str, UploadedFile] = {}
        self._listed = set[str]()
        self._refused = set[str]()
        self._failures = 0
        self._reason = ""

    def run(self, ended: threading.Event) -> None:
        """Upload the folder's growth until the job has ended, and then the rest, until nothing is left."""
        while not self._taken_over:
            self.advance()
            if ended.wait(EVERY):
                break
        while not (self._taken_over or self.advance(last=True)):
            self._wait(_PAUSE)
        self._withdraw()

    def advance(self, *, last: bool = False) -> bool:
        """Upload the files that may be uploaded now, or all if `last`; return whether that succeeded."""
        files = files_of(self._folder)
        if not RunPaths(self._folder).events.exists() or self._taken_over:
            # A command that is refused before its job begins does not leave anything in the store.
            return True
        names = changed(files, self._uploaded) if last else due(files, self._uploaded, self._now())
        if not (names or self._listed - files.keys()):
            return True
        try:
            return self._upload(files, names)
        except _TakenOver:
            self._taken_over = True
            self._say(f"another run uploads to {self._url}, so this one has stopped; {self._where()}")
        except (CheckpointError, ConfigError, UnfitError) as error:
            self._fail(str(error))
        return False

    def left(self) -> tuple[int, int]:
        """Return the number of files that the store lacks entirely or in part, and their bytes."""
        files = files_of(self._folder)
        names = changed(files, self._uploaded) if RunPaths(self._folder).events.exists() else []
        return len(names), sum(files[name].size for name in names)

    def verdict(self) -> str:
        """Return how the upload ended if it had problems; empty otherwise."""
        number, _ = self.left()
        why = "another run uploads there" if self._taken_over else self._reason
        if number or self._taken_over:
            return (
                f"{self._url} lacks {count(number, 'file')} of the run, or their ends: "
                f"{why or 'the time limit has passed'}; {self._where()}"
            )
        if self._failures:
            failed = count(self._failures, "upload")
            return f"the run folder is complete in {self._url}; {failed} failed before"
        return ""

    def _upload(self, files: dict[str, FileState], names: list[str]) -> bool:
        if self._store is None:
            self._store = self._connect(self._url)
        store = self._store
        self._hold(store, files)
        failures = 0
        # A file that the store refuses does not delay other files.
        for name in sorted(names, key=self._refused.__contains__):
            try:
                os.close(open_regular(self._folder / name))
            except FileNotFoundError:
                # The next round notices.
                continue
            except OSError as error:
                self._fail(f"{name} cannot be read: {error.strerror}")
                continue
            try:
                store.put(name, self._folder / name, files[name].size)
            except CheckpointError as error:
                self._refused.add(name)
                failures += 1
                if failures > 1:
                    raise
                self._fail(f"{name}: {error}")
                continue
            self._refused.discard(name)
            self._uploaded[name] = UploadedFile(files[name], self._now())
        # This includes files of an earlier run that the job has removed at its start.
        gone = self._listed - files.keys()
        store.delete(gone)
        for name in gone:
            self._uploaded.pop(name, None)
        self._listed -= gone
        return not failures

    def _hold(self, store: ObjectStore, files: dict[str, FileState]) -> None:
        """Check that no other process uploads here, and list the files."""
        index, tag = _read(store)
        if index is not None and index.holder != self._holder:
            raise _TakenOver
        if index is None and self._uploaded:
            # The user has emptied the prefix.
            self._uploaded.clear()
            self._listed.clear()
            raise CheckpointError(f"{store.url}/{INDEX} was removed")
        self._listed |= {*files, *(() if index is None else index.files)}
        wanted = RunIndex(holder=self._holder, files=tuple(sorted(self._listed)))
        if index != wanted:
            try:
                _write(store, wanted, tag)
            except Conflict:
                raise _unsteady(store) from None

    def _withdraw(self) -> None:
        """Remove the index of a command that was refused before its job began, if no run is there."""
        if RunPaths(self._folder).events.exists():
            return
        with contextlib.suppress(CheckpointError, UnfitError):
            store = self._connect(self._url)
            index, _ = _read(store)
            if index is not None and index.holder == self._holder and not index.files:
                store.delete([INDEX])
                RunPaths(self._folder).store_mark.unlink(missing_ok=True)

    def _fail(self, why: str) -> None:
        self._failures, self._reason = self._failures + 1, why
        if self._failures == 1:
            self._say(
                f"the run folder cannot be uploaded now: {why}; the job continues, and the upload is tried "
                f"again every {EVERY:g} s"
            )

    def _where(self) -> str:
        return f"{self._folder} has everything"


def files_of(folder: Path) -> dict[str, FileState]:
    """Return the states of the files of a run folder that belong in a store, by name."""
    files = {}
    for root, _, names in os.walk(folder):
        for each in names:
            path = Path(root, each)
            name = path.relative_to(folder).as_posix()
            with contextlib.suppress(OSError):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode) and is_kept(name):
                    files[name] = FileState(status.st_size, status.st_mtime_ns)
    return files


# ------------------------------------------------------------------------------------ the process beside it


class _CutOff(Exception):
    """The user does not want to wait for the rest."""


@contextlib.contextmanager
def uploaded_beside(folder: Path, url: str) -> Iterator[None]:
    """Upload a run folder to a store in a separate process, and upload the rest at the end of the block.

    The upload cannot stop the block, or delay it before its end. SIGINT and SIGTERM end the wait at the end.

    Args:
        folder: the folder of the run.
        url: the prefix of the store; see `prepare`.
    """
    # `prepare` has written the token. A standby has none, because its prefix is new.
    holder = next(iter(_marks(folder)), secrets.token_hex(8))
    try:
        # In a new session, Ctrl-C reaches only the command.
        process = subprocess.Popen(
            command_of(__spec__.name, url, os.fspath(folder.absolute()), holder),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        note(f"the run folder is not uploaded to {url}: no process can be started: {error.strerror}")
        yield
        return
    assert process.stdin is not None
    try:
        yield
    finally:
        try:
            with _cut_off_by_signals():
                process.stdin.close()
                status = process.wait()
            if status:
                note(f"the upload of {folder} to {url} {describe_exit(status)}; the folder has everything")
        except _CutOff:
            process.kill()
            process.wait()
            note(f"the end of the run is not uploaded to {url}; {folder} has everything")


@contextlib.contextmanager
def _cut_off_by_signals() -> Iterator[None]:
    def cut_off(number: int, frame: FrameType | None) -> None:
        raise _CutOff

    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, cut_off)
        yield
    finally:
        for restored, handler in before.items():
            signal.signal(restored, handler)


def main(url: str, folder: Path, holder: str) -> int:
    """Upload a run folder until stdin is closed, and then the rest; return 0, whatever the store does."""
    for ignored in STOP_SIGNALS:
        # Signals of a service manager are for the command.
        signal.signal(ignored, signal.SIG_IGN)
    os.nice(_NICE)
    upload, ended = RunUpload(folder, url, holder), threading.Event()
    thread = threading.Thread(target=upload.run, args=(ended,), daemon=True)
    thread.start()
    sys.stdin.buffer.read()
    ended.set()
    give_up = time.monotonic() + LAST_SECONDS + upload.left()[1] / RATE
    while thread.is_alive() and time.monotonic() < give_up:
        thread.join(NOTE_EVERY)
        if thread.is_alive():
            number, size = upload.left()
            note(f"uploading {count(number, 'file')} of the run, {size_text(size)}, to {url}")
    if text := upload.verdict():
        note(text)
    return 0


if __name__ == "__main__":
    # The thread may wait for a store that does not answer.
    os._exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
