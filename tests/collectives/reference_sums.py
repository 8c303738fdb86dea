"""The oracle: sums by definition, without any optimization; and data to sum."""

import hashlib
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

FLOATS = ("float16", "bfloat16", "float32", "float64")
DTYPES = (*FLOATS, "int8", "int32", "int64", "uint32")


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def reference(parts: Sequence[Sequence[Array]]) -> list[Array]:
    """Return the sum over replicas; `parts` has the leaves of each replica."""
    return [tree_sum([leaves[index] for leaves in parts]) for index in range(len(parts[0]))]


def tree_sum(parts: Sequence[Array]) -> Array:
    if len(parts) == 1:
        return parts[0]
    left = 1
    while left * 2 < len(parts):
        left *= 2
    return add(tree_sum(parts[:left]), tree_sum(parts[left:]))


def add(first: Array, second: Array) -> Array:
    """Add in whole vectors: elsewhere NumPy does not define which of two NaNs their sum is."""
    lanes = 64 // first.dtype.itemsize
    padded = np.zeros((2, -(-first.size // lanes) * lanes), dtype=first.dtype)
    padded[0, : first.size] = first.reshape(-1)
    padded[1, : first.size] = second.reshape(-1)
    with np.errstate(all="ignore"):
        total = padded[0] + padded[1]
    return total[: first.size].reshape(first.shape)


def leaves_of(
    seed: int, replica: int, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str]
) -> list[Array]:
    """Return one replica's arrays: ordinary numbers, special numbers and arbitrary bits."""
    random = np.random.default_rng([seed, replica])
    return [values(random, shape, dtype_of(name)) for shape, name in zip(shapes, dtypes, strict=True)]


def values(random: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    size = int(np.prod(shape, dtype=np.int64))
    if size > 1 << 18:
        return np.resize(values(random, (65521,), dtype), shape)
    bits = np.frombuffer(random.bytes(size * dtype.itemsize), dtype=dtype)
    if dtype.kind in "iu":
        return bits.reshape(shape)
    with np.errstate(all="ignore"):
        special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-45, 1.0, 65504.0]).astype(dtype)
        numbers = random.standard_normal(size).astype(dtype)
    chosen = random.integers(0, 6, size)
    picked = special[random.integers(0, special.size, size)]
    mixed = np.where(chosen == 0, bits, np.where(chosen == 1, picked, numbers))
    return mixed.astype(dtype, copy=False).reshape(shape)


def sha(leaves: Sequence[Array]) -> str:
    """Return a digest of all bits, shapes and dtypes."""
    digest = hashlib.sha256()
    for leaf in leaves:
        digest.update(f"{leaf.dtype.name} {leaf.shape};".encode())
        digest.update(leaf.tobytes())
    return digest.hexdigest()


def blob_of(seed: int, rank: int, size: int) -> bytes:
    """Return a member's blob."""
    return np.random.default_rng([seed, rank]).bytes(size)
