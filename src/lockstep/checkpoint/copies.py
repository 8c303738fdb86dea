"""Copies of arrays in memory that is kept: to take memory from the kernel is slower than to fill it."""

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.checkpoint.folder import Contents

Array = npt.NDArray[Any]


class Copies:
    """Copies contents to the same memory again and again."""

    def __init__(self) -> None:
        self._memory: dict[str, Array] = {}
        self._thread: threading.Thread | None = None

    def make_ready(self, contents: Contents) -> None:
        """Take memory for contents like these, on a thread; once."""
        if self._thread is None:
            kinds = {name: (array.shape, array.dtype) for name, array in contents.arrays.items()}
            self._thread = threading.Thread(target=self._take, args=(kinds,), name="copies", daemon=True)
            self._thread.start()

    def of(self, contents: Contents) -> Contents:
        """Return a copy of `contents`, in the place of the one that was returned before."""
        ready = self._thread is None or not self._thread.is_alive()
        memory = self._memory if ready else {}
        copies = {name: _copied(array, memory.get(name)) for name, array in contents.arrays.items()}
        if ready:
            self._memory = copies
        return replace(contents, arrays=copies)

    def _take(self, kinds: Mapping[str, Any]) -> None:
        for name, (shape, dtype) in kinds.items():
            memory = np.empty(shape, dtype)
            # Maps each page, and lets other threads run meanwhile.
            memory.reshape(-1).view(np.uint8).fill(0)
            self._memory[name] = memory


def _copied(array: Array, memory: Array | None) -> Array:
    if memory is None or memory.shape != array.shape or memory.dtype != array.dtype:
        return np.array(array)
    np.copyto(memory, array)
    return memory
