"""States that travel in memory without a name, between processes of one machine: nothing of it outlives them.

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
    """States in memfds; a `StateTransport`. An attachment is all that the other worker needs."""

    def __init__(self) -> None:
        self._prepared: StateMemory | None = None

    def prepare(self, contents: Contents) -> None:
        """Take memory for contents like these, on a thread."""
        self.forget()
        self._prepared = memory_for(contents)
        self._prepared.make_ready()

    def publish(self, contents: Contents, *, prepared: bool = True) -> Attachment:
        """Write `contents` to memory; see `StateTransport`."""
        check_names(contents.arrays)
        descriptor = None
        if prepared and self._prepared is not None:
            ready, self._prepared = self._prepared, None
            descriptor = ready.filled(contents)
        if descriptor is None:
            descriptor = memory_for(contents).filled(contents)
        assert descriptor is not None
        return Attachment(descriptor)

    def fetch(self, published: Attachment) -> Contents:
        """Map what was published; the arrays stay where they are, see `StateTransport`."""
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
        """Give back memory that was prepared."""
        if self._prepared is not None:
            self._prepared.close()
            self._prepared = None


class StateMemory:
    """Memory for one state. Taking it is slower than filling it, and can happen in the background."""

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
        """Write `contents`, once; return the descriptor, which the caller closes; None if they do not fit.

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


def _read(descriptor: int) -> tuple[_Header, mmap.mmap, int]:
    """Return the header, the memory, and where the header ends; raise ValueError if there is none."""
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
