"""The reduce of a small total: each member publishes its packed partials, and every member sums everything.

A barrier takes longer than adding a few numbers, and so does calling NumPy. So there is only one barrier, and
partials are packed: adjacent leaves of one dtype form one array.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from lockstep.collectives.adder import Adder, Array
from lockstep.collectives.contract import Bytes, Span
from lockstep.collectives.layout import Layout, Stretch, aligned, allocate
from lockstep.collectives.plan import ReducePlan, Sum

SMALL = 1 << 17
"""Bytes of the largest total that is small."""

PackedPartial = Sequence[Array]
"""A partial with one array for each stretch of the layout."""


def packed_size(layout: Layout, plan: ReducePlan) -> int:
    """Return the bytes of the packed partials that all members of `plan` publish."""
    return layout.size * sum(map(len, plan.published))


class StretchSum(NamedTuple):
    """A sum over one stretch, written to `out`."""

    sum: Sum
    operands: Sequence[Array]
    out: Array


@dataclass(frozen=True)
class StretchPacker:
    """Packs the leaves of one stretch.

    Attributes:
        stretch: the leaves.
        fills: for each leaf, the padding of its last cache line.
    """

    stretch: Stretch
    fills: tuple[Array, ...]

    @classmethod
    def of(cls, layout: Layout, stretch: Stretch) -> Self:
        """Return the packer of a `stretch` of `layout`."""
        sizes = layout.sizes[stretch.first : stretch.last]
        fills = (np.zeros(aligned(size) - size, np.uint8).view(stretch.dtype) for size in sizes)
        return cls(stretch, tuple(fills))

    def pack(self, leaves: Sequence[Array], out: Array) -> None:
        """Pack the leaves of the stretch into `out`; `leaves` are the flat leaves of the whole layout."""
        parts = list[Array]()
        for leaf, fill in zip(leaves[self.stretch.first : self.stretch.last], self.fills, strict=True):
            parts.append(leaf)
            if fill.size:
                parts.append(fill)
        np.concatenate(parts, out=out)


@dataclass(frozen=True)
class PackedReduce:
    """One member's part in a reduce, for its partials' spans and for certain memory.

    Attributes:
        packers: a packer for each stretch.
        packed_partials: the memory in which each of its partials is packed: published, or private and then
            merged.
        local_sums: sums of its own partials, written before the barrier.
        total: sums of the partials of all members, written after the barrier.
    """

    packers: tuple[StretchPacker, ...]
    packed_partials: Mapping[Span, PackedPartial]
    local_sums: tuple[StretchSum, ...]
    total: tuple[StretchSum, ...]

    @classmethod
    def of(
        cls,
        layout: Layout,
        plan: ReducePlan,
        rank: int,
        local_spans: Collection[Span],
        memory: tuple[Bytes, Bytes],
    ) -> Self:
        """Plan the part of the member at `rank`, whose partials cover `local_spans`.

        Args:
            layout: the layout of every partial.
            plan: the plan of the view.
            rank: the rank of this member.
            local_spans: the spans of its partials.
            memory: this member's private memory for the total, and the shared memory for packed partials.
        """
        total, shared = memory
        spans = list(itertools.chain.from_iterable(plan.published))
        published = {
            span: packed(layout, shared[index * layout.size : (index + 1) * layout.size])
            for index, span in enumerate(spans)
        }
        packed_partials = {
            span: published[span] if span in published else packed(layout, allocate(layout.size))
            for span in local_spans
        }
        local_sums = []
        for span, local_sum in zip(plan.published[rank], plan.local_sums(rank, local_spans), strict=True):
            if local_sum.steps:
                local_sums += stretch_sums(local_sum, packed_partials, published[span])
        everything = stretch_sums(Sum.of(plan.whole, spans), published, packed(layout, total))
        packers = tuple(StretchPacker.of(layout, stretch) for stretch in layout.stretches)
        return cls(packers, packed_partials, tuple(local_sums), tuple(everything))

    def publish(self, partials: Mapping[Span, Sequence[Array]], adder: Adder) -> None:
        """Pack this member's partials, flat leaves, and add up partials that it publishes as one sum."""
        for span, leaves in partials.items():
            for packer, out in zip(self.packers, self.packed_partials[span], strict=True):
                packer.pack(leaves, out)
        run_stretches(self.local_sums, adder)

    def sum(self, adder: Adder) -> None:
        """Write the total; call this once all members have published."""
        run_stretches(self.total, adder)


def packed(layout: Layout, memory: Bytes) -> PackedPartial:
    """Return a packed partial in `memory`."""
    return [memory[stretch.start : stretch.stop].view(stretch.dtype) for stretch in layout.stretches]


def stretch_sums(plan: Sum, partials: Mapping[Span, PackedPartial], out: PackedPartial) -> list[StretchSum]:
    """Return the sums of packed `partials`, written to `out`."""
    operands = [partials[span] for span in plan.operands]
    return [StretchSum(plan, arrays, total) for *arrays, total in zip(*operands, out, strict=True)]


def run_stretches(sums: Sequence[StretchSum], adder: Adder) -> None:
    """Compute `sums`."""
    for each in sums:
        adder.add(*each)
