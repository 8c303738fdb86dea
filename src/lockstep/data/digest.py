"""Fast hashes with which workers detect that they read different data; not for security."""

import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

SAMPLED_ROWS = 64

_PLAIN = frozenset(np.dtype(code) for code in "?" + np.typecodes["AllInteger"] + np.typecodes["AllFloat"])
"""Numeric dtypes, whose memory NumPy exposes through the buffer protocol."""


def digest_arrays(arrays: Iterable[npt.NDArray[Any]], prefix: bytes = b"") -> bytes:
    """Hash `prefix` and the shapes, dtypes and bytes of `arrays`, which may contain strings (16 bytes)."""
    state = xxhash.xxh3_128(prefix)
    for array in arrays:
        state.update(_described(array.dtype, array.shape))
        state.update(_bytes_of(array))
    return state.digest()


def digest_array(array: npt.NDArray[Any]) -> bytes:
    """Hash the bytes of an array, which may contain strings, but not its shape or dtype (8 bytes)."""
    return xxhash.xxh3_64_digest(_bytes_of(array))


def digest_rows(arrays: Sequence[npt.NDArray[Any]], parts: int) -> bytes:
    """Hash the first axis of `arrays`, all of one length, in at most `parts` parts (4 bytes each).

    Every part except the last has the same number of rows, the smallest possible.
    """
    count = len(arrays[0])
    size = max(1, -(-count // parts))
    starts = range(0, count, size)
    seeds = [0] * len(starts)
    for array in arrays:
        if array.dtype.kind == "O":
            pieces = [_bytes_of(array[start : start + size]) for start in starts]
        else:
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            row = len(flat) // count
            pieces = [flat[start * row : (start + size) * row] for start in starts]
        seeds = [xxhash.xxh3_64_intdigest(piece, seed) for piece, seed in zip(pieces, seeds, strict=True)]
    return b"".join(struct.pack("<I", seed & 0xFFFFFFFF) for seed in seeds)


def _bytes_of(array: npt.NDArray[Any]) -> Any:
    """Return a buffer with the contents of an array; strings count by content, with their lengths."""
    if array.dtype.kind == "O":
        texts = [item if isinstance(item, bytes) else str(item).encode() for item in array.flat]
        return b"".join(len(text).to_bytes(8, "little") + text for text in texts)
    if array.dtype in _PLAIN and array.flags.c_contiguous:
        return array
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def sample_rows(count: int) -> npt.NDArray[np.int64]:
    """Return at most `SAMPLED_ROWS` of `count` rows, evenly spaced, including the first and the last."""
    return np.unique(np.linspace(0, max(count - 1, 0), min(count, SAMPLED_ROWS)).astype(np.int64))


@lru_cache
def _described(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return a description; cached, since formatting a dtype takes longer than hashing a small array."""
    return f"{dtype}{shape}".encode()
