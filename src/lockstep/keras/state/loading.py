"""Loads checkpoints of a job in plain Keras, without the command, on any backend."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from lockstep.checkpoint.checkpoint_files import FILES, Contents, load
from lockstep.checkpoint.store import FOLDER_PREFIX, Store
from lockstep.errors import CheckpointError, InputError
from lockstep.keras.state.matching import Array, Match, SavedModel, match
from lockstep.system.notes import note

_OF_A_MODEL = re.compile(r"(current|model \d+)/(.+)", re.DOTALL)
_CHECKPOINT = re.compile(rf"{FOLDER_PREFIX}\d+")


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint that `load_checkpoint` has loaded.

    Attributes:
        path: the folder of the checkpoint.
        name: the name of the job's model in the checkpoint.
        step: the number of training steps of the job.
        call: the call that was in progress or had just finished, such as "fit 1".
        call_step: the number of steps in that call; 0 if it had finished.
    """

    path: Path
    name: str
    step: int
    call: str
    call_step: int


class _Job(msgspec.Struct):
    backend: str


class _Training(msgspec.Struct):
    call: str
    steps: int


class _Manifest(msgspec.Struct):
    """The parts of the manifest that are needed here."""

    job: _Job
    training: _Training


def load_checkpoint(model: Any, path: str | Path, name: str | None = None) -> LoadedCheckpoint:
    """Load the state of `model` from a checkpoint of `lockstep run --checkpoint`.

    The state consists of the weights, the states of random generators, and the variables of the metrics that
    the model already has. If the model is compiled, the state also has the variables of its optimizers with
    their step counts. Optimizers that are not built are built. The model may use another backend than the
    job. Call this function between calls such as `fit`, not in a callback.

    Variables are matched by their paths. Of the numbers that Keras puts into layer names (`dense_1`), only
    the order counts.

    Args:
        model: a built model, equal to the one in the job's script.
        path: the folder of one checkpoint, or of a job's checkpoints. In the second case, the newest complete
            one is loaded, and newer damaged ones are named on stderr.
        name: the name of the job's model to load, `current` or `model <number>`: the prefix of its arrays in
            the checkpoint. By default, the model that fits.

    Returns:
        A description of the loaded checkpoint.

    Raises:
        InputError: the model is not built, there is no checkpoint or no model of this name in it, or several
            models fit with different values.
        CheckpointError: the checkpoint is damaged or does not fit. The message names the variables that are
            missing or have another shape or dtype. Nothing has been loaded.

    Example:
        With the checkpoints of the example of `lockstep.callbacks.Checkpoint`:

        >>> import keras, lockstep
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> loaded = lockstep.load_checkpoint(model, "saved")
        >>> loaded.name, loaded.call
        ('current', 'fit 1')
    """
    if not getattr(model, "built", False):
        raise InputError(
            f"model {model.name!r} is not built, so it has no variables yet: give it an Input, call "
            "model.build(input_shape), or call it on a batch, and then lockstep.load_checkpoint"
        )
    return load_into(model, *_read(Path(path)), name)


def load_into(model: Any, folder: Path, contents: Contents, name: str | None = None) -> LoadedCheckpoint:
    """Load the checkpoint in `folder` into `model`, which is built; see `load_checkpoint`."""
    manifest = _manifest(folder, contents)
    candidates = _models(contents, manifest)
    if name is not None and name not in candidates:
        raise InputError(f"the checkpoint {folder} has no model {name!r}, only {_listed(candidates)}")
    matches = [match(model, saved) for saved in candidates.values() if name in (None, saved.name)]
    chosen = _choose(f"the checkpoint {folder}", f"model {model.name!r}", matches)
    chosen.assign()
    training = manifest.training
    return LoadedCheckpoint(folder, chosen.name, contents.step, training.call, training.steps)


def _read(path: Path) -> tuple[Path, Contents]:
    """Read the checkpoint at `path`, or the newest complete one there."""
    if not path.exists():
        raise InputError(f"{path} does not exist; give the folder of one checkpoint or of several")
    if _CHECKPOINT.fullmatch(path.name) or any((path / file).exists() for file in FILES):
        return path, load(path)
    damaged: list[str] = []
    newest = Store(path).newest(damaged.append)
    for text in damaged:
        note(text)
    if newest is None:
        if damaged:
            raise CheckpointError(f"no checkpoint in {path} is complete: {damaged[0]}")
        raise InputError(
            f"there is no checkpoint in {path}; give the --checkpoint folder of `lockstep run`, "
            "or one of the step-... folders in it"
        )
    return newest


def _manifest(folder: Path, contents: Contents) -> _Manifest:
    try:
        return msgspec.convert(contents.manifest, _Manifest)
    except ValueError as error:
        raise CheckpointError(
            f"the checkpoint {folder} was not written by a job: cannot read its manifest ({error})"
        ) from None


def _models(contents: Contents, manifest: _Manifest) -> dict[str, SavedModel]:
    """Return the state of each of the job's models in a checkpoint, by name."""
    arrays: dict[str, dict[str, Array]] = {}
    for full, array in contents.arrays.items():
        if of_a_model := _OF_A_MODEL.fullmatch(full):
            arrays.setdefault(of_a_model[1], {})[of_a_model[2]] = array
    # In a step on JAX, the variables are in a different order: Keras puts the trainable ones first.
    stepping = manifest.job.backend == "jax" and manifest.training.steps > 0
    return {
        name: SavedModel(
            name,
            model_arrays,
            common={} if name == "current" else arrays.get("current", {}),
            trainable_first=stepping and name == "current",
        )
        for name, model_arrays in arrays.items()
    }


def _choose(checkpoint: str, model: str, matches: list[Match]) -> Match:
    """Return the match that fits, preferably one with the model's own names.

    Raises:
        CheckpointError: none fits.
        InputError: several fit, with different values.
    """
    fitting = [candidate for candidate in matches if not candidate.misfits]
    if not fitting:
        wrong = "; ".join(f"as {candidate.name!r}, {candidate.misfits}" for candidate in matches)
        raise CheckpointError(
            f"{checkpoint} does not fit {model}, and nothing was loaded: {wrong}. Build the model as the "
            "job's script does; compile it with the same optimizer, or after loading"
        )
    best = [candidate for candidate in fitting if not candidate.renamed] or fitting
    if any(_bits(candidate) != _bits(best[0]) for candidate in best[1:]):
        raise InputError(
            f"{checkpoint} has several models that fit {model}, with different values: "
            f"{_listed(candidate.name for candidate in best)}; choose one, such as name={best[0].name!r}"
        )
    return best[0]


def _bits(candidate: Match) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in candidate.values.items()}


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
