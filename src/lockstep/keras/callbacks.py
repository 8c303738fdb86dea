"""What Keras's own callbacks do on workers that are not the chief, when they would write files.

The only file that touches the private parts of Keras's callbacks.
"""

from collections.abc import Sequence
from typing import Any

import keras

_LOGS = (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard)


class FollowingCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Decides as the chief's does, and leaves writing to it."""

    def _save_model(self, epoch: int, batch: int | None, logs: Any) -> None:
        self._should_save_model(epoch, batch, logs, self._get_file_path(epoch, batch, logs))


class FollowingBackup(keras.callbacks.BackupAndRestore):  # type: ignore[misc]
    """Restores as the chief's does, and leaves writing and removing to it."""

    def _save_model(self) -> None:
        pass

    def on_train_end(self, logs: Any = None) -> None:
        """Leave the backup to the chief."""


_FOLLOWING = {
    keras.callbacks.ModelCheckpoint: FollowingCheckpoint,
    keras.callbacks.BackupAndRestore: FollowingBackup,
}


def following(callbacks: Any) -> Any:
    """Return the callbacks of a worker that is not the chief, in place of the user's.

    Keras's own callbacks that write logs are left out, and those that save models only decide. The user's
    own callbacks, subclasses of Keras's included, stay as they are.
    """
    if callbacks is None or isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    given: Sequence[Any] = keras.tree.flatten(callbacks)
    return [_follow(callback) for callback in given if type(callback) not in _LOGS]


def writes(callbacks: Any) -> bool:
    """Whether the chief's callbacks may still be writing when its `fit` returns and others go on."""
    kinds = (*_FOLLOWING, *_LOGS)
    return any(isinstance(callback, kinds) for callback in keras.tree.flatten(callbacks or []))


def _follow(callback: Any) -> Any:
    follower = _FOLLOWING.get(type(callback))
    if follower is None:
        return callback
    made = follower.__new__(follower)
    # The same state, not a copy: what the user looks at later, and what the next fit goes on from.
    made.__dict__ = vars(callback)
    return made
