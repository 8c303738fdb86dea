"""TensorFlow's own checkpoints: workers that write the same state to the same path share the work."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy.typing as npt
import tensorflow as tf

from lockstep.data.digest import digest_arrays
from lockstep.keras.private.tensorflow import SAVE, reached_by
from lockstep.keras.shared_saves import write_once
from lockstep.keras.tf_per_replica import to_numpy
from lockstep.system.paths import RunPaths
from lockstep.worker.job import Job
from lockstep.worker.patch_registry import PATCHES

_LAST = ".index"


def share_checkpoints(job: Job, behind: Callable[[], bool]) -> None:
    """Make `tf.train.Checkpoint` and its manager write each checkpoint once on each host.

    Args:
        job: the job whose workers write.
        behind: whether this process repeats calls whose checkpoints others have already saved.
    """
    PATCHES.wrap(__name__, *SAVE, functools.partial(save_once, job, behind))


def save_once(
    job: Job,
    behind: Callable[[], bool],
    original: Callable[..., Any],
    saver: Any,
    file_prefix: str,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Replace TensorFlow's `original` method; see `share_checkpoints`."""
    if behind():
        return file_prefix
    if job.context.folder is None or len(job.view.workers) == 1 or not tf.executing_eagerly():
        return original(saver, file_prefix, *args, **kwargs)
    if "://" not in file_prefix:
        Path(file_prefix).absolute().parent.mkdir(parents=True, exist_ok=True)
    write_once(
        RunPaths(job.context.folder).saved,
        # A checkpoint has several files. This one is written, and renamed, last.
        f"{file_prefix}{_LAST}",
        digest_arrays(_state(saver)),
        lambda path: original(saver, path.removesuffix(_LAST), *args, **kwargs),
        rename=True,
    )
    return file_prefix


def _state(saver: Any) -> list[npt.NDArray[Any]]:
    """Return the values of all variables that a checkpoint reaches."""
    reached = reached_by(saver)
    variables = [part.value if isinstance(part, keras.Variable) else part for part in reached]
    return [to_numpy(variable.read_value()) for variable in variables if isinstance(variable, tf.Variable)]
