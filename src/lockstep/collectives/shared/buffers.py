"""One member's mapping of the pool: memory for a total, and memory outside it for partials.

Large totals use the same memory in every call. With small totals, other members may still sum the packed
partials of one call when this member publishes those of the next one. So packed partials alternate between
the two halves of the memory outside the total.
"""

import mmap
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Self, TypeVar

import numpy as np

from lockstep.collectives.contract import Bytes, Leaves, Span
from lockstep.collectives.layout import Layout, allocate
from lockstep.collectives.plan import ReducePlan
from lockstep.collectives.shared.packed_reduce import PackedReduce
from lockstep.collectives.shared.pool import SharedPool
from lockstep.collectives.shared.slice_reduce import SlicePlacement, SliceReduce

_SIZES = struct.Struct("<QQ")
_CACHED = 32
"""Number of cached plans; a job needs only a few."""

LocalSpans = tuple[Span, ...]
Key = TypeVar("Key")
Value = TypeVar("Value")


class Sizes(NamedTuple):
    """Bytes of the total, and of the memory outside it."""

    total: int
    outside: int

    def encode(self) -> bytes:
        """Return the sizes as bytes."""
        return _SIZES.pack(*self)

    @classmethod
    def largest(cls, encoded: Iterable[bytes]) -> Self:
        """Return the maxima of encoded sizes."""
        return cls(*map(max, zip(*map(_SIZES.unpack, encoded), strict=True)))

    @property
    def whole(self) -> int:
        """The sum of both sizes."""
        return self.total + self.outside


class Buffers:
    """Memory for reductions, reused across views. Members that make the same calls use the same half.

    Attributes:
        pool: the shared memory.
    """

    def __init__(self, pool: SharedPool) -> None:
        self.pool = pool
        self._sizes = Sizes(0, 0)
        self._memory: Bytes = np.empty(0, dtype=np.uint8)
        self._half = 0
        self._sliced: dict[tuple[Layout, LocalSpans], tuple[Sequence[SliceReduce], Leaves]] = {}
        self._packed: dict[tuple[Layout, LocalSpans, int], tuple[PackedReduce, Leaves]] = {}

    def fits(self, sizes: Sizes) -> bool:
        """Whether there is room for `sizes`."""
        return sizes.total <= self._sizes.total and sizes.outside <= self._sizes.outside

    def enlarged(self, sizes: Sizes) -> Sizes:
        """Return sizes, in whole pages, that hold both `sizes` and the current ones."""
        return Sizes(*(whole_pages(max(new, old)) for new, old in zip(sizes, self._sizes, strict=True)))

    def use(self, sizes: Sizes, memory: Bytes) -> None:
        """Use `memory` from now on; call this after all members have mapped it, while none uses the pool."""
        self._sliced.clear()
        self._packed.clear()
        self._sizes, self._memory, self._half = sizes, memory, 0

    def slice_reduces(
        self,
        layout: Layout,
        plan: ReducePlan,
        placements: Sequence[SlicePlacement],
        rank: int,
        local_spans: LocalSpans,
    ) -> tuple[Sequence[SliceReduce], Leaves]:
        """Return the reduce of each part of a large total for this member, and the total, read-only."""

        def make() -> tuple[Sequence[SliceReduce], Leaves]:
            total, outside = self._memory[: layout.size], self._memory[self._sizes.total :]
            leaves = layout.views(total)
            reduces = [
                SliceReduce.of(layout, plan, placement, rank, local_spans, total=leaves, outside=outside)
                for placement in placements
            ]
            return reduces, layout.shaped(leaves)

        return cached(self._sliced, (layout, local_spans), make)

    def packed_reduce(
        self, layout: Layout, plan: ReducePlan, rank: int, local_spans: LocalSpans
    ) -> tuple[PackedReduce, Leaves]:
        """Return this member's part in the reduce of a small total, and the total, read-only."""

        def make() -> tuple[PackedReduce, Leaves]:
            total, half = allocate(layout.size), self._sizes.total + self._half * (self._sizes.outside // 2)
            reduce = PackedReduce.of(layout, plan, rank, local_spans, (total, self._memory[half:]))
            return reduce, layout.shaped(layout.views(total))

        return cached(self._packed, (layout, local_spans, self._half), make)

    def parts(self, size: int) -> Bytes:
        """Return `size` bytes outside the total, for the parts of all members."""
        return self._memory[self._sizes.total : self._sizes.total + size]

    def switch_halves(self) -> None:
        """Use the other half for the next small total."""
        self._half = 1 - self._half


def cached(cache: dict[Key, Value], key: Key, make: Callable[[], Value]) -> Value:
    """Return the cached value for `key`, or make it; a full cache is cleared."""
    if key not in cache:
        if len(cache) >= _CACHED:
            cache.clear()
        cache[key] = make()
    return cache[key]


def whole_pages(size: int) -> int:
    """Round `size` up to whole pages of memory."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
