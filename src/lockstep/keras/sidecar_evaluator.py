"""Evaluates the checkpoints of a job in a separate process, as they appear."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

from lockstep.checkpoint.checkpoint_files import Contents, load
from lockstep.checkpoint.checkpoint_watch import CheckpointWatch, FolderState
from lockstep.checkpoint.store import Store
from lockstep.checkpoint.store_lock import is_training, last_activity
from lockstep.errors import CheckpointError, ConfigError
from lockstep.keras.input.fit_inputs import split_validation
from lockstep.keras.state.checkpoint_callback import asked_in, take_out
from lockstep.keras.state.loading import load_into
from lockstep.system.clock import Clock, SystemClock
from lockstep.system.notes import note
from lockstep.worker import job

_PAUSE = 0.5


class SidecarEvaluator:
    """Evaluates the checkpoints of a job as they appear, like `tf.keras.utils.SidecarEvaluator`.

    Args:
        model: a compiled model, equal to the one in the training script.
        data: as `validation_data` of `fit`: a dataset, or (x, y) or (x, y, sample_weight). It is read again
            for each checkpoint.
        checkpoint_dir: the folder of the checkpoints, of `lockstep.callbacks.Checkpoint` or
            `lockstep run --checkpoint`.
        steps: batches to evaluate; None for all.
        max_evaluations: how many checkpoints to evaluate; None to evaluate until training ends.
        callbacks: called in each evaluation as `evaluate` calls them.
        batch_size: of arrays; None for Keras's default.

    Example:
        With the checkpoints of the example of `lockstep.callbacks.Checkpoint`:

        >>> import keras, lockstep
        >>> import numpy as np
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> data = np.ones((8, 3)), np.ones(8)
        >>> evaluator = lockstep.SidecarEvaluator(model, data, "saved", max_evaluations=1)
        >>> evaluator.start().history.keys()  # doctest: +ELLIPSIS
        step ...: val_loss ...
        dict_keys(['val_loss'])
    """

    def __init__(
        self,
        model: Any,
        data: Any,
        checkpoint_dir: str | os.PathLike[str],
        steps: int | None = None,
        max_evaluations: int | None = None,
        callbacks: Any = None,
        *,
        batch_size: int | None = None,
    ) -> None:
        self.model = model
        self.data = data
        self.checkpoint_dir = checkpoint_dir
        self.steps = steps
        self.max_evaluations = max_evaluations
        self.callbacks = callbacks
        self.batch_size = batch_size

    def start(self) -> Any:
        """Evaluate until training has ended and its newest checkpoint is evaluated; return a `History`.

        After each evaluation, this takes the newest checkpoint and skips those in between. The model keeps
        the state of the last one. Training has ended when no process that saves checkpoints in the folder is
        left. A job that started or saved a checkpoint after this process started counts even if it has ended;
        otherwise this waits for a job.

        Returns:
            The steps of the checkpoints in `epoch` and the metrics of each in `history`: `val_loss` and so
            on. Each is also printed.

        Raises:
            CheckpointError: a checkpoint is not one of this model.
            ConfigError: this process saves checkpoints itself, and `max_evaluations` is None.
            PeerLostError: training ended without a complete checkpoint.
            PeerStuckError: for 600 s there was no job and no new checkpoint.
        """
        if self.max_evaluations is None and job.current().checkpoints.scheduler is not None:
            raise ConfigError(
                "this process saves the checkpoints itself, so it would wait for its own training: give "
                "lockstep.SidecarEvaluator max_evaluations, or start it in a process of its own"
            )
        clock = SystemClock()
        return follow(self, clock.wall() - _age(), clock, time.sleep)

    def evaluate(self, steps: int | None, callbacks: Any) -> dict[str, float]:
        """Return the metrics of the model in its current state, by name."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(self.data)
        options = {"batch_size": self.batch_size, "steps": steps, "callbacks": callbacks}
        figures: dict[str, float] = self.model.evaluate(
            x, y, sample_weight=sample_weight, verbose=0, return_dict=True, **options
        )
        return figures


