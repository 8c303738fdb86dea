"""Evaluates the checkpoints of a job in a separate process, as they appear."""

import contextlib
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import keras

from lockstep.checkpoint.checkpoint_files import load
from lockstep.checkpoint.checkpoint_watch import PATIENCE, CheckpointWatch, FolderState
from lockstep.checkpoint.store import Store
from lockstep.checkpoint.store_lock import is_training, last_activity
from lockstep.errors import CheckpointError, ConfigError
from lockstep.keras.input.fit_inputs import split_validation
from lockstep.keras.state.callback_states import listed
from lockstep.keras.state.checkpoint_callback import checkpoint_in, without_checkpoint
from lockstep.keras.state.loading import load_into
from lockstep.system.clock import Clock, SystemClock
from lockstep.system.notes import note
from lockstep.worker import job
from lockstep.worker.patch_registry import replaced

_PAUSE = 0.5
_SETTLED = 1.0
"""Seconds since its last change after which a file of a `ModelCheckpoint` counts as complete."""
_EPOCH = re.compile(r"\{epoch[^}]*\}")
_FIELD = re.compile(r"\{[^}]*\}")


class SidecarEvaluator:
    """Evaluates the checkpoints of a job as they appear, like `tf.keras.utils.SidecarEvaluator`.

    Args:
        model: a compiled model, equal to the one in the training script.
        data: a dataset, (x, y) or (x, y, sample_weight), like the `validation_data` of `fit`. It is read
            again for each checkpoint.
        checkpoint_dir: the folder of `lockstep.callbacks.Checkpoint` or `lockstep run --checkpoint`, or the
            `filepath` of a `keras.callbacks.ModelCheckpoint`, such as `"saved/{epoch:03d}.weights.h5"`.
        steps: batches to evaluate; None for all.
        max_evaluations: the number of checkpoints to evaluate; None to evaluate until training ends.
        callbacks: called in each evaluation as `evaluate` calls them.
        batch_size: the batch size for arrays; None for Keras's default.

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
        """Evaluate checkpoints until training has ended, and return a `History`.

        The evaluator ends when training has ended and its newest checkpoint is evaluated. After each
        evaluation, it takes the newest checkpoint and skips those in between. The model keeps the state of
        the last one.

        Training has ended when no process that saves checkpoints in the folder is left. A job that started or
        saved a checkpoint after this process started counts even if it has ended. Otherwise the evaluator
        waits for a job. The files of a `ModelCheckpoint` do not show whether training has ended. It counts as
        ended if no file was saved for 600 s.

        Returns:
            The steps of the checkpoints, or the epochs of the files, in `epoch` and the metrics of each in
            `history`: `val_loss` and so on. Each is also printed.

        Raises:
            CheckpointError: a checkpoint belongs to another model.
            ConfigError: this process saves checkpoints itself, and `max_evaluations` is None.
            PeerLostError: training ended without a complete checkpoint.
            PeerStuckError: there was no job and no new checkpoint for 600 s.
        """
        if self.max_evaluations is None and job.current().checkpoints.scheduler is not None:
            raise ConfigError(
                "this process saves the checkpoints itself, so it would wait for its own training: give "
                "lockstep.SidecarEvaluator max_evaluations, or start it in a separate process"
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
    """Implements `fit` in the process of an evaluator: evaluates the model that the others train."""

    def __init__(self) -> None:
        self._folder: Path | None = None

    def fit(self, model: Any, arguments: dict[str, Any]) -> Any:
        """Evaluate the checkpoints that this call of the script saves in the training processes.

        Args:
            model: the model to evaluate.
            arguments: the arguments of `fit`, by name.

        Raises:
            ConfigError: no checkpoints are saved, or there is no data to evaluate them on.
        """
        checkpoint = checkpoint_in(arguments["callbacks"])
        callbacks = keras.tree.flatten(list(listed(arguments["callbacks"]) or ()))
        files = [callback for callback in callbacks if isinstance(callback, keras.callbacks.ModelCheckpoint)]
        folder = self._folder if checkpoint is None else Path(checkpoint.folder).absolute()
        if checkpoint is None and files:
            folder = Path(files[0].filepath).absolute()
        if folder is None:
            raise ConfigError(
                "this process is the evaluator of TF_CONFIG, but fit saves no checkpoints for it to "
                "evaluate: give fit callbacks=[lockstep.callbacks.Checkpoint(folder)] or a "
                "keras.callbacks.ModelCheckpoint, in all tasks"
            )
        # If an earlier call has watched this folder, any job that has ever used it counts.
        since = 0.0 if folder == self._folder else SystemClock().wall() - _age()
        evaluator = SidecarEvaluator(
            model,
            _validation(arguments),
            folder,
            steps=arguments["validation_steps"],
            callbacks=_without(files, without_checkpoint(checkpoint, arguments["callbacks"])),
            batch_size=arguments["validation_batch_size"] or arguments["batch_size"],
        )
        history = follow(evaluator, since, SystemClock(), time.sleep)
        self._folder = folder
        return history


class _Checkpoints:
    """The checkpoints of a job.

    Attributes:
        unit: the unit of their numbers.
    """

    unit = "step"

    def __init__(self, folder: Path, since: float, clock: Clock) -> None:
        self._folder, self._since, self._clock = folder, since, clock
        self._store = Store(folder)
        self._paths: Mapping[int, Path] = {}

    def state(self) -> FolderState:
        """Look at the folder."""
        # This order ensures that all checkpoints of an ended job are found.
        trains, begun = is_training(self._folder), last_activity(self._folder) >= self._since
        self._paths = self._store.steps()
        return FolderState(self._clock.now(), trains, begun, self._paths)

    def load(self, evaluator: SidecarEvaluator, number: int, watch: CheckpointWatch) -> bool:
        """Load the checkpoint with a number in the last `state`, and return whether it could be read.

        If it is damaged, print a note.
        """
        path = self._paths[number]
        try:
            contents = load(path)
        except CheckpointError as error:
            if watch.read_failed(number) and path.exists():
                _print_note(f"{error}; skipping this checkpoint")
            return False
        _build(evaluator)
        load_into(evaluator.model, path, contents)
        return True


class _ModelFiles:
    """The files of a `keras.callbacks.ModelCheckpoint`, numbered by the epochs in their names.

    Files without an epoch in their names are numbered in their order.
    """

    unit = "epoch"

    def __init__(self, filepath: str, clock: Clock) -> None:
        self._folder, self._clock = Path(filepath).absolute().parent, clock
        before, *after = _EPOCH.split(Path(filepath).name, 1)
        number = "".join(r"(?P<epoch>\d+)" + _pattern_of(rest) for rest in after)
        self._name = re.compile(_pattern_of(before) + number)
        self._files: dict[int, Path] = {}
        self._seen: set[tuple[Path, int]] = set()
        self._last = -math.inf

    def state(self) -> FolderState:
        """Look at the folder."""
        changed_files = []
        for path in self._folder.glob("*"):
            match = self._name.fullmatch(path.name)
            with contextlib.suppress(FileNotFoundError):
                if match is not None:
                    changed_files.append(
                        (path.stat().st_mtime_ns, path, int(match.groupdict().get("epoch", 0)))
                    )
        for changed, path, epoch in sorted(changed_files):
            # A program of plain Keras may still be writing the file.
            settled = self._clock.wall() - changed / 1e9 >= _SETTLED
            if settled and (path, changed) not in self._seen:
                self._seen.add((path, changed))
                self._files[max(max(self._files, default=0) + 1, epoch)] = path
                self._last = self._clock.now()
        begun = bool(self._files)
        trains = begun and self._clock.now() - self._last < PATIENCE
        return FolderState(self._clock.now(), trains, begun, self._files)

    def load(self, evaluator: SidecarEvaluator, number: int, watch: CheckpointWatch) -> bool:
        """Load a file, and print a note if it is damaged."""
        path = self._files[number]
        _build(evaluator)
        try:
            # The optimizer's variables are not needed. In a job with parameter servers, they may have other
            # shapes.
            with replaced(evaluator.model, "optimizer", None):
                evaluator.model.load_weights(path)
        except (OSError, BadZipFile) as error:
            if watch.read_failed(number) and path.exists():
                _print_note(f"{path} cannot be read ({error}); skipping it")
            return False
        except ValueError as error:
            raise CheckpointError(f"{path} does not fit model {evaluator.model.name!r}: {error}") from None
        return True


def _pattern_of(name: str) -> str:
    """Return a regular expression for a part of the name of a file, in which fields have any value."""
    return ".+".join(map(re.escape, _FIELD.split(name)))


def follow(evaluator: SidecarEvaluator, since: float, clock: Clock, pause: Callable[[float], None]) -> Any:
    """Implement `SidecarEvaluator.start`.

    Args:
        evaluator: the evaluator with the settings.
        since: seconds since 1970. A job that started or saved a checkpoint then or later counts.
        clock: measures the time.
        pause: waits for a number of seconds.
    """
    folder = Path(evaluator.checkpoint_dir).absolute()
    saved: _Checkpoints | _ModelFiles = _Checkpoints(folder, since, clock)
    if folder.suffix in (".keras", ".h5"):
        saved = _ModelFiles(os.fspath(folder), clock)
    watch = CheckpointWatch(folder, clock.now(), unit=saved.unit)
    history = keras.callbacks.History()
    history.set_model(evaluator.model)
    history.on_train_begin()
    callbacks = _listed(evaluator)
    while evaluator.max_evaluations is None or len(history.epoch) < evaluator.max_evaluations:
        state = saved.state()
        number = watch.choose(state)
        if number is not None:
            if saved.load(evaluator, number, watch):
                figures = evaluator.evaluate(evaluator.steps, callbacks)
                _note(history, saved.unit, number, figures)
                watch.evaluated(number, clock.now())
        elif watch.is_over(state):
            break
        else:
            _print_note(watch.status_line(state))
            pause(_PAUSE)
    return history


def _build(evaluator: SidecarEvaluator) -> None:
    """Build the model if it has no variables to load yet."""
    if not evaluator.model.built:
        evaluator.evaluate(1, None)


def _note(history: Any, unit: str, number: int, figures: dict[str, float]) -> None:
    validation = {f"val_{name}": value for name, value in figures.items()}
    history.on_epoch_end(number, validation)
    shown = ", ".join(f"{name} {value:.4f}" for name, value in validation.items())
    print(f"{unit} {number}: {shown}", flush=True)


def _print_note(line: str) -> None:
    if line:
        note(line)


def _listed(evaluator: SidecarEvaluator) -> Any:
    """Return one callback list for all evaluations, so that callbacks keep their files open."""
    callbacks = evaluator.callbacks
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    return keras.callbacks.CallbackList(callbacks, model=evaluator.model)


def _without(files: Sequence[Any], callbacks: Any) -> Any:
    """Return callbacks without those that save models: an evaluator does not train."""
    return [callback for callback in listed(callbacks) if callback not in files] if files else callbacks


def _validation(arguments: dict[str, Any]) -> Any:
    if arguments["validation_data"] is not None:
        return arguments["validation_data"]
    if arguments["validation_split"]:
        return split_validation(
            arguments["x"], arguments["y"], arguments["sample_weight"], arguments["validation_split"]
        )[1]
    raise ConfigError(
        "this process is the evaluator of TF_CONFIG, but fit has no data to evaluate on: give fit "
        "validation_data, in all tasks"
    )


def _age() -> float:
    """Return the age of this process in seconds."""
    # The 22nd field is the start time in ticks; the 2nd is a name, which may contain any character.
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
