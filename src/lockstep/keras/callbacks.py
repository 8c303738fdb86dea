"""What Keras's own callbacks do on workers that are not the chief, when they would write files.

The only file that touches the private parts of Keras's callbacks.
"""

from collections.abc import Sequence
from typing import Any

import keras

_LOGS = (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard)


class FollowingCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Decides as the chief's does; saving waits for the chief, which makes the folder."""

    def _save_model(self, epoch: int, batch: int | None, logs: Any) -> None:
        path = self._get_file_path(epoch, batch, logs)
        if self._should_save_model(epoch, batch, logs, path):
            save = self.model.save_weights if self.save_weights_only else self.model.save
            save(path, overwrite=True)


class FollowingBackup(keras.callbacks.BackupAndRestore):  # type: ignore[misc]
    """Restores as the chief's does; saving waits for the chief, and nothing else is written or removed."""

    def _save_model(self) -> None:
        self.model.save_weights(self._weights_path, overwrite=True)

    def on_train_end(self, logs: Any = None) -> None:
        """Leave the backup to the chief."""


_FOLLOWING = {
    keras.callbacks.ModelCheckpoint: FollowingCheckpoint,
    keras.callbacks.BackupAndRestore: FollowingBackup,
}


def following(callbacks: Any) -> Any:
    """Return the callbacks of a worker that is not the chief, in place of the user's.

    Keras's own callbacks that write logs are left out; those that save models take part in saving and
    write nothing else. The user's own callbacks, subclasses of Keras's included, stay as they are.
    """
    if callbacks is None or isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    given: Sequence[Any] = keras.tree.flatten(callbacks)
    return [_follow(callback) for callback in given if type(callback) not in _LOGS]


def _follow(callback: Any) -> Any:
    follower = _FOLLOWING.get(type(callback))
    if follower is None:
        return callback
    made = follower.__new__(follower)
    vars(made).update(vars(callback))
    return made
