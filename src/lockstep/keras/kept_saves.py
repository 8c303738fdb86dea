"""Models that a script saves where a job only checks it: the script finds them again, and nothing else does.

They are in the folder of the run, so the files of the script stay as they are.
"""

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import xxhash

from lockstep.keras.private.common import SAVING
from lockstep.system.paths import RunPaths
from lockstep.worker.job import Job
from lockstep.worker.patch_registry import PATCHES

_LOADING_FUNCTIONS = ("load_model", "load_weights")


class KeptSaves:
    """The models that a script has saved by Keras's methods.

    Args:
        folder: for them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def of(cls, job: Job) -> "KeptSaves | None":
        """Return those of a job that checks its script; None for others."""
        folder = job.context.folder
        return cls(RunPaths(folder).saved) if job.settings.checks and folder else None

    def save(
        self, original: Callable[..., Any], model: Any, filepath: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Save like `original`, but in the folder; an export, which Keras does not load, is not saved."""
        if original.__name__ != "export":
            kept = self._kept_path(filepath)
            kept.parent.mkdir(parents=True, exist_ok=True)
            original(model, kept, *args, **kwargs)

    def load_from_here(self) -> None:
        """Let Keras's functions load what was saved to their path."""
        if PATCHES.has(__name__):
            return
        for module in (SAVING, keras.saving, keras.models):
            for name in _LOADING_FUNCTIONS:
                if hasattr(module, name):
                    PATCHES.replace(__name__, module, name, self._loading)

    def _loading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        parameters = inspect.signature(original)

        @functools.wraps(original)
        def load(*args: Any, **kwargs: Any) -> Any:
            given = parameters.bind(*args, **kwargs)
            kept = self._kept_path(given.arguments["filepath"])
            if kept.exists():
                given.arguments["filepath"] = kept
            return original(*given.args, **given.kwargs)

        return load

    def _kept_path(self, filepath: Any) -> Path:
        path = os.path.abspath(os.fsdecode(filepath))  # noqa: PTH100 - that of a URL is some path, too
        return self._folder / xxhash.xxh3_64_hexdigest(path.encode()) / Path(path).name


class SavesAtEnd(keras.callbacks.Callback):  # type: ignore[misc]
    """Saves the model at the end of a short `fit` as a `ModelCheckpoint` would before.

    Args:
        checkpoint: the callback in whose place this one is.
    """

    def __init__(self, checkpoint: keras.callbacks.ModelCheckpoint) -> None:
        super().__init__()
        self._checkpoint = checkpoint

    def on_train_end(self, logs: Any = None) -> None:
        """Save the model, unless the path depends on epochs or logs."""
        checkpoint = self._checkpoint
        if "{" not in checkpoint.filepath:
            save = self.model.save_weights if checkpoint.save_weights_only else self.model.save
            save(checkpoint.filepath)
