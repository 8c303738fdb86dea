"""Keras's own callbacks that write: on the current chief only, or on one worker of each host.

A program may read the files of `ModelCheckpoint` and `BackupAndRestore`, so each host has its own copy of
them, unless the hosts share the disk. Only the chief writes logs.

The other workers follow the decisions of these callbacks, and `fit` returns when the chief's files are
complete. Callbacks of the user run on every worker. In a file system that hosts can share, only the chief
writes. `BackupAndRestore` compares its folder on all hosts before it restores.
"""

import contextlib
import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import keras
import msgspec

from lockstep.errors import InputError
from lockstep.keras.kept_saves import SavesAtEnd
from lockstep.keras.private.common import (
    ORBAX_CHECKPOINT,
    BackupWriter,
    CheckpointWriter,
    OrbaxWriter,
    ProgressBar,
)
from lockstep.keras.python_values import is_of_keras
from lockstep.keras.state.callback_states import listed
from lockstep.keras.worker_exchange import agree
from lockstep.system.mounts import is_shared
from lockstep.system.notes import note
from lockstep.worker import job
from lockstep.worker.program_sources import file_hash


class HostCheckpoint(CheckpointWriter):
    """Decides on every worker, and writes on each host."""

    def save_to(self, path: str, write: Callable[[], None]) -> None:
        """Write on each host."""
        _once_per_disk(path, write)


class HostOrbaxCheckpoint(OrbaxWriter):
    """Decides on every worker, and writes on each host, in the background as Keras's does."""

    directory: str

    def save_to(self, step: int, write: Callable[[], None]) -> None:
        """Write on each host, unless a lost process had already completed the checkpoint."""
        folder = Path(self.directory) / str(step)
        existed = folder.exists()
        _once_per_disk(self.directory, lambda: None if folder.exists() and not existed else write())


class HostBackup(BackupWriter):
    """Restores on every worker. Writes and removes on each host."""

    resumes: bool

    def on_train_begin(self, logs: Any = None) -> None:
        """Restore, unless the job resumes from a checkpoint of its own.

        Raises:
            DisagreementError: hosts have different backups.
        """
        if not self.resumes:
            current_job = job.current()
            if len(current_job.view.hosts) > 1:
                agree(current_job, "the beginning of the training", {"backup": self._description()})
            super().on_train_begin(logs)

    def _description(self) -> str:
        """Describe the backup on this host."""
        hashes = [file_hash(Path(file)) for file in self.files() if "://" not in file]
        return " ".join(f"#{text[:16]}" for text in hashes if text) or "none"

    def save_to(self, path: str, write: Callable[[], None]) -> None:
        """Write on each host."""
        _once_per_disk(path, write)

    def on_train_end(self, logs: Any = None) -> None:
        """Remove the backup."""
        _once_per_disk(self.backup_dir, lambda: self._remove(logs))

    def _remove(self, logs: Any) -> None:
        # A disk that hosts share cannot always be recognized: another host may have removed the folder.
        with contextlib.suppress(FileNotFoundError):
            super().on_train_end(logs)


class ChiefCSVLogger(keras.callbacks.CSVLogger):  # type: ignore[misc]
    """Writes on the chief. Every worker counts the rows, so that a new chief can continue the file."""

    append: bool
    resumes: bool
    rows: int
    here: bool

    def on_train_begin(self, logs: Any = None) -> None:
        """Open the file, on the chief."""
        self.here = _with_chief()
        self.rows = len(_lines(Path(self.filename))[1:]) if self.append else 0
        if not self.resumes:
            job.current().as_chief(lambda: keras.callbacks.CSVLogger.on_train_begin(self, logs))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Write a row, on the chief."""
        rows, self.rows = self.rows, self.rows + 1
        here = _with_chief()
        # If a new chief repeats this, later callbacks have changed `logs`.
        as_of_now = dict(logs or {})
        job.current().as_chief(lambda: self._write(rows, epoch, as_of_now))
        # This worker may not have been on the chief's host before.
        self.here = self.here or here

    def on_train_end(self, logs: Any = None) -> None:
        """Close the file, on the chief."""
        job.current().as_chief(self._close)

    def _write(self, rows: int, epoch: int, logs: Any) -> None:
        if self.csv_file is None or self.csv_file.closed:
            # Another process has written these rows, and perhaps more rows or a part of one.
            path = Path(self.filename)
            # If that process was on another host, a file here belongs to another run.
            lines = _lines(path) if self.here or is_shared(path.absolute()) else []
            if len(lines) <= rows and len(job.current().view.hosts) > 1:
                note(f"{path} lacks the rows that another host has written")
            path.write_bytes(b"".join(lines[: 1 + rows]))
            append, self.append = self.append, True
            super().on_train_begin()
            self.append = append
        super().on_epoch_end(epoch, logs)

    def _close(self) -> None:
        if self.csv_file is not None and not self.csv_file.closed:
            super().on_train_end()


class ChiefProgbar(ProgressBar):
    """Shows progress on the chief."""

    async_safe = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Start a bar."""
        self.reset()
        job.current().as_chief(lambda: keras.callbacks.ProgbarLogger.on_epoch_begin(self, epoch, logs))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Update the bar."""
        if job.is_chief():
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Finish the bar."""
        job.current().as_chief(lambda: self.finish(logs))


