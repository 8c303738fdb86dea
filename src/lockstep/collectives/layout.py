"""Shapes, dtypes and offsets of the leaves of a partial, and their division into even shares. Pure."""

import hashlib
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lockstep.collectives.contract import Leaves
from lockstep.errors import ModelError
from lockstep.topology import split_evenly

ALIGNMENT = 64
"""Bytes: a cache line, the widest vector, and the alignment at which backends take arrays without a copy."""

_SUMMABLE = frozenset(
    ["float16", "bfloat16", "float32", "float64"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)


class Stretch(NamedTuple):
    """The adjacent leaves `first <= i < last` of one dtype, and their bytes; never empty."""

    dtype: np.dtype[Any]
    first: int
    last: int
    start: int
    stop: int


class Piece(NamedTuple):
    """The elements `start <= i < stop` of a flattened leaf; never empty."""

    leaf: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Layout:
    """Shapes and dtypes of leaves, and their offsets in contiguous memory.

    Equal layouts are one object, so a lookup by layout is cheap: use `of`.

    Attributes:
        shapes: a shape for each leaf.
        dtypes: a dtype for each leaf.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype[Any], ...]

    @staticmethod
    def of(leaves: Leaves) -> "Layout":
        """Return the layout of `leaves`; equal leaves share one object and its cached properties."""
        # Lists are faster than generators.
        return _intern(tuple([leaf.shape for leaf in leaves]), tuple([leaf.dtype for leaf in leaves]))

    def check(self) -> None:
        """Check that all leaves can be summed.

        Raises:
            ModelError: the contract does not list a dtype.
        """
        if self._unsummable is not None:
            raise ModelError(
                f"array {self._unsummable} of those to sum over replicas has dtype "
                f"{self.dtypes[self._unsummable]}; only floating-point numbers of 16 to 64 bits and integers "
                "can be summed: convert it first"
            )

    @cached_property
    def _unsummable(self) -> int | None:
        bad = (i for i, dtype in enumerate(self.dtypes) if dtype.name not in _SUMMABLE or not dtype.isnative)
        return next(bad, None)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each leaf."""
        return tuple(
            dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The offset of each leaf, a multiple of `ALIGNMENT`."""
        offsets, end = [], 0
        for size in self.sizes:
            offsets.append(end)
            end += aligned(size)
        return tuple(offsets)

    @cached_property
    def size(self) -> int:
        """Bytes of all leaves, a multiple of `ALIGNMENT`."""
        return sum(aligned(size) for size in self.sizes)

    @cached_property
    def stretches(self) -> tuple[Stretch, ...]:
        """All leaves, in as few stretches as possible; the padding after a leaf belongs to its stretch."""
        stretches, leaf = list[Stretch](), 0
        for dtype, group in itertools.groupby(self.dtypes):
            first, leaf = leaf, leaf + len(list(group))
            start = self.offsets[first]
            stop = self.offsets[leaf - 1] + aligned(self.sizes[leaf - 1])
            if start < stop:
                stretches.append(Stretch(dtype, first, leaf, start, stop))
        return tuple(stretches)

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that are equal for equal layouts."""
        return hashlib.blake2b("\n".join(self.describe()).encode(), digest_size=16).digest()

    def describe(self) -> list[str]:
        """Return a line for each leaf with its dtype and shape."""
        return [f"{dtype.name} {shape}" for shape, dtype in zip(self.shapes, self.dtypes, strict=True)]

    def bounds(self, members: int) -> tuple[tuple[int, int], ...]:
        """Divide the bytes `[0, size)` evenly among members, at multiples of `ALIGNMENT`."""
        ends, end = [], 0
        for lines in split_evenly(self.size // ALIGNMENT, members):
            ends.append((end, end + lines * ALIGNMENT))
            end = ends[-1][1]
        return tuple(ends)

    def pieces(self, start: int, stop: int) -> tuple[Piece, ...]:
        """Return the elements in the bytes `[start, stop)`; both are multiples of `ALIGNMENT`."""
        pieces = []
        # The last leaf that begins at or before `start`: all leaves before it also end there.
        first_leaf = max(bisect_right(self.offsets, start) - 1, 0)
        for leaf in range(first_leaf, bisect_left(self.offsets, stop)):
            offset, itemsize = self.offsets[leaf], self.dtypes[leaf].itemsize
            first, last = max(start - offset, 0), min(stop - offset, self.sizes[leaf])
            if first < last:
                pieces.append(Piece(leaf, first // itemsize, last // itemsize))
        return tuple(pieces)

    def views(self, memory: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[Any], ...]:
        """Return the leaves in `memory`, flat, as writable views."""
        return tuple(
            memory[offset : offset + size].view(dtype)
            for offset, size, dtype in zip(self.offsets, self.sizes, self.dtypes, strict=True)
        )

    def shaped(self, flat: Sequence[npt.NDArray[Any]]) -> tuple[npt.NDArray[Any], ...]:
        """Return the flat leaves in their shapes, read-only."""
        leaves = tuple(leaf.reshape(shape) for leaf, shape in zip(flat, self.shapes, strict=True))
        for leaf in leaves:
            leaf.flags.writeable = False
        return leaves


@lru_cache(maxsize=64)
def _intern(shapes: tuple[tuple[int, ...], ...], dtypes: tuple[np.dtype[Any], ...]) -> Layout:
    return Layout(shapes, dtypes)


def aligned(size: int) -> int:
    """Round `size` up to a multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def joined(parts: Sequence[npt.NDArray[np.uint8]]) -> npt.NDArray[np.uint8]:
    """Return the concatenation of arrays of bytes in new memory; see `allocate`."""
    memory = allocate(sum(part.size for part in parts))
    np.concatenate([memory[:0], *parts], out=memory)
    return memory


def allocate(size: int) -> npt.NDArray[np.uint8]:
    """Return `size` bytes of this process's memory that start at a multiple of `ALIGNMENT`."""
    memory = np.empty(size + ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]
