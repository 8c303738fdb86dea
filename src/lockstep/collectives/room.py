"""One worker's mapping of the pool: two totals and the places outside of them."""

import mmap
import struct
from collections.abc import Iterable
from typing import NamedTuple, Self

import numpy as np

from lockstep.collectives.contract import Span
from lockstep.collectives.layout import Layout
from lockstep.collectives.places import Places, Work
from lockstep.collectives.plan import ReducePlan
from lockstep.collectives.pool import Pool
from lockstep.collectives.summing import Array, Bytes

_SIZES = struct.Struct("<QQ")
_KEPT = 32
"""For how many layouts and turns the work is kept; a job has a handful."""


class Sizes(NamedTuple):
    """Bytes of one total, and of all places outside of the totals."""

    total: int
    outside: int

    def packed(self) -> bytes:
        """Return them as bytes."""
        return _SIZES.pack(*self)

    @classmethod
    def largest(cls, packed: Iterable[bytes]) -> Self:
        """Return the sizes in which all of `packed` fit."""
        return cls(*map(max, zip(*map(_SIZES.unpack, packed), strict=True)))

    @property
    def whole(self) -> int:
        """Bytes of the two totals and the places."""
        return 2 * self.total + self.outside


class Room:
    """Memory for reductions, in view after view. Members that make the same calls have the same turn."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._sizes = Sizes(0, 0)
        self._memory: Bytes = np.empty(0, dtype=np.uint8)
        self._turn = 0
        self._work: dict[tuple[Layout, tuple[Span, ...], int], tuple[Work, tuple[Array, ...]]] = {}

    def look_around(self) -> None:
        """Map what others have taken already, while nobody waits for this worker.

        Raises:
            SharedMemoryError: this process cannot map that much.
        """
        self._memory = np.frombuffer(self._pool.map(self._pool.size), dtype=np.uint8)

    def fits(self, sizes: Sizes) -> bool:
        """Whether there is room for `sizes`."""
        return sizes.total <= self._sizes.total and sizes.outside <= self._sizes.outside

    def enlarged(self, sizes: Sizes) -> Sizes:
        """Return sizes for which both `sizes` and what fits now fit; whole pages."""
        return Sizes(*(_pages(max(new, old)) for new, old in zip(sizes, self._sizes, strict=True)))

    def take(self, sizes: Sizes) -> None:
        """Grow the pool; for one member only.

        Raises:
            SharedMemoryError: there is too little memory.
        """
        self._pool.grow(sizes.whole)

    def map(self, sizes: Sizes) -> Bytes:
        """Map the grown pool, if it is not mapped yet.

        Raises:
            SharedMemoryError: this process cannot map that much.
        """
        if sizes.whole <= len(self._memory):
            return self._memory
        return np.frombuffer(self._pool.map(sizes.whole), dtype=np.uint8)

    def use(self, sizes: Sizes, memory: Bytes) -> None:
        """Use `memory` from now on; to be called once all members have mapped it, and none uses it."""
        self._work.clear()
        self._sizes, self._memory, self._turn = sizes, memory, 0

    def work(
        self, layout: Layout, plan: ReducePlan, places: Places, position: int, given: tuple[Span, ...]
    ) -> tuple[Work, tuple[Array, ...]]:
        """Return what this member does in the coming reduction, and its total, read-only."""
        key = layout, given, self._turn
        if key not in self._work:
            if len(self._work) >= _KEPT:
                self._work.clear()
            start = self._turn * self._sizes.total
            total = self._memory[start : start + layout.size]
            outside = self._memory[2 * self._sizes.total :]
            work = Work.of(layout, plan, places, position, given, (total, outside))
            self._work[key] = work, layout.shaped(layout.views(total))
        return self._work[key]

    def turn(self) -> None:
        """Use the other total next, since the members read this one until they call again."""
        self._turn = 1 - self._turn


def _pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
