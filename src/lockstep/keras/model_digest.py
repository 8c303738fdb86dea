"""The hash that shows whether two runs have equal bits."""

import hashlib
from typing import Any

import keras
import numpy as np

from lockstep.keras.variables import all_variables
from lockstep.worker.job import Job


def digest(model: Any) -> str:
    """Return the SHA-256, in hexadecimal, of the whole result of training `model`.

    The digest covers the shapes, dtypes and bits of the model's weights, its random state and its optimizers'
    variables. It also covers the history of the last `fit`, with names and the exact bits of every value.
    Call it between distributed calls, not in a callback.

    Example:
        >>> import keras, lockstep
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, "linear", True, "ones")])
        >>> lockstep.digest(model) == lockstep.digest(keras.models.clone_model(model))
        True
        >>> len(lockstep.digest(model))
        64
    """
    state = hashlib.sha256()
    for variable in all_variables(model):
        array = np.ascontiguousarray(keras.ops.convert_to_numpy(variable.value))
        state.update(f"{array.dtype} {array.shape}\n".encode())
        state.update(array.reshape(-1).view(np.uint8).data)
    history = getattr(getattr(model, "history", None), "history", {})
    for name, values in sorted(history.items()):
        state.update(f"{name} {[_exact(value) for value in values]}\n".encode())
    return state.hexdigest()


class LastModel:
    """The model that was trained last, kept so that its digest can be reported at the end of the script.

    When another model is compiled, which may need the memory, only the digest at that time is kept.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._model: Any = None
        self._summary: dict[str, str] = {}

    @property
    def model(self) -> Any:
        """The model, or None if no model was trained or another one has been compiled since then."""
        return self._model

    def trains(self, model: Any) -> None:
        """Note that `model` is about to be trained."""
        self._model = model

    def compiles(self, model: Any) -> None:
        """Note that `model` is about to be compiled."""
        if self._model is not None and self._model is not model:
            self._summary, self._model = self.summary(), None

    def summary(self) -> dict[str, str]:
        """Return the model's name and, on the chief, its digest, or an empty dict if no model was trained."""
        if self._model is None:
            return self._summary
        name = str(self._model.name)
        try:
            return {"model": name, "digest": digest(self._model)} if self._job.is_chief else {"model": name}
        except Exception:
            # A failed step may have freed its memory. The script did not request the digest, so do not raise.
            return {"model": name}


def _exact(value: Any) -> str:
    try:
        return np.asarray(value, dtype=np.float64).tobytes().hex()
    except (TypeError, ValueError):
        return repr(value)
