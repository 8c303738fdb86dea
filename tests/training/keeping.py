"""The program of `resuming` where one `fit` is given `lockstep.callbacks.Checkpoint`.

    keeping.py FOLDER FIT EXECUTION [HOW WHERE]

FIT is the number of the `fit` with the callback, 0 for none; it saves checkpoints in FOLDER/kept. The model
is compiled with EXECUTION steps per execution. HOW and WHERE are as for `resuming`; without the command,
"stopped" is SIGTERM to this process. With "chiefs", only worker 0 is lost there, and worker 1 after step 2 of
the second `fit`.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

KEPT = Path(sys.argv[1], "kept")
FIT, EXECUTION = int(sys.argv.pop(2)), int(sys.argv.pop(2))

import keras  # noqa: E402
import resuming  # noqa: E402

import lockstep  # noqa: E402

# It looks up Keras's callbacks when it is imported: before one of them is replaced below.
import lockstep.keras.fit.callbacks  # noqa: E402
from lockstep.worker import job  # noqa: E402


class Model(keras.Sequential):  # type: ignore[misc]
    """Gives the callback to one of its calls."""

    fits = 0

    def compile(self, *args: Any, **kwargs: Any) -> None:
        super().compile(*args, **kwargs, steps_per_execution=EXECUTION)

    def fit(self, *args: Any, callbacks: list[Any], **kwargs: Any) -> Any:
        Model.fits += 1
        if Model.fits == FIT:
            callbacks = [*callbacks, lockstep.callbacks.Checkpoint(KEPT, every=2)]
        return super().fit(*args, callbacks=callbacks, **kwargs)


class NoBackup(keras.callbacks.Callback):  # type: ignore[misc]
    """Replaces `BackupAndRestore`, which requires a built model on TensorFlow."""

    def __init__(self, folder: str) -> None:
        super().__init__()


def at(where: str, otherwise: Any = resuming.kill_at) -> None:
    """Cause what HOW selects."""
    if resuming.HOW == "chiefs":
        if where == {0: resuming.WHERE, 1: "fit 2 step 2"}.get(job.current().worker):
            os.kill(os.getpid(), signal.SIGKILL)
    elif resuming.HOW == "stopped" and job.current().context.folder is None:
        if where == resuming.WHERE and job.current().checkpoints.resumed is None:
            os.kill(os.getpid(), signal.SIGTERM)
    else:
        otherwise(where)


resuming.kill_at = at
keras.Sequential = Model
keras.callbacks.BackupAndRestore = NoBackup

if __name__ == "__main__":
    resuming.main()
