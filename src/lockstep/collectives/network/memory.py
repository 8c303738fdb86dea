"""The memory of a member: shared with the other workers of its host, or private if there are none.

In shared memory, the totals of successive calls alternate between two regions. So the total of a call stays
until the next call is complete, and a host that has not completed the call can still receive it.
"""

import enum
import struct
from collections.abc import Sequence
from typing import NamedTuple, Self, TypeAlias

import numpy as np

from lockstep.collectives.contract import Bytes
from lockstep.collectives.layout import allocate
from lockstep.collectives.shared.buffers import whole_pages
from lockstep.collectives.shared.pool import SharedPool


class Region(enum.IntEnum):
    """The purpose of a region of memory."""

    EVEN_TOTAL = 0
    """The total of a call with an even number, and published sums in its place."""
    ODD_TOTAL = 1
    OUTSIDE = 2
    """Published sums that have no place in the total; parts of an all-to-all."""
    PACKED = 3
    """Packed partials of a small total, in two halves."""


class Extent(NamedTuple):
    """The place of a region in the shared memory."""

    start: int
    size: int


Sizes: TypeAlias = tuple[int, int, int, int]
"""Bytes of each region."""


class Extents(NamedTuple):
    """The places of all regions in the shared memory. They never overlap."""

    even_total: Extent = Extent(0, 0)
    odd_total: Extent = Extent(0, 0)
    outside: Extent = Extent(0, 0)
    packed: Extent = Extent(0, 0)

    def encode(self) -> bytes:
        """Return the extents as bytes."""
        return _EXTENTS.pack(*(number for extent in self for number in extent))

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Decode extents of another worker of this host."""
        numbers = _EXTENTS.unpack(data)
        return cls(*map(Extent, numbers[::2], numbers[1::2]))

    @property
    def end(self) -> int:
        """Bytes of shared memory that hold all regions."""
        return max(extent.start + extent.size for extent in self)

    def fits(self, sizes: Sequence[int]) -> bool:
        """Whether each region has at least as many bytes as `sizes` says."""
        return all(size <= extent.size for size, extent in zip(sizes, self, strict=True))

    def enlarged(self, sizes: Sequence[int]) -> Self:
        """Return extents with room for `sizes`; a region that is large enough stays where it is."""
        extents = list(self)
        for index, size in enumerate(sizes):
            if size > extents[index].size:
                others = sorted(
                    extent for other, extent in enumerate(extents) if other != index and extent.size
                )
                extents[index] = Extent(_gap(others, whole_pages(size)), whole_pages(size))
        return type(self)(*extents)


_EXTENTS = struct.Struct("<8Q")


def _gap(taken: Sequence[Extent], size: int) -> int:
    """Return the first place of `size` bytes beside the extents `taken`, in order."""
    start = 0
    for extent in taken:
        if start + size <= extent.start:
            break
        start = extent.start + extent.size
    return start


class NetworkBuffers:
    """Memory for reductions, reused across views.

    Attributes:
        pool: the shared memory.
        extents: the places of the regions in it.
    """

    def __init__(self, pool: SharedPool) -> None:
        self.pool = pool
        self._shared: Bytes = np.empty(0, dtype=np.uint8)
        self._private: dict[Region, Bytes] = {}
        self.extents = Extents()

    def private(self, region: Region, size: int) -> Bytes:
        """Return `size` bytes of this process's own memory, the same in each call if it is large enough."""
        memory = self._private.get(region)
        if memory is None or memory.size < size:
            memory = self._private[region] = allocate(size)
        return memory[:size]

    def shared(self, region: Region) -> Bytes:
        """Return the memory of a region that the workers of this host share."""
        start, size = self.extents[region]
        return self._shared[start : start + size]

    def use(self, extents: Extents, memory: Bytes) -> None:
        """Use `memory` from now on; call this after all workers of the host have mapped it."""
        self.extents, self._shared = extents, memory
