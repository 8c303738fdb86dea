"""Arithmetic of seeds: a seed that follows from values, and the seed and key of each replica. Pure."""

import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

GOLDEN = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio: spreads consecutive replica ids over the seeds."""

GOLDEN_32 = GOLDEN >> 32
"""The same for keys whose words have 32 bits."""


def seed_of(*values: Any) -> int:
    """Return 64 bits derived from plain values."""
    return xxhash.xxh3_64_intdigest(repr(values).encode())


def seed_at(seed: int, number: int, position: int) -> int:
    """Return the 64-bit seed of a step of a call, or of an item of a pass.

    Args:
        seed: the seed of the call, or of all passes.
        number: the number of the call or of the pass.
        position: the number of the step or of the item.
    """
    return xxhash.xxh3_64_intdigest(struct.pack("<3Q", seed, number, position))


def seed_of_replica(seed: int, replica: int) -> int:
    """Return the seed of a replica that computes eagerly. That of replica 0 is the step's."""
    return seed ^ replica * GOLDEN % 2**64


def key_of_replica(key: npt.NDArray[Any], replica: int) -> npt.NDArray[Any]:
    """Return a replica's state of a random generator with the state `key`. That of replica 0 is `key`."""
    changed = np.array(key)
    bits = changed.view(f"u{changed.itemsize}")
    bits[0] ^= bits.dtype.type(replica * GOLDEN_32 % 2**32)
    return changed
