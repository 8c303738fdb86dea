"""Sums of arrays as small integers: a quarter of the bytes of single precision. Pure.

    limit      the largest magnitude in a block of a replica's array
    scale      of a block, for all replicas: the sum of their limits, divided by the largest sum of integers
    summand    a replica's array, divided by the scales and rounded to integers

The limits are summed first. Then all replicas have the same scales, and no sum of summands exceeds the range
of the integers. So the sum of the summands is exact, in any order. An element has an error of at most half a
scale for each replica. If an element is not finite, no element of its block is a number in the sum.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

BLOCK = 256
"""The elements of a block, whose limit has the bytes of four of them."""
_BYTES = 32
"""The most replicas whose sums are of bytes: more would leave them few of the integers."""
_SMALLEST = np.finfo(np.float32).tiny

Array = npt.NDArray[Any]


def limits_of(array: Array) -> Array:
    """Return the limits of the blocks of an array, in float32."""
    flat = np.abs(np.asarray(array, np.float32).reshape(-1))
    whole = flat.size - flat.size % BLOCK
    limits = flat[:whole].reshape(-1, BLOCK).max(1, initial=0)
    return np.append(limits, flat[whole:].max(keepdims=True)) if whole < flat.size else limits


def scales_of(limits: Array, replicas: int) -> Array:
    """Return the scales of the blocks, given the sums of the replicas' limits."""
    # Rounding adds at most one half for each replica.
    return limits / np.float32(np.iinfo(_integers(replicas)).max - replicas / 2)


def summand_of(array: Array, scales: Array, replicas: int) -> Array:
    """Return a replica's array as integers, in its shape."""
    usable = np.isfinite(scales) & (scales >= _SMALLEST)
    factors = np.divide(1, scales, out=np.zeros_like(scales), where=usable)
    # Numbers are too large for the integers only with wrong scales.
    with np.errstate(invalid="ignore", over="ignore"):
        numbers = _times(np.asarray(array, np.float32), factors)
        np.rint(numbers, out=numbers)
        # A scale of zero or infinity does not bound its block.
        return np.where(np.isfinite(numbers), numbers, 0).astype(_integers(replicas))


def sum_of(total: Array, scales: Array, dtype: npt.DTypeLike) -> Array:
    """Return the sum of the replicas' arrays, given the sum of their summands."""
    with np.errstate(invalid="ignore", over="ignore"):
        return _times(total.astype(np.float32), scales).astype(dtype)


def _integers(replicas: int) -> type[np.signedinteger[Any]]:
    return np.int8 if replicas <= _BYTES else np.int16


def _times(array: Array, factors: Array) -> Array:
    """Return an array times the factors of its blocks."""
    flat = array.reshape(-1)
    product = np.empty_like(flat)
    whole = flat.size - flat.size % BLOCK
    np.multiply(
        flat[:whole].reshape(-1, BLOCK),
        factors[: whole // BLOCK, None],
        out=product[:whole].reshape(-1, BLOCK),
    )
    if whole < flat.size:
        np.multiply(flat[whole:], factors[-1], out=product[whole:])
    return product.reshape(array.shape)
