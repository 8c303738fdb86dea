"""Which arrays and texts a checkpoint can hold."""

from typing import Any

import ml_dtypes
import numpy as np

_NAMES = [
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
]
_DTYPES = {name: np.dtype(name) for name in _NAMES} | {"bfloat16": np.dtype(ml_dtypes.bfloat16)}


def named(name: str) -> "np.dtype[Any] | None":
    """Return the dtype of this name; None if a checkpoint cannot hold it."""
    return _DTYPES.get(name)


def storable(dtype: "np.dtype[Any]") -> bool:
    """Tell whether a checkpoint can hold arrays of this dtype, which includes its order of bytes."""
    return dtype == _DTYPES.get(dtype.name)


def plain(text: str) -> bool:
    """Tell whether JSON keeps `text`: lone surrogates that follow each other would become one character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
