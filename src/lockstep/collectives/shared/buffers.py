"""One worker's mapping of the pool: a total, and the places outside of it.

A large total uses the same memory in every call, and so do its places. With small totals, other members may
still sum the packets of the last call when this member publishes for the next: so packets alternate between
the two halves of the places.
"""

import mmap
import struct
from collections.abc import Callable, Iterable
from typing import NamedTuple, Self, TypeVar

import numpy as np

from lockstep.collectives.contract import Leaves, Span
from lockstep.collectives.layout import Layout, allocate
from lockstep.collectives.plan import ReducePlan
from lockstep.collectives.shared.packed_reduce import PackedReduce
from lockstep.collectives.shared.pool import SharedPool
from lockstep.collectives.shared.slice_reduce import SliceReduce, SliceWork
from lockstep.collectives.summing import Bytes

_SIZES = struct.Struct("<QQ")
_KEPT = 32
"""Number of layouts and turns for which the plan is cached; a job has a handful."""

Given = tuple[Span, ...]
Key = TypeVar("Key")
Value = TypeVar("Value")


class Sizes(NamedTuple):
    """Bytes of the total, and of all places outside of it."""

    total: int
    outside: int

    def packed(self) -> bytes:
        """Return them as bytes."""
        return _SIZES.pack(*self)

    @classmethod
    def largest(cls, packed: Iterable[bytes]) -> Self:
        """Return the smallest sizes in which all of `packed` fit."""
        return cls(*map(max, zip(*map(_SIZES.unpack, packed), strict=True)))

    @property
    def whole(self) -> int:
        """Bytes of both together."""
        return self.total + self.outside


class Buffers:
    """Memory for reductions, reused across views. Members that make the same calls have the same turn."""

    def __init__(self, pool: SharedPool) -> None:
        self._pool = pool
        self._sizes = Sizes(0, 0)
        self._memory: Bytes = np.empty(0, dtype=np.uint8)
        self._turn = 0
        self._slices: dict[tuple[Layout, Given], tuple[SliceWork, Leaves]] = {}
        self._packets: dict[tuple[Layout, Given, int], tuple[PackedReduce, Leaves]] = {}

    def look_around(self) -> None:
        """Map the memory that others have already allocated, while no member waits for this worker.

        Raises:
            SharedMemoryError: this process cannot map that much.
        """
        self._memory = np.frombuffer(self._pool.map(self._pool.size), dtype=np.uint8)

    def fits(self, sizes: Sizes) -> bool:
        """Whether there is room for `sizes`."""
        return sizes.total <= self._sizes.total and sizes.outside <= self._sizes.outside

    def enlarged(self, sizes: Sizes) -> Sizes:
        """Return sizes, in whole pages, that hold both `sizes` and the current ones."""
        return Sizes(*(_pages(max(new, old)) for new, old in zip(sizes, self._sizes, strict=True)))

    def take(self, sizes: Sizes) -> None:
        """Grow the pool; called by one member only.

        Raises:
            SharedMemoryError: there is too little memory.
        """
        self._pool.grow(sizes.whole)

    def map(self, sizes: Sizes) -> Bytes:
        """Map the grown pool unless it is already mapped.

        Raises:
            SharedMemoryError: this process cannot map that much.
        """
        if sizes.whole <= len(self._memory):
            return self._memory
        return np.frombuffer(self._pool.map(sizes.whole), dtype=np.uint8)

    def use(self, sizes: Sizes, memory: Bytes) -> None:
        """Use `memory` from now on; call this once all members have mapped it and none uses it."""
        self._slices.clear()
        self._packets.clear()
        self._sizes, self._memory, self._turn = sizes, memory, 0

    def slices(
        self, layout: Layout, plan: ReducePlan, places: SliceReduce, position: int, given: Given
    ) -> tuple[SliceWork, Leaves]:
        """Return this member's work for the next large total, and the total, read-only."""

        def make() -> tuple[SliceWork, Leaves]:
            total, outside = self._memory[: layout.size], self._memory[self._sizes.total :]
            work = SliceWork.of(layout, plan, places, position, given, (total, outside))
            return work, layout.shaped(layout.views(total))

        return remembered(self._slices, (layout, given), make)

    def packets(
        self, layout: Layout, plan: ReducePlan, position: int, given: Given
    ) -> tuple[PackedReduce, Leaves]:
        """Return this member's work for the next small total, and the total, read-only."""

        def make() -> tuple[PackedReduce, Leaves]:
            total, half = allocate(layout.size), self._sizes.total + self._turn * (self._sizes.outside // 2)
            packets = PackedReduce.of(layout, plan, position, given, (total, self._memory[half:]))
            return packets, layout.shaped(layout.views(total))

        return remembered(self._packets, (layout, given, self._turn), make)

    def turn(self) -> None:
        """Use the other half of the places for the next small total."""
        self._turn = 1 - self._turn


def remembered(made: dict[Key, Value], key: Key, make: Callable[[], Value]) -> Value:
    """Return the cached value for `key`, or make it; clears the cache when it is full."""
    if key not in made:
        if len(made) >= _KEPT:
            made.clear()
        made[key] = make()
    return made[key]


def _pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
