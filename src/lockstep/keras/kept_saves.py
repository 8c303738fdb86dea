"""Models that a script saves in a job that only checks it. Only the script itself can load them.

They are in the folder of the run, so the script's own files do not change.
"""

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
    """The models that a script has saved with Keras's methods.

    Args:
        folder: the folder for the models.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def of(cls, job: Job) -> "KeptSaves | None":
        """Return the models of a job that checks its script, or None for other jobs."""
        folder = job.context.folder
        return cls(RunPaths(folder).saved) if job.settings.checks and folder else None

    def save(
        self, original: Callable[..., Any], model: Any, filepath: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Save like `original`, but in the folder. An export is not saved, because Keras does not load it."""
        if original.__name__ != "export":
            kept = self._kept_path(filepath)
            kept.parent.mkdir(parents=True, exist_ok=True)
            original(model, kept, *args, **kwargs)

    def load_from_here(self) -> None:
        """Let Keras's functions load the models that were saved to their path."""
        if PATCHES.has(__name__):
            return
        for module in (SAVING, keras.saving, keras.models):
            for name in _LOADING_FUNCTIONS:
                if hasattr(module, name):
                    PATCHES.wrap(__name__, module, name, self._load)

    def _load(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(original).bind(*args, **kwargs)
        kept = self._kept_path(bound.arguments["filepath"])
        if kept.exists():
            bound.arguments["filepath"] = kept
        return original(*bound.args, **bound.kwargs)

    def _kept_path(self, filepath: Any) -> Path:
        path = os.path.abspath(os.fsdecode(filepath))  # noqa: PTH100 - that of a URL is some path, too
        return self._folder / xxhash.xxh3_64_hexdigest(path.encode()) / Path(path).name


class SavesAtEnd(keras.callbacks.Callback):  # type: ignore[misc]
    """Saves the model at the end of a short `fit`, as a `ModelCheckpoint` would earlier.

    Args:
        checkpoint: the callback that this one replaces.
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