class OnChief(keras.callbacks.Callback):  # type: ignore[misc]
    """Calls another callback on the chief. A new chief starts with its `on_train_begin`."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self._inner = inner
        self.begun = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Begin."""
        self._do()

    def _do(self, method: str | None = None, *args: Any, **kwargs: Any) -> None:
        job.current().as_chief(lambda: self._call(method, args, kwargs))

    def _call(self, method: str | None, args: Any, kwargs: Any) -> None:
        if not self.begun:
            self.begun = True
            self._inner.set_params(self.params)
            self._inner.set_model(self.model)
            self._inner.on_train_begin()
        if method is not None:
            getattr(self._inner, method)(*args, **kwargs)


def _on_chief(method: str) -> Callable[..., None]:
    def call(self: OnChief, *args: Any, **kwargs: Any) -> None:
        self._do(method, *args, **kwargs)

    return call


for _method in (
    *("on_train_end", "on_epoch_begin", "on_epoch_end", "on_train_batch_begin", "on_train_batch_end"),
    *("on_test_begin", "on_test_end", "on_test_batch_begin", "on_test_batch_end"),
):
    setattr(OnChief, _method, _on_chief(_method))


_PATHS = ("filepath", "filename", "log_dir", "backup_dir", "directory")
_ON_BATCH = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
_WRITERS = {
    keras.callbacks.ModelCheckpoint: HostCheckpoint,
    ORBAX_CHECKPOINT: HostOrbaxCheckpoint,
    keras.callbacks.BackupAndRestore: HostBackup,
    keras.callbacks.CSVLogger: ChiefCSVLogger,
    keras.callbacks.ProgbarLogger: ChiefProgbar,
}


def writing_once(callbacks: Any, verbose: Any, *, resumes: bool) -> Any:
    """Return the callbacks for `fit`, in which those of Keras do not write files on every worker.

    The program's own callbacks, including subclasses of Keras's, stay unchanged.

    Args:
        callbacks: the callbacks that the program passes.
        verbose: the argument that the program passes.
        resumes: whether the call began in another process, which has created the files.

    Raises:
        InputError: one of them needs a package that is not installed.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    flat: Sequence[Any] = keras.tree.flatten(callbacks) if callbacks else []
    if verbose and not any(isinstance(callback, keras.callbacks.ProgbarLogger) for callback in flat):
        flat = [*flat, ChiefProgbar()]
    return [_writing_once(callback, resumes) for callback in flat]


def chief_files(callbacks: Any) -> tuple[str, ...]:
    """Return the absolute paths of files that only the chief writes and that hosts do not share."""
    paths = []
    for callback in keras.tree.flatten(callbacks or []):
        inner = getattr(callback, "_inner", callback)
        names = [vars(inner).get(name) for name in ("filename", "log_dir")]
        if isinstance(callback, (ChiefCSVLogger, OnChief)):
            paths += [name for name in names if isinstance(name, str)]
    return tuple(str(Path(path).absolute()) for path in paths if not _shared(path))


def note_different_paths(current_job: job.Job, callbacks: Any, label: str, told: set[str]) -> None:
    """Note on the chief, before a `fit` trains, that other workers' callbacks have different paths.

    All workers of the view call this.

    Args:
        current_job: the job of this worker.
        callbacks: the callbacks of the call.
        label: names the call.
        told: the notes that were printed before, to which this adds new ones.
    """
    blob = msgspec.msgpack.encode((current_job.worker, paths_of(callbacks)))
    gathered = current_job.exchange(
        lambda _, exchange: exchange.gather(blob, what=f"the paths of callbacks in {label}")
    )
    texts = different_paths(
        [msgspec.msgpack.decode(blob, type=tuple[int, dict[str, str]]) for blob in gathered]
    )
    for text in texts if current_job.is_chief else ():
        if text not in told:
            note(text)
    told.update(texts)


def paths_of(callbacks: Any) -> dict[str, str]:
    """Return the program's paths of the callbacks of Keras that write once, by position and class."""
    paths = {}
    for position, callback in enumerate(keras.tree.flatten(listed(callbacks) if callbacks else [])):
        if type(callback) in _WRITERS or type(callback) is keras.callbacks.TensorBoard:
            for name in _PATHS:
                if isinstance(path := vars(callback).get(name), (str, os.PathLike)):
                    paths[f"{position} {type(callback).__name__}"] = os.fspath(path)
    return paths


