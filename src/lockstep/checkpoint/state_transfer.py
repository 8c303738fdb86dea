"""State in anonymous memory, for another process of this machine: it vanishes with its processes.

The format is a header, as msgpack after its length, then the arrays, each at a multiple of 64 bytes.
"""

import contextlib
import fcntl
import math
import mmap
import os
import struct
import threading
from typing import Any

import msgspec
import numpy as np

from lockstep.checkpoint.folder import Contents, check_names
from lockstep.checkpoint.values import named
from lockstep.errors import CheckpointError
from lockstep.system.memory import available_memory

_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 64
_SPARE = 1 << 20
"""Spare bytes for a header that has grown since the memory was prepared."""


class _Header(msgspec.Struct):
    """The header: [name, dtype, shape] of each array."""

    step: int
    manifest: dict[str, object]
    arrays: list[tuple[str, str, tuple[int, ...]]]


class StateMemory:
    """Memory for a state, allocated in the background: that takes longer than filling it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._descriptor = -1
        self._data = np.empty(0, np.uint8)
        self._failure = ""
        self._thread: threading.Thread | None = None
        self._closing = threading.Lock()
        self._unwanted = False

    def make_ready(self) -> None:
        """Allocate the memory, on a thread."""
        self._thread = threading.Thread(target=self._take, name="memory", daemon=True)
        self._thread.start()

    def filled(self, contents: Contents) -> int | None:
        """Write `contents`; return the descriptor, which the caller closes, or None if they do not fit.

        Raises:
            CheckpointError: there is too little memory.
        """
        if self._thread is None:
            self._take()
        else:
            self._thread.join()
        if self._failure:
            raise CheckpointError(f"the state does not fit into memory: {self._failure}")
        header, arrays = _parts(contents)
        if _extent(len(header), arrays) > self._size:
            self.close()
            return None
        self._data[: len(header)] = np.frombuffer(header, np.uint8)
        start = len(header)
        for array in arrays:
            start = _aligned(start)
            self._data[start : start + array.nbytes] = array
            start += array.nbytes
        descriptor, self._descriptor = self._descriptor, -1
        return descriptor

    def close(self) -> None:
        """Free the memory unless it was filled; if it is being allocated, free it as soon as that is done."""
        with self._closing:
            self._unwanted = True
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def _take(self) -> None:
        descriptor = os.memfd_create("lockstep-state", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            if self._size > (room := available_memory()):
                raise MemoryError(f"it needs {self._size} bytes, and {room} are available")
            os.posix_fallocate(descriptor, 0, self._size)
            # Reading beyond the end of a truncated file kills the process.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            self._data = np.frombuffer(mmap.mmap(descriptor, self._size), np.uint8)
            # Maps each page; other threads can run meanwhile.
            self._data.fill(0)
        except (OSError, MemoryError) as error:
            self._failure = str(error)
        with self._closing:
            if self._failure or self._unwanted:
                os.close(descriptor)
            else:
                self._descriptor = descriptor


def memory_for(contents: Contents) -> StateMemory:
    """Return memory that fits `contents` and their growth over the next steps."""
    header, arrays = _parts(contents)
    return StateMemory(_extent(len(header) + _SPARE, arrays))


def pack_state(contents: Contents, ready: StateMemory | None = None) -> int:
    """Write `contents` to memory; return its descriptor, which the caller closes.

    Args:
        contents: to write.
        ready: memory to use if they fit.

    Raises:
        CheckpointError: there is too little memory, or an array has a name or dtype that the checkpoint
            format does not support.
    """
    check_names(contents.arrays)
    descriptor = ready.filled(contents) if ready is not None else None
    if descriptor is None:
        descriptor = memory_for(contents).filled(contents)
    assert descriptor is not None
    return descriptor


def unpack_state(descriptor: int) -> Contents:
    """Read contents that `pack_state` wrote; takes ownership of `descriptor`.

    Returns:
        The contents; the arrays are read-only and not copied.

    Raises:
        CheckpointError: the memory is not from `pack_state`.
    """
    try:
        with contextlib.closing(os.fdopen(descriptor, "rb", buffering=0)):
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            memory = mmap.mmap(descriptor, 0, flags=flags, prot=mmap.PROT_READ)
        (length,) = _LENGTH.unpack_from(memory)
        start = _LENGTH.size + length
        header = msgspec.msgpack.decode(memory[_LENGTH.size : start], type=_Header)
        arrays = {}
        for name, kind, shape in header.arrays:
            start = _aligned(start)
            arrays[name] = array = _mapped(memory, start, named(kind), shape)
            start += array.nbytes
    except (ValueError, OverflowError, RecursionError, struct.error) as error:
        raise CheckpointError(f"cannot read the state from another worker: {error}") from None
    return Contents(header.step, header.manifest, arrays)


def _mapped(
    memory: mmap.mmap, start: int, dtype: "np.dtype[Any] | None", shape: tuple[int, ...]
) -> "np.ndarray[Any, np.dtype[Any]]":
    """Return the array at `start`; raise ValueError if it is invalid."""
    if dtype is None or min(shape, default=0) < 0:
        raise ValueError(f"an array of the dtype {dtype} and the shape {shape}")
    size = math.prod(shape)
    return np.frombuffer(memory, dtype, size, start).reshape(shape) if size else np.empty(shape, dtype)


def _parts(contents: Contents) -> tuple[bytes, list["np.ndarray[tuple[int], np.dtype[np.uint8]]"]]:
    """Return the header with its length, and the bytes of each array."""
    # Only non-contiguous arrays are copied.
    arrays = {name: np.asarray(array, order="C") for name, array in contents.arrays.items()}
    kinds = [(name, array.dtype.name, array.shape) for name, array in arrays.items()]
    header = msgspec.msgpack.encode(_Header(contents.step, dict(contents.manifest), kinds))
    return _LENGTH.pack(len(header)) + header, [array.reshape(-1).view(np.uint8) for array in arrays.values()]


def _extent(start: int, arrays: list["np.ndarray[tuple[int], np.dtype[np.uint8]]"]) -> int:
    for array in arrays:
        start = _aligned(start) + array.nbytes
    return start


def _aligned(start: int) -> int:
    return -(-start // _ALIGNMENT) * _ALIGNMENT
