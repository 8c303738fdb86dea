"""One member's view of the growing part of an arena: two totals and the places outside of them."""

import mmap
from typing import NamedTuple

import numpy as np

from lockstep.collectives.arena import Arena
from lockstep.collectives.contract import Span
from lockstep.collectives.layout import Layout
from lockstep.collectives.memory import Available
from lockstep.collectives.places import Places, Work
from lockstep.collectives.plan import ReducePlan
from lockstep.collectives.summing import Array, Bytes

_KEPT = 32
"""For how many layouts and turns the work is kept; a job has a handful."""


class Sizes(NamedTuple):
    """Bytes of one total, and of all places outside of the totals."""

    total: int
    outside: int

    @property
    def whole(self) -> int:
        """Bytes of the two totals and the places."""
        return 2 * self.total + self.outside


class Room:
    """Memory for reductions. Members that make the same calls have the same sizes and turn."""

    def __init__(self, arena: Arena, available: Available) -> None:
        self._arena = arena
        self._available = available
        self._sizes = Sizes(0, 0)
        self._memory: Bytes = np.empty(0, dtype=np.uint8)
        self._turn = 0
        self._work: dict[tuple[Layout, tuple[Span, ...], int], tuple[Work, tuple[Array, ...]]] = {}

    def fits(self, sizes: Sizes) -> bool:
        """Whether there is room for `sizes`."""
        return sizes.total <= self._sizes.total and sizes.outside <= self._sizes.outside

    def enlarged(self, sizes: Sizes) -> Sizes:
        """Return sizes for which both `sizes` and what fits now fit; whole pages."""
        return Sizes(*(_pages(max(new, old)) for new, old in zip(sizes, self._sizes, strict=True)))

    def take(self, sizes: Sizes) -> None:
        """Grow the arena; for one member only.

        Raises:
            SharedMemoryError: there is too little memory.
        """
        self._arena.grow(sizes.whole, self._available)

    def map(self, sizes: Sizes) -> Bytes:
        """Map the grown arena.

        Raises:
            SharedMemoryError: this process cannot map that much.
        """
        return np.frombuffer(self._arena.map(sizes.whole), dtype=np.uint8)

    def use(self, sizes: Sizes, memory: Bytes) -> None:
        """Use `memory` from now on; to be called once all members have mapped it."""
        self._work.clear()
        self._sizes, self._memory = sizes, memory

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

    def clear(self) -> None:
        """Let go of the memory; it is unmapped once nobody holds a total."""
        self._work.clear()
        self._sizes, self._memory = Sizes(0, 0), np.empty(0, dtype=np.uint8)


def _pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
