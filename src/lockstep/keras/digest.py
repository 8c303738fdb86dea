"""The hash by which two trainings are compared: equal bits or not."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np


def digest(model: Any) -> str:
    """Return the SHA-256, in hexadecimal, of everything that training `model` has led to.

    It covers the shapes, dtypes and bits of the model's weights and random state and of the optimizer's
    variables, and the history of the last `fit` (names, and every value's exact bits). Call it between
    distributed calls, not from a callback.
    """
    state = hashlib.sha256()
    optimizer = getattr(model, "optimizer", None)
    variables = [*model.variables, *(optimizer.variables if optimizer else [])]
    for variable in variables:
        array = np.ascontiguousarray(keras.ops.convert_to_numpy(variable.value))
        state.update(f"{array.dtype} {array.shape}\n".encode())
        state.update(array.reshape(-1).view(np.uint8).data)
    history = getattr(getattr(model, "history", None), "history", {})
    for name, values in sorted(history.items()):
        state.update(f"{name} {[_exact(value) for value in values]}\n".encode())
    return state.hexdigest()


def named_arrays(variables: Sequence[Any], values: Iterable[Any]) -> Mapping[str, Any]:
    """Pair values with their variables' paths, made unique where Keras repeats one."""
    named: dict[str, Any] = {}
    for variable, value in zip(variables, values, strict=True):
        name = path = variable.path
        copies = 1
        while name in named:
            copies += 1
            name = f"{path} ({copies})"
        named[name] = value
    return named


def _exact(value: Any) -> str:
    try:
        return np.asarray(value, dtype=np.float64).tobytes().hex()
    except (TypeError, ValueError):
        return repr(value)