class EvaluatorFit:
    """Implements `fit` in the process of an evaluator: evaluates what the other processes train."""

    def __init__(self) -> None:
        self._folder: Path | None = None

    def fit(self, model: Any, given: dict[str, Any]) -> Any:
        """Evaluate the checkpoints that this call of the script saves in the training processes.

        Args:
            model: to evaluate.
            given: the arguments of `fit`, by name.

        Raises:
            ConfigError: no checkpoints are saved, or there is no data to evaluate them on.
        """
        asked = asked_in(given["callbacks"])
        folder = self._folder if asked is None else Path(asked.folder).absolute()
        if folder is None:
            raise ConfigError(
                "this process is the evaluator of TF_CONFIG, but fit saves no checkpoints for it to "
                "evaluate: give fit callbacks=[lockstep.callbacks.Checkpoint(folder)], in all tasks"
            )
        # If an earlier call has watched this folder, any job that has ever used it counts.
        since = 0.0 if folder == self._folder else SystemClock().wall() - _age()
        evaluator = SidecarEvaluator(
            model,
            _validation(given),
            folder,
            steps=given["validation_steps"],
            callbacks=take_out(asked, given["callbacks"]),
            batch_size=given["validation_batch_size"] or given["batch_size"],
        )
        history = follow(evaluator, since, SystemClock(), time.sleep)
        self._folder = folder
        return history


def follow(evaluator: SidecarEvaluator, since: float, clock: Clock, pause: Callable[[float], None]) -> Any:
    """Implement `SidecarEvaluator.start`.

    Args:
        evaluator: its settings.
        since: seconds since 1970; a job that started or saved a checkpoint then or later counts.
        clock: the time.
        pause: waits for a number of seconds.
    """
    folder = Path(evaluator.checkpoint_dir).absolute()
    store, watch = Store(folder), CheckpointWatch(folder, clock.now())
    history = keras.callbacks.History()
    history.set_model(evaluator.model)
    history.on_train_begin()
    callbacks = _listed(evaluator)
    while evaluator.max_evaluations is None or len(history.epoch) < evaluator.max_evaluations:
        # In this order, so that all checkpoints of a job that has ended are found.
        trains, begun = is_training(folder), last_activity(folder) >= since
        checkpoints = store.steps()
        state = FolderState(clock.now(), trains, begun, checkpoints)
        step = watch.choose(state)
        if step is not None:
            if contents := _read(checkpoints[step], watch, step):
                _load(evaluator, checkpoints[step], contents)
                figures = evaluator.evaluate(evaluator.steps, callbacks)
                _note(history, step, figures)
                watch.evaluated(step, clock.now())
        elif watch.is_over(state):
            break
        else:
            _print_note(watch.status_line(state))
            pause(_PAUSE)
    return history


def _read(path: Path, watch: CheckpointWatch, step: int) -> Contents | None:
    """Read a checkpoint; return None if that fails, with a note if it is damaged."""
    try:
        return load(path)
    except CheckpointError as error:
        if watch.read_failed(step) and path.exists():
            _print_note(f"{error}; skipping this checkpoint")
        return None


def _load(evaluator: SidecarEvaluator, path: Path, contents: Contents) -> None:
    if not evaluator.model.built:
        # This builds the model, which has no variables to load before.
        evaluator.evaluate(1, None)
    load_into(evaluator.model, path, contents)


def _note(history: Any, step: int, figures: dict[str, float]) -> None:
    validation = {f"val_{name}": value for name, value in figures.items()}
    history.on_epoch_end(step, validation)
    shown = ", ".join(f"{name} {value:.4f}" for name, value in validation.items())
    print(f"step {step}: {shown}", flush=True)


def _print_note(line: str) -> None:
    if line:
        note(line)


def _listed(evaluator: SidecarEvaluator) -> Any:
    """Return one callback list for all evaluations, so that callbacks that write keep their files open."""
    callbacks = evaluator.callbacks
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    return keras.callbacks.CallbackList(callbacks, model=evaluator.model)


def _validation(given: dict[str, Any]) -> Any:
    if given["validation_data"] is not None:
        return given["validation_data"]
    if given["validation_split"]:
        return split_validation(given["x"], given["y"], given["sample_weight"], given["validation_split"])[1]
    raise ConfigError(
        "this process is the evaluator of TF_CONFIG, but fit has no data to evaluate on: give fit "
        "validation_data, in all tasks"
    )


def _age() -> float:
    """Return the age of this process in seconds."""
    # The 22nd field is the start time in ticks; the 2nd is a name, which may contain any character.
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
