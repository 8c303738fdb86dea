"""The reduce of a large total: where members publish sums, and which sums each member computes.

This module only computes in memory that callers pass.

The bytes of a total are divided into one slice for each member. A member sums its own slice: its own replicas
from its own arrays, the other replicas from the sums that their members publish. Each published span has a
place for every slice that another member sums:

* For each slice, one published span has its place in the slice of the total itself. The last addition
  overwrites it with the total, which saves a fifth of the memory traffic.
* The other published spans have places outside the total. With W members that publish one span each, they
  would take W - 2 times the memory of the total. So a reduce that would need too much memory has several
  parts, each with a part of every slice. They use the same places, one after the other.

Every call reuses the total and the places; it begins when no member reads the previous total any more.

A large reduce has these barriers: enter (all members have called, and no member reads the last total any
more), and in each part publish and sum. A member reads its own partials where the backend stored them, and
the backend reads the total in place. An all-to-all uses the same memory: each member writes a part for each
other member, which reads it after a barrier.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from lockstep.collectives.adder import Adder, Array
from lockstep.collectives.contract import Bytes, Span
from lockstep.collectives.layout import ALIGNMENT, Layout, Piece
from lockstep.collectives.plan import ReducePlan, Sum
from lockstep.topology import split_evenly


@dataclass(frozen=True)
class SlicePlacement:
    """One part of each slice of a layout, and the places of the sums of it that members publish.

    Attributes:
        bounds: for each member, the bytes of the total that it sums: the part of its slice.
        inside: for each member, the span of another member whose place is in that slice of the total; None
            for the only member of a plan.
        outside: for each member's slice and each other published span, the offset of its place.
        size: bytes of all places in `outside`.
    """

    bounds: tuple[tuple[int, int], ...]
    inside: tuple[Span | None, ...]
    outside: Mapping[tuple[int, Span], int]
    size: int

    @classmethod
    def parts(cls, layout: Layout, plan: ReducePlan, room: int) -> tuple[Self, ...]:
        """Divide `layout` among the members of `plan`, and each slice into parts that need no more room."""
        bounds = layout.bounds(plan.members)
        whole = cls._of(bounds, plan)
        number = max(1, -(-whole.size // room))
        parts_of_slices = [_parted(start, stop, number) for start, stop in bounds]
        return tuple(cls._of(parts, plan) for parts in zip(*parts_of_slices, strict=True))

    @classmethod
    def _of(cls, bounds: tuple[tuple[int, int], ...], plan: ReducePlan) -> Self:
        inside: list[Span | None] = []
        outside: dict[tuple[int, Span], int] = {}
        end = 0
        for rank, (start, stop) in enumerate(bounds):
            first, *others = plan.foreign(rank) or (None,)
            inside.append(first)
            for span in others:
                outside[rank, span] = end
                end += stop - start
        return cls(bounds, tuple(inside), outside, end)


def _parted(start: int, stop: int, number: int) -> list[tuple[int, int]]:
    """Divide a range of bytes evenly, at multiples of `ALIGNMENT`."""
    ranges = []
    for lines in split_evenly((stop - start) // ALIGNMENT, number):
        ranges.append((start, start + lines * ALIGNMENT))
        start = ranges[-1][1]
    return ranges


@dataclass(frozen=True)
class PieceSum:
    """A sum over one piece of a leaf, written to `out`.

    For each operand of the sum, `operands` has the array to read, or None for one of the member's own
    partials.
    """

    sum: Sum
    piece: Piece
    operands: tuple[Array | None, ...]
    out: Array


@dataclass(frozen=True)
class SliceReduce:
    """The work of one member in a part of a reduce, for its partials' spans and for certain memory.

    Attributes:
        local_sums: sums of its own partials that other members need, written before the barrier.
        total: sums of all partials in the part of its own slice, written after the barrier.
    """

    local_sums: tuple[PieceSum, ...]
    total: tuple[PieceSum, ...]

    @classmethod
    def of(
        cls,
        layout: Layout,
        plan: ReducePlan,
        placement: SlicePlacement,
        rank: int,
        local_spans: Collection[Span],
        total: Sequence[Array],
        outside: Bytes,
    ) -> Self:
        """Plan the work of the member at `rank`, whose partials cover `local_spans`.

        Args:
            layout: the layout of every partial.
            plan: the plan of the view.
            placement: where the parts of the slices are.
            rank: the rank of this member.
            local_spans: the spans of its partials.
            total: the flat leaves of the total.
            outside: the memory of the places outside of the total.
        """

        def place(owner: int, span: Span, pieces: Sequence[Piece]) -> list[Array]:
            if placement.inside[owner] == span:
                return [total[piece.leaf][piece.start : piece.stop] for piece in pieces]
            start = placement.outside[owner, span] - placement.bounds[owner][0]
            arrays = []
            for piece in pieces:
                dtype = layout.dtypes[piece.leaf]
                first = start + layout.offsets[piece.leaf] + piece.start * dtype.itemsize
                size = (piece.stop - piece.start) * dtype.itemsize
                arrays.append(outside[first : first + size].view(dtype))
            return arrays

        local_sums = []
        published = list(zip(plan.published[rank], plan.local_sums(rank, local_spans), strict=True))
        for other in range(plan.members):
            if other != rank:
                pieces = layout.pieces(*placement.bounds[other])
                for span, local_sum in published:
                    none = (None,) * len(local_sum.operands)
                    for piece, out in zip(pieces, place(other, span, pieces), strict=True):
                        local_sums.append(PieceSum(local_sum, piece, none, out))
        pieces = layout.pieces(*placement.bounds[rank])
        everything = plan.total(rank, local_spans)
        foreign = {span: place(rank, span, pieces) for span in plan.foreign(rank)}
        totals = []
        for index, piece in enumerate(pieces):
            operands = tuple(
                foreign[span][index] if span in foreign else None for span in everything.operands
            )
            totals.append(PieceSum(everything, piece, operands, total[piece.leaf][piece.start : piece.stop]))
        return cls(tuple(local_sums), tuple(totals))

    def publish(self, partials: Mapping[Span, Sequence[Array]], adder: Adder) -> None:
        """Write the sums of this member's `partials`, flat leaves, that other members need.

        The caller silences NumPy's floating-point warnings (`np.errstate`).
        """
        run_sums(self.local_sums, partials, adder)

    def sum(self, partials: Mapping[Span, Sequence[Array]], adder: Adder) -> None:
        """Write the part of this member's slice of the total; call this once all members have published.

        The caller silences NumPy's floating-point warnings (`np.errstate`).
        """
        run_sums(self.total, partials, adder)


def run_sums(sums: Sequence[PieceSum], partials: Mapping[Span, Sequence[Array]], adder: Adder) -> None:
    """Compute `sums` from given memory and a member's own `partials`, flat leaves."""
    for each in sums:
        leaf, start, stop = each.piece
        operands = [
            partials[span][leaf][start:stop] if array is None else array
            for span, array in zip(each.sum.operands, each.operands, strict=True)
        ]
        adder.add(each.sum, operands, each.out)
