"""A digest of numbered rows that follows changes of some rows.

The digest is the sum of a hash of each row with its number, in 128 bits. So it does not depend on how the
rows are divided, and a change of a row takes only the time of that row. It shows differences between runs,
but does not protect against a person who constructs two tables with the same digest.
"""

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_LANES = 2
_ROWS = 1 << 14
"""Rows that are hashed at a time."""


def digest_of_rows(numbers: Array, rows: Array, salt: int = 0) -> Array:
    """Return the digest of some rows: two unsigned integers of 64 bits, to be added without carry.

    Args:
        numbers: the numbers of the rows, in the whole table, of shape `(n,)`.
        rows: the rows, of shape `(n, ...)` and any dtype.
        salt: a number that distinguishes several arrays with rows of the same numbers.
    """
    total = np.zeros(_LANES, np.uint64)
    for first in range(0, len(rows), _ROWS):
        total += _digest(numbers[first : first + _ROWS], rows[first : first + _ROWS], salt)
    return total


def _digest(numbers: Array, rows: Array, salt: int) -> Array:
    data = np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8)
    words = np.zeros((len(rows), -(-data.shape[1] // 4) * 4), np.uint8)
    words[:, : data.shape[1]] = data
    wide = words.view(np.uint32).astype(np.uint64)
    # This is a linear hash with random coefficients. The number of the row enters during the mixing.
    linear = wide @ _coefficients(salt, wide.shape[1])
    linear += _mixed(numbers.astype(np.uint64) + np.uint64(1))[:, None]
    total: Array = _mixed(linear).sum(axis=0, dtype=np.uint64)
    return total


@lru_cache(64)
def _coefficients(salt: int, words: int) -> Array:
    return np.random.default_rng([salt, words]).integers(0, 1 << 63, (words, _LANES), np.uint64) * np.uint64(
        2
    ) + np.uint64(1)


def _mixed(values: Array) -> Array:
    """Return the output function of SplitMix64 (Steele, Lea and Flood, 2014) of each value."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Array = values ^ (values >> np.uint64(31))
    return mixed
