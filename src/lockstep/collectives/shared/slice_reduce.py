"""Large totals: where members publish their parts, and which sums each member computes.

Pure arithmetic over given memory.

The bytes of a total are divided into one slice per member. A member sums its own slice: its own replicas
from its own arrays, the other replicas from what their members publish. Each published span has a place for
every slice that its member does not own:

* one published span of each slice has its place in the slice of the total itself. The total then
  overwrites it in the last addition, which saves a fifth of the traffic;
* the others have separate places.

Every call reuses the total and the places; it begins when no member reads the last total any more.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from lockstep.collectives.contract import Span
from lockstep.collectives.layout import Layout, Piece
from lockstep.collectives.plan import ReducePlan, Sum
from lockstep.collectives.summing import Adder, Array, Bytes


@dataclass(frozen=True)
class SliceReduce:
    """The division of a layout's bytes among the members of a plan.

    Attributes:
        bounds: for each member, the bytes of the total that it sums.
        inside: for each member, the foreign span whose place is its slice of the total; None for the
            only member of a plan.
        outside: for each member's slice and each other foreign span, the offset of its place.
        size: bytes of all places in `outside`.
    """

    bounds: tuple[tuple[int, int], ...]
    inside: tuple[Span | None, ...]
    outside: Mapping[tuple[int, Span], int]
    size: int

    @classmethod
    def of(cls, layout: Layout, plan: ReducePlan) -> Self:
        """Divide `layout` among the members of `plan`."""
        bounds = layout.bounds(plan.members)
        inside: list[Span | None] = []
        outside: dict[tuple[int, Span], int] = {}
        end = 0
        for position, (start, stop) in enumerate(bounds):
            first, *others = plan.foreign(position) or (None,)
            inside.append(first)
            for span in others:
                outside[position, span] = end
                end += stop - start
        return cls(bounds, tuple(inside), outside, end)


@dataclass(frozen=True)
class _SliceTask:
    """A sum over one piece of a leaf, written to `out`.

    For each operand of the sum, `operands` has the array to read, or None for one of the member's own
    partials.
    """

    sum: Sum
    piece: Piece
    operands: tuple[Array | None, ...]
    out: Array


@dataclass(frozen=True)
class SliceWork:
    """What one member does in a reduction, for partials over certain spans, in certain memory.

    Attributes:
        publish: sums of own partials, to be written before the barrier.
        total: sums of all partials of the own slice, to be written after it.
    """

    publish: tuple[_SliceTask, ...]
    total: tuple[_SliceTask, ...]

    @classmethod
    def of(
        cls,
        layout: Layout,
        plan: ReducePlan,
        places: SliceReduce,
        position: int,
        given: Collection[Span],
        memory: tuple[Bytes, Bytes],
    ) -> Self:
        """Plan the tasks of the member at `position`, which passes partials over the spans `given`.

        Args:
            memory: that of the total, and that of the places outside of it.
        """
        total, outside = memory
        flat = layout.views(total)

        def place(owner: int, span: Span, pieces: Sequence[Piece]) -> list[Array]:
            if places.inside[owner] == span:
                return [flat[piece.leaf][piece.start : piece.stop] for piece in pieces]
            start = places.outside[owner, span] - places.bounds[owner][0]
            arrays = []
            for piece in pieces:
                dtype = layout.dtypes[piece.leaf]
                first = start + layout.offsets[piece.leaf] + piece.start * dtype.itemsize
                size = (piece.stop - piece.start) * dtype.itemsize
                arrays.append(outside[first : first + size].view(dtype))
            return arrays

        publish = []
        for other in range(plan.members):
            if other != position:
                pieces = layout.pieces(*places.bounds[other])
                for span, merge in zip(plan.published[position], plan.merges(position, given), strict=True):
                    own = (None,) * len(merge.operands)
                    for piece, out in zip(pieces, place(other, span, pieces), strict=True):
                        publish.append(_SliceTask(merge, piece, own, out))
        pieces = layout.pieces(*places.bounds[position])
        everything = plan.total(position, given)
        foreign = {span: place(position, span, pieces) for span in plan.foreign(position)}
        totals = []
        for index, piece in enumerate(pieces):
            operands = tuple(
                foreign[span][index] if span in foreign else None for span in everything.operands
            )
            totals.append(_SliceTask(everything, piece, operands, flat[piece.leaf][piece.start : piece.stop]))
        return cls(tuple(publish), tuple(totals))


def run(tasks: Sequence[_SliceTask], own: Mapping[Span, Sequence[Array]], adder: Adder) -> None:
    """Execute `tasks` with a member's `own` partials, as flat leaves.

    Callers silence NumPy's floating-point warnings (`np.errstate`).
    """
    for task in tasks:
        leaf, start, stop = task.piece
        operands = [
            own[span][leaf][start:stop] if array is None else array
            for span, array in zip(task.sum.operands, task.operands, strict=True)
        ]
        adder.add(task.sum, operands, task.out)
