"""Arrays on disk, such as memory maps and datasets of h5py. A worker reads only the rows that it needs.

Keras would first copy all of an h5py dataset, and all of a memory map of `float64`, into memory.
"""

import mmap
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from lockstep.data.order import Indices, reader_of
from lockstep.keras.input.readings import note_once
from lockstep.worker.job import Job

LARGE = 10**9
"""A note reports arrays in the memory of each worker from this number of bytes on."""


class StoredArray:
    """Rows of an array on disk, with the dtype that they have in Keras.

    Args:
        array: a NumPy array in mapped memory, or a dataset of h5py.
        rows: the rows of `array` that belong to it, a range.
    """

    def __init__(self, array: Any, rows: slice) -> None:
        self._array = array
        self._start = rows.start
        self._read = reader_of(array) if isinstance(array, np.ndarray) else self._select
        dtype = array.dtype
        floats = dtype.kind != "O" and keras.backend.is_float_dtype(dtype.name)
        self.dtype = np.dtype(keras.backend.floatx()) if floats else dtype
        self.shape: tuple[int, ...] = (rows.stop - rows.start, *array.shape[1:])
        self.ndim = len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, indices: Indices) -> npt.NDArray[Any]:
        if isinstance(indices, slice):
            start, stop, step = indices.indices(len(self))
            indices = slice(self._start + start, self._start + stop, step)
        else:
            indices = self._start + np.asarray(indices)
        return np.asarray(self._read(indices), self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.asarray(self[:], dtype)

    def part(self, rows: slice) -> "StoredArray":
        """Return a range of the rows, without reading them."""
        return StoredArray(self._array, slice(self._start + rows.start, self._start + rows.stop))

    def _select(self, indices: Indices) -> Any:
        """Read rows of an h5py dataset, which accepts numbers only in increasing order."""
        if isinstance(indices, slice):
            return self._array[indices]
        numbers, inverse = np.unique(indices, return_inverse=True)
        return self._array[numbers][inverse]


def stored(leaf: Any) -> StoredArray | None:
    """Return a value as a `StoredArray` if it is an array on disk, or None for other values."""
    if isinstance(leaf, StoredArray):
        return leaf
    if isinstance(leaf, np.ndarray):
        array = np.asarray(leaf) if leaf.ndim and _is_mapped(leaf) else None
    else:
        kind = type(leaf)
        array = leaf if kind.__module__.startswith("h5py.") and kind.__name__ == "Dataset" else None
    return None if array is None or not array.shape else StoredArray(array, slice(0, len(array)))


def _is_mapped(array: npt.NDArray[Any]) -> bool:
    """Whether an array is in memory that is mapped to a file."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, mmap.mmap)


def explain_memory(job: Job, held: int) -> None:
    """Print a note, once and on the chief, if each of several workers holds many bytes of arrays."""
    workers = len(job.view.workers)
    if workers > 1 and held >= LARGE:
        size = (
            f"{held / 1e9:.1f} GB of arrays in memory, all {workers} together {workers * held / 1e9:.1f} GB"
        )
        instead = 'np.load(file, mmap_mode="r") or a dataset of h5py'
        note_once(job, f"each worker holds {size}; of {instead}, a worker reads only the rows that it needs")
