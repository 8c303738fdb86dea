"""Small totals: each member packs what it publishes, and every member sums everything.

A barrier takes longer than adding a few numbers, and so does calling NumPy. So there is only one barrier, and
the leaves of a partial are packed into a packet, in which adjacent leaves of one dtype are one array.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from lockstep.collectives.contract import Span
from lockstep.collectives.layout import Layout, Stretch, aligned, allocate
from lockstep.collectives.plan import ReducePlan, Sum
from lockstep.collectives.summing import Adder, Array, Bytes

SMALL = 1 << 17
"""Bytes of the largest total that is small."""

Packet = Sequence[Array]
"""An array for each stretch of a layout."""


def size(layout: Layout, plan: ReducePlan) -> int:
    """Return the bytes of the packets of all members of `plan`."""
    return layout.size * sum(map(len, plan.published))


class _Addition(NamedTuple):
    """A sum over one stretch of packets."""

    sum: Sum
    operands: Sequence[Array]
    out: Array


@dataclass(frozen=True)
class Packing:
    """How the leaves of one stretch are packed.

    Attributes:
        stretch: the leaves.
        fills: for each leaf, the padding of its last line.
    """

    stretch: Stretch
    fills: tuple[Array, ...]

    @classmethod
    def of(cls, layout: Layout, stretch: Stretch) -> Self:
        """Prepare to pack `stretch` of `layout`."""
        sizes = layout.sizes[stretch.first : stretch.last]
        fills = (np.zeros(aligned(size) - size, np.uint8).view(stretch.dtype) for size in sizes)
        return cls(stretch, tuple(fills))

    def pack(self, leaves: Sequence[Array], out: Array) -> None:
        """Pack flat `leaves`, those of the whole layout, into `out`."""
        parts = list[Array]()
        for leaf, fill in zip(leaves[self.stretch.first : self.stretch.last], self.fills, strict=True):
            parts.append(leaf)
            if fill.size:
                parts.append(fill)
        np.concatenate(parts, out=out)


@dataclass(frozen=True)
class PackedReduce:
    """What one member does in a reduction, for partials over certain spans, in certain memory.

    Attributes:
        packings: one for each stretch.
        given: for each partial its packet, which others read or this member merges.
        merges: sums of own packets, to be written before the barrier.
        total: sums of all members' packets, to be written after it.
    """

    packings: tuple[Packing, ...]
    given: Mapping[Span, Packet]
    merges: tuple[_Addition, ...]
    total: tuple[_Addition, ...]

    @classmethod
    def of(
        cls,
        layout: Layout,
        plan: ReducePlan,
        position: int,
        given: Collection[Span],
        memory: tuple[Bytes, Bytes],
    ) -> Self:
        """Plan the work of the member at `position`, which passes partials over the spans `given`.

        Args:
            memory: that of the total, private to this member, and that of all members' packets.
        """
        total, shared = memory
        spans = [span for published in plan.published for span in published]
        places = {
            span: _packet(layout, shared[index * layout.size : (index + 1) * layout.size])
            for index, span in enumerate(spans)
        }
        own = {
            span: places[span] if span in places else _packet(layout, allocate(layout.size)) for span in given
        }
        merges = []
        for span, merge in zip(plan.published[position], plan.merges(position, given), strict=True):
            if merge.steps:
                merges += _additions(merge, own, places[span])
        everything = _additions(Sum.of(plan.whole, spans), places, _packet(layout, total))
        packings = tuple(Packing.of(layout, stretch) for stretch in layout.stretches)
        return cls(packings, own, tuple(merges), tuple(everything))

    def publish(self, partials: Mapping[Span, Sequence[Array]], adder: Adder) -> None:
        """Pack this member's partials, as flat leaves, and merge them."""
        for span, leaves in partials.items():
            for packing, out in zip(self.packings, self.given[span], strict=True):
                packing.pack(leaves, out)
        _run(self.merges, adder)

    def sum(self, adder: Adder) -> None:
        """Write the total; call this once all members have published."""
        _run(self.total, adder)


def _packet(layout: Layout, memory: Bytes) -> Packet:
    return [memory[stretch.start : stretch.stop].view(stretch.dtype) for stretch in layout.stretches]


def _additions(plan: Sum, packets: Mapping[Span, Packet], out: Packet) -> list[_Addition]:
    operands = [packets[span] for span in plan.operands]
    return [_Addition(plan, arrays, total) for *arrays, total in zip(*operands, out, strict=True)]


def _run(additions: Sequence[_Addition], adder: Adder) -> None:
    for addition in additions:
        adder.add(*addition)