def different_paths(gathered: Sequence[tuple[int, dict[str, str]]]) -> list[str]:
    """Describe how the callbacks' paths on a worker differ from the first worker's, one text per callback.

    Args:
        gathered: the id of each worker, the chief first, and the result of `paths_of` there.
    """
    (chief, paths), *others = gathered
    texts = []
    for key, path in paths.items():
        for worker, theirs in others:
            if theirs.get(key, path) != path:
                texts.append(
                    f"the path of {key.partition(' ')[2]} is {path} on worker {chief}, which writes it, and "
                    f"{theirs[key]} on worker {worker}, which will not find its own: give all workers "
                    "the same name, such as an argument of the script (see 'every-worker' in the "
                    "documentation)"
                )
                break
    return texts


def _once_per_disk(path: os.PathLike[str] | str, write: Callable[[], object]) -> None:
    """Call `write` on one worker of each host, or on the chief if all hosts see the same file."""
    current_job = job.current()
    (current_job.as_chief if _shared(path) else current_job.on_each_host)(write)


def _shared(path: os.PathLike[str] | str) -> bool:
    return "://" in os.fspath(path) or is_shared(Path(path).absolute())


def _with_chief() -> bool:
    """Whether this worker is on the chief's host."""
    current_job = job.current()
    return current_job.worker in current_job.view.hosts[0]


def writes(callbacks: Any) -> bool:
    """Whether the chief's callbacks may still be writing when `fit` returns on other workers."""
    classes = (*_WRITERS, keras.callbacks.TensorBoard)
    return any(isinstance(callback, classes) for callback in keras.tree.flatten(callbacks or []))


def without_writers(callbacks: Any) -> list[Any]:
    """Return the callbacks without Keras's callbacks that write files. Models are saved at the end."""
    return [
        SavesAtEnd(callback) if isinstance(callback, keras.callbacks.ModelCheckpoint) else callback
        for callback in keras.tree.flatten(callbacks or [])
        if isinstance(callback, keras.callbacks.ModelCheckpoint) or not writes([callback])
    ]


def has_batch_methods(callbacks: Any) -> bool:
    """Whether one of the program's own callbacks has a method for training batches."""
    methods = [getattr(callback, name, None) for callback in listed(callbacks) for name in _ON_BATCH]
    return any(method and not is_of_keras(getattr(method, "__module__", "") or "") for method in methods)


def _writing_once(callback: Any, resumes: bool) -> Any:
    if type(callback) is keras.callbacks.TensorBoard:
        if find_spec("tensorflow") is None:
            raise InputError(
                "keras.callbacks.TensorBoard cannot write without TensorFlow: remove the callback, and give "
                "lockstep run --tensorboard DIR, which needs the package tensorboard alone"
            )
        return OnChief(callback)
    writer_class = _WRITERS.get(type(callback))
    if writer_class is None:
        return callback
    made = writer_class.__new__(writer_class)
    # The copy shares its state with the original: the program may read it later, and the next fit continues
    # it.
    made.__dict__ = vars(callback)
    vars(callback)["resumes"] = resumes
    return made


def _lines(path: Path) -> list[bytes]:
    """Return the complete lines of a file, with their ends, or an empty list if the file does not exist."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [line for line in lines if line.endswith(b"\n")]
