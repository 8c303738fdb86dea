"""Contents in memory without a name, for another process of this machine: nothing of it outlives them.

A header, msgpack behind its length, then the arrays one after the other, each at a multiple of 64 bytes.
"""

import contextlib
import fcntl
import mmap
import os
import struct

import msgspec
import numpy as np

from lockstep.checkpoint.dtypes import named
from lockstep.checkpoint.folder import Contents, check_names
from lockstep.errors import CheckpointError

_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 64
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class _Header(msgspec.Struct):
    """What stands before the arrays: [name, dtype, shape] of each."""

    step: int
    manifest: dict[str, object]
    arrays: list[tuple[str, str, tuple[int, ...]]]


def pack_parcel(contents: Contents) -> int:
    """Write `contents` to new memory; return its descriptor, which the caller closes.

    Raises:
        CheckpointError: there is too little memory, or an array has a name or dtype that the format of
            checkpoints does not know.
    """
    check_names(contents.arrays)
    # Arrays whose elements lie apart are copied; all others are written from where they are.
    arrays = {name: np.asarray(array, order="C") for name, array in contents.arrays.items()}
    kinds = [(name, array.dtype.name, array.shape) for name, array in arrays.items()]
    header = msgspec.msgpack.encode(_Header(contents.step, dict(contents.manifest), kinds))
    descriptor = os.memfd_create("lockstep-state", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        start = _write(descriptor, _LENGTH.pack(len(header)) + header, 0)
        for array in arrays.values():
            start = _write(descriptor, array.reshape(-1).view(np.uint8).data, start)
        os.ftruncate(descriptor, start)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError | MemoryError):
            raise CheckpointError(f"the state does not fit into memory: {error}") from None
        raise
    return descriptor


def unpack_parcel(descriptor: int) -> Contents:
    """Read what `pack_parcel` has written; takes over `descriptor`.

    Returns:
        The contents; the arrays are read-only, and stay where they are.
    """
    with contextlib.closing(os.fdopen(descriptor, "rb", buffering=0)):
        memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    (length,) = _LENGTH.unpack_from(memory)
    start = _LENGTH.size + length
    header = msgspec.msgpack.decode(memory[_LENGTH.size : start], type=_Header)
    arrays = {}
    for name, kind, shape in header.arrays:
        start = _aligned(start)
        array = np.empty(shape, named(kind))
        if array.size:
            array = np.frombuffer(memory, array.dtype, array.size, start).reshape(shape)
        arrays[name] = array
        start += array.nbytes
    return Contents(header.step, header.manifest, arrays)


def _write(descriptor: int, data: "bytes | memoryview", start: int) -> int:
    """Write at the next aligned place from `start` on; return where it ends."""
    start = _aligned(start)
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, start)
        view, start = view[written:], start + written
    return start


def _aligned(start: int) -> int:
    return -(-start // _ALIGNMENT) * _ALIGNMENT
