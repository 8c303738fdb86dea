"""The transport of states between processes of one machine: memfds, which do not outlive the processes.

The format is a header, as msgpack after its length, then the arrays, each at a multiple of 64 bytes.
"""

import fcntl
import math
import mmap
import os
import struct
import threading
from typing import Any

import msgspec
import numpy as np

from lockstep.checkpoint.checkpoint_files import Contents, check_names
from lockstep.checkpoint.values import named
from lockstep.errors import CheckpointError
from lockstep.protocol.channel import Attachment
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


class MemoryTransport:
    """Publishes states in memfds; a `StateTransport`."""

    def __init__(self) -> None:
        self._prepared: StateMemory | None = None

    def prepare(self, contents: Contents) -> None:
        """Allocate memory for contents of these sizes on a thread; see `StateTransport`."""
        self.forget()
        self._prepared = memory_for(contents)
        self._prepared.make_ready()

    def publish(self, contents: Contents, *, prepared: bool = True) -> Attachment:
        """Write `contents` to memory; see `StateTransport`."""
        check_names(contents.arrays)
        descriptor = None
        if prepared and self._prepared is not None:
            ready, self._prepared = self._prepared, None
            descriptor = ready.fill(contents)
        if descriptor is None:
            descriptor = memory_for(contents).fill(contents)
        assert descriptor is not None
        return Attachment(descriptor)

    def fetch(self, published: Attachment) -> Contents:
        """Map a published state without copying the arrays; see `StateTransport`."""
        try:
            header, memory, start = _read(published.descriptor)
            arrays = {}
            for name, kind, shape in header.arrays:
                start = _aligned(start)
                arrays[name] = array = _mapped(memory, start, named(kind), shape)
                start += array.nbytes
        except (OSError, ValueError, OverflowError, RecursionError, struct.error) as error:
            raise CheckpointError(f"cannot read the state from another worker: {error}") from None
        return Contents(header.step, header.manifest, arrays)

    def forget(self) -> None:
        """Free prepared memory; see `StateTransport`."""
        if self._prepared is not None:
            self._prepared.close()
            self._prepared = None


class StateMemory:
    """Memory for one state. Allocating it takes longer than filling it, and can happen in the background."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._descriptor = -1
        self._data = np.empty(0, np.uint8)
        self._failure = ""
        self._thread: threading.Thread | None = None
        self._closing = threading.Lock()
        self._closed = False

    def make_ready(self) -> None:
        """Allocate the memory on a thread."""
        self._thread = threading.Thread(target=self._allocate, name="memory", daemon=True)
        self._thread.start()

    def fill(self, contents: Contents) -> int | None:
        """Write `contents`; return the descriptor, which the caller must close, or None if they do not fit.

        Call this once.

        Raises:
            CheckpointError: there is too little memory.
        """
        if self._thread is None:
            self._allocate()
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
        """Free the memory unless it is filled; memory that is still being allocated is freed afterwards."""
        with self._closing:
            self._closed = True
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def _allocate(self) -> None:
        descriptor = -1
        try:
            descriptor = os.memfd_create("lockstep-state", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            if self._size > (room := available_memory()):
                raise MemoryError(f"it needs {self._size} bytes, and {room} are available")
            os.posix_fallocate(descriptor, 0, self._size)
            # Reading beyond the end of a truncated file kills the process.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            self._data = np.frombuffer(mmap.mmap(descriptor, self._size), np.uint8)
            # This maps each page while other threads run.
            self._data.fill(0)
        except (OSError, MemoryError) as error:
            self._failure = str(error)
        with self._closing:
            self._descriptor = descriptor
        if self._failure or self._closed:
            self.close()


def memory_for(contents: Contents) -> StateMemory:
    """Return memory for `contents`, with spare bytes for a growing header."""
    header, arrays = _parts(contents)
    return StateMemory(_extent(len(header) + _SPARE, arrays))


def _read(descriptor: int) -> tuple[_Header, mmap.mmap, int]:
    """Return the header, the memory, and the end of the header; raise ValueError if there is no header."""
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    memory = mmap.mmap(descriptor, 0, flags=flags, prot=mmap.PROT_READ)
    (length,) = _LENGTH.unpack_from(memory)
    start = _LENGTH.size + length
    return msgspec.msgpack.decode(memory[_LENGTH.size : start], type=_Header), memory, start


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
    # This copies only non-contiguous arrays.
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
