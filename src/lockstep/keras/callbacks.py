"""Keras's own callbacks that write: on the chief, whoever that is at the time.

The only file that touches the private parts of Keras's callbacks.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras

from lockstep import job


class ChiefCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Decides on every worker, and writes on the chief."""

    def _save_model(self, epoch: int, batch: int | None, logs: Any) -> None:
        if self._should_save_model(epoch, batch, logs, self._get_file_path(epoch, batch, logs)):
            job.current().as_chief(lambda: self._write(epoch, batch, logs))

    def _write(self, epoch: int, batch: int | None, logs: Any) -> None:
        self.__dict__["_should_save_model"] = lambda *args: True
        try:
            super()._save_model(epoch, batch, logs)
        finally:
            del self.__dict__["_should_save_model"]


class ChiefBackup(keras.callbacks.BackupAndRestore):  # type: ignore[misc]
    """Restores on every worker; writes and removes on the chief."""

    def _save_model(self) -> None:
        job.current().as_chief(super()._save_model)

    def on_train_end(self, logs: Any = None) -> None:
        """Remove the backup, on the chief."""
        job.current().as_chief(lambda: keras.callbacks.BackupAndRestore.on_train_end(self, logs))


class ChiefCSVLogger(keras.callbacks.CSVLogger):  # type: ignore[misc]
    """Writes on the chief; the next chief goes on in the same file."""

    append: bool

    def on_train_begin(self, logs: Any = None) -> None:
        """Open the file, on the chief."""
        job.current().as_chief(lambda: keras.callbacks.CSVLogger.on_train_begin(self, logs))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Write a row, on the chief."""
        job.current().as_chief(lambda: self._write(epoch, logs))

    def on_train_end(self, logs: Any = None) -> None:
        """Close the file, on the chief."""
        job.current().as_chief(self._close)

    def _write(self, epoch: int, logs: Any) -> None:
        if self.csv_file is None or self.csv_file.closed:
            written = _end_last_line(Path(self.filename))
            own, self.append = self.append, True
            super().on_train_begin()
            self.append = own
            if written.split(self.sep)[0] == str(epoch):
                # The one before has come as far as that.
                return
        super().on_epoch_end(epoch, logs)

    def _close(self) -> None:
        if self.csv_file is not None and not self.csv_file.closed:
            super().on_train_end()


class ChiefProgbar(keras.callbacks.ProgbarLogger):  # type: ignore[misc]
    """Shows progress on the chief."""

    async_safe = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin a bar."""
        self._reset_progbar()
        job.current().as_chief(lambda: keras.callbacks.ProgbarLogger.on_epoch_begin(self, epoch, logs))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Move the bar."""
        if job.is_chief():
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """End the bar."""
        job.current().as_chief(lambda: self._end(logs))

    def _end(self, logs: Any) -> None:
        self._maybe_init_progbar()
        self._finalize_progbar(logs)


class OnChief(keras.callbacks.Callback):  # type: ignore[misc]
    """Calls another callback on the chief; whoever becomes the chief begins with it anew."""

    async_safe = True

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self._inner = inner
        self._begun = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Begin."""
        self._do()

    def on_train_end(self, logs: Any = None) -> None:
        """Pass on."""
        self._do("on_train_end", logs)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Pass on."""
        self._do("on_epoch_begin", epoch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Pass on."""
        self._do("on_epoch_end", epoch, logs)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Pass on."""
        self._do("on_train_batch_begin", batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Pass on."""
        self._do("on_train_batch_end", batch, logs)

    def on_test_begin(self, logs: Any = None) -> None:
        """Pass on."""
        self._do("on_test_begin", logs)

    def on_test_end(self, logs: Any = None) -> None:
        """Pass on."""
        self._do("on_test_end", logs)

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Pass on."""
        self._do("on_test_batch_begin", batch, logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Pass on."""
        self._do("on_test_batch_end", batch, logs)

    def _do(self, method: str | None = None, *arguments: Any) -> None:
        job.current().as_chief(lambda: self._pass_on(method, *arguments))

    def _pass_on(self, method: str | None, *arguments: Any) -> None:
        if not self._begun:
            self._begun = True
            self._inner.set_params(self.params)
            self._inner.set_model(self.model)
            self._inner.on_train_begin()
        if method is not None:
            getattr(self._inner, method)(*arguments)


_ON_CHIEF = {
    keras.callbacks.ModelCheckpoint: ChiefCheckpoint,
    keras.callbacks.BackupAndRestore: ChiefBackup,
    keras.callbacks.CSVLogger: ChiefCSVLogger,
    keras.callbacks.ProgbarLogger: ChiefProgbar,
}


def on_chief(callbacks: Any, verbose: Any) -> Any:
    """Return what `fit` is given instead of the user's callbacks: those of Keras's that write do it once.

    The user's own callbacks, subclasses of Keras's included, stay as they are.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    given: Sequence[Any] = keras.tree.flatten(callbacks) if callbacks else []
    if verbose and not any(isinstance(callback, keras.callbacks.ProgbarLogger) for callback in given):
        given = [*given, ChiefProgbar()]
    return [_on_chief(callback) for callback in given]


def writes(callbacks: Any) -> bool:
    """Whether the chief's callbacks may still be writing when its `fit` returns and others go on."""
    kinds = (*_ON_CHIEF, keras.callbacks.TensorBoard)
    return any(isinstance(callback, kinds) for callback in keras.tree.flatten(callbacks or []))


def _on_chief(callback: Any) -> Any:
    if type(callback) is keras.callbacks.TensorBoard:
        return OnChief(callback)
    kind = _ON_CHIEF.get(type(callback))
    if kind is None:
        return callback
    made = kind.__new__(kind)
    # The same state, not a copy: what the user looks at later, and what the next fit goes on from.
    made.__dict__ = vars(callback)
    return made


def _end_last_line(path: Path) -> str:
    """Cut off what follows the last end of a line; return the last line."""
    if not path.exists():
        return ""
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        path.write_bytes(whole)
    lines = whole.decode(errors="replace").splitlines()
    return lines[-1] if lines else ""
