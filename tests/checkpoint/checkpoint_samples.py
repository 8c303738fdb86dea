"""Contents to write, and exact comparison."""

import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from lockstep.checkpoint.checkpoint_files import Contents
from lockstep.checkpoint.store import Store

FLOATS = [np.dtype(name) for name in ("float16", "float32", "float64", ml_dtypes.bfloat16)]
OTHERS = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
DTYPES = FLOATS + [np.dtype(name) for name in OTHERS]


def sample(step: int, size: int = 12) -> Contents:
    """Return small contents, different for each step."""
    arrays = {"weights": np.arange(size, dtype=np.float32) + step, "taken": np.array(step)}
    return Contents(step, {"epoch": step // 2, "name": "model"}, arrays)


def same(first: Any, second: Any) -> bool:
    """Whether two nested values have the same types and bits."""
    if type(first) is not type(second):
        return False
    if isinstance(first, np.ndarray) and first.dtype.kind == "O":
        return (first.dtype, first.shape) == (second.dtype, second.shape) and same(
            first.tolist(), second.tolist()
        )
    if isinstance(first, np.ndarray | np.generic):
        return (first.dtype, first.shape, first.tobytes()) == (second.dtype, second.shape, second.tobytes())
    if isinstance(first, dict):
        return same(list(first.items()), list(second.items()))
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, float):
        return struct.pack(">d", first) == struct.pack(">d", second)
    return repr(first) == repr(second)


def equal(first: Contents, second: Contents) -> bool:
    """Whether two checkpoints have the same contents, in the same order."""
    parts = [(contents.step, dict(contents.manifest), dict(contents.arrays)) for contents in (first, second)]
    return same(parts[0], parts[1])


def is_sample(contents: Contents) -> bool:
    """Whether these are the contents of a `sample` of any size."""
    return equal(contents, sample(contents.step, contents.arrays["weights"].size))


def steps(folder: Path) -> list[int]:
    """Return the steps of all checkpoints in the folder; each must be complete."""
    entries = Store(folder).entries()
    assert [entry.fault for entry in entries] == [None] * len(entries)
    return [entry.step for entry in entries]


def leftovers(folder: Path) -> list[str]:
    """Return the names of temporary files in the folder."""
    return sorted(path.name for path in folder.glob(".*") if path.name != ".lock")
