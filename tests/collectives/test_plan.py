"""Reduce plans: the tree, the slices, and the sums of each member, computed in one process."""

from collections.abc import Callable

import numpy as np
import pytest
from collective_members import plan_of
from collective_scripts import Reduce, partials_of
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_sums import DTYPES, FLOATS, leaves_of, reference, sha

from lockstep.collectives.adder import Adder, Bytes, flat
from lockstep.collectives.contract import Span
from lockstep.collectives.layout import ALIGNMENT, Layout, Piece, allocate
from lockstep.collectives.plan import ReducePlan, Step, Sum, cover, halves
from lockstep.collectives.shared import packed_reduce
from lockstep.collectives.shared.packed_reduce import PackedReduce
from lockstep.collectives.shared.slice_reduce import SlicePlacement, SliceReduce
from lockstep.errors import InternalError
from lockstep.topology import View

Simulate = Callable[[ReducePlan, Reduce], list[str]]

shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)


def subtrees(node: Span) -> list[Span]:
    """Return all subtrees by definition, larger ones first."""
    if node.stop - node.start == 1:
        return [node]
    left = 1
    while left * 2 < node.stop - node.start:
        left *= 2
    middle = node.start + left
    inside = subtrees(Span(node.start, middle)) + subtrees(Span(middle, node.stop))
    return [node, *inside]


@pytest.mark.parametrize("replicas", range(1, 20))
def test_cover_is_the_maximal_subtrees_in_order(replicas: int) -> None:
    nodes = subtrees(Span(0, replicas))
    for start in range(replicas):
        for stop in range(start + 1, replicas + 1):
            inside = [node for node in nodes if start <= node.start and node.stop <= stop]
            maximal = [
                node
                for node in inside
                if not any(other != node and other[0] <= node[0] and node[1] <= other[1] for other in inside)
            ]
            assert cover(range(start, stop), replicas) == cover(Span(start, stop), replicas)
            assert list(cover(range(start, stop), replicas)) == sorted(maximal)
    assert cover(range(0), replicas) == ()


def test_the_left_half_is_a_perfect_tree() -> None:
    assert halves(Span(3, 10)) == (Span(3, 7), Span(7, 10))
    assert halves(Span(0, 8)) == (Span(0, 4), Span(4, 8))
    assert halves(Span(0, 2)) == (Span(0, 1), Span(1, 2))


def test_a_sum_is_planned_in_tree_order() -> None:
    parts = [Span(r, r + 1) for r in range(5)]
    plan = Sum.of(Span(0, 5), parts)
    assert plan.operands == tuple(parts)
    # ((0 + 1) + (2 + 3)) + 4, with two scratch registers, 5 and 6, and the result in 7.
    assert plan.steps == (Step(0, 1, 5), Step(2, 3, 6), Step(5, 6, 5), Step(5, 4, 7))
    assert plan.scratch == 2
    assert Sum.of(Span(0, 4), [Span(0, 4)]) == Sum((Span(0, 4),), (), 0)


@pytest.mark.parametrize(
    "parts",
    [
        [Span(0, 1)],
        [Span(0, 1), Span(1, 4)],
        [Span(0, 2), Span(0, 1), Span(1, 2), Span(2, 4)],
        [Span(0, 2), Span(2, 4), Span(4, 5)],
        [Span(0, 0), Span(0, 4)],
    ],
)
def test_parts_that_do_not_cover_a_span_raise(parts: list[Span]) -> None:
    with pytest.raises(InternalError):
        Sum.of(Span(0, 4), parts)


def test_partials_of_other_members_raise() -> None:
    plan = plan_of(4, 2)
    for spans in ([Span(0, 4)], [Span(2, 4)], [Span(0, 1)], [], [Span(0, 2), Span(2, 3)]):
        with pytest.raises(InternalError):
            plan.local_sums(0, spans)


def test_the_plan_of_a_view() -> None:
    plan = plan_of(7, [4, 2, 9])
    assert plan.owned == (Span(0, 3), Span(3, 5), Span(5, 7))
    assert plan.published == (
        (Span(0, 2), Span(2, 3)),
        (Span(3, 4), Span(4, 5)),
        (Span(5, 6), Span(6, 7)),
    )
    assert plan.workers == (4, 2, 9)


@pytest.mark.parametrize(
    "view",
    [
        View(1, ((0, 1),), (0, 0)),
        View(1, ((0, 1),), (1, 0)),
        View(1, ((0, 1),), (0, 1, 0)),
        View(1, ((0,),), (0, 5)),
    ],
)
def test_views_with_invalid_owners_raise(view: View) -> None:
    with pytest.raises(InternalError):
        ReducePlan.of(view)


def nans(size: int) -> Bytes:
    memory = allocate(size)
    memory.fill(0xFF)
    return memory


def simulate_slices(plan: ReducePlan, case: Reduce) -> list[str]:
    """Execute the reduce of each member in turn, in memory full of NaNs; return the digests of the totals."""
    layout = Layout.of(leaves_of(case.seed, 0, case.shapes, case.dtypes))
    totals, partials = set(), [partials_of(plan, rank, case) for rank in range(plan.members)]
    owns = [{span: flat(leaves) for span, leaves in of_member.items()} for of_member in partials]
    # In one part, and in parts with a line of a slice or none.
    for room in (1 << 25, 1 << 9):
        placements = SlicePlacement.parts(layout, plan, room)
        total = layout.views(nans(layout.size))
        outside = nans(max(placement.size for placement in placements))
        adder = Adder()
        for placement in placements:
            reduces = [
                SliceReduce.of(layout, plan, placement, rank, tuple(of_member), total, outside)
                for rank, of_member in enumerate(partials)
            ]
            with np.errstate(all="ignore"):
                for reduce, own in zip(reduces, owns, strict=True):
                    reduce.publish(own, adder)
                for reduce, own in zip(reduces, owns, strict=True):
                    reduce.sum(own, adder)
        totals.add(sha(layout.shaped(total)))
    return sorted(totals)


def simulate_packed(plan: ReducePlan, case: Reduce) -> list[str]:
    """Do the same with packed partials."""
    layout = Layout.of(leaves_of(case.seed, 0, case.shapes, case.dtypes))
    totals, shared = [nans(layout.size) for _ in plan.workers], nans(packed_reduce.packed_size(layout, plan))
    adder, reduces = Adder(), []
    with np.errstate(all="ignore"):
        for rank, total in enumerate(totals):
            partials = partials_of(plan, rank, case)
            reduces.append(PackedReduce.of(layout, plan, rank, tuple(partials), (total, shared)))
            reduces[-1].publish({span: flat(leaves) for span, leaves in partials.items()}, adder)
        for reduce in reduces:
            reduce.sum(adder)
    return sorted({sha(layout.shaped(layout.views(total))) for total in totals})


both_ways = pytest.mark.parametrize("simulate", [simulate_slices, simulate_packed])


@both_ways
@pytest.mark.parametrize("replicas", range(1, 17))
def test_any_number_of_workers_gives_the_bits_of_the_reference(simulate: Simulate, replicas: int) -> None:
    case = Reduce(replicas, ((2, 67), (1,), (33,)), ("float32", "float64", "float16"))
    want = sha(
        reference([leaves_of(case.seed, replica, case.shapes, case.dtypes) for replica in range(replicas)])
    )
    for workers in range(1, replicas + 1):
        for style in ("replicas", "merged", "mixed"):
            assert simulate(plan_of(replicas, workers), case._replace(given=style)) == [want], (
                workers,
                style,
            )


@both_ways
@settings(max_examples=80, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_leaves_give_the_bits_of_the_reference(simulate: Simulate, data: st.DataObject) -> None:
    replicas = data.draw(st.integers(1, 16))
    workers = data.draw(st.integers(1, replicas))
    leaves = data.draw(st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=4))
    style = data.draw(st.sampled_from(["replicas", "merged", "mixed"]))
    case = Reduce(
        data.draw(st.integers(0, 99)), tuple(a for a, _ in leaves), tuple(b for _, b in leaves), style
    )
    want = sha(
        reference([leaves_of(case.seed, replica, case.shapes, case.dtypes) for replica in range(replicas)])
    )
    assert simulate(plan_of(replicas, workers), case) == [want]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [1, 15, 16, 17, 100_003])
def test_the_sum_of_two_nans_does_not_depend_on_the_position(dtype: str, size: int) -> None:
    one, other = (leaves_of(1, replica, ((1,),), (dtype,))[0] for replica in (0, 1))
    one, other = np.full(size, np.nan, one.dtype), -np.full(size, np.nan, other.dtype)
    case_plan, out = Sum.of(Span(0, 2), [Span(0, 1), Span(1, 2)]), np.empty_like(one)
    Adder().add(case_plan, [one, other], out)
    assert len({out[index].tobytes() for index in range(size)}) == 1
    Adder().add(case_plan, [one, other], other)
    assert other.tobytes() == out.tobytes()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(leaves=st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=6), members=st.integers(1, 9))
def test_slices_contain_every_element_once_and_are_even(
    leaves: list[tuple[tuple[int, ...], str]], members: int
) -> None:
    layout = Layout.of(leaves_of(0, 0, [a for a, _ in leaves], [b for _, b in leaves]))
    bounds = layout.bounds(members)
    assert [start for start, _ in bounds] == [0, *(stop for _, stop in bounds[:-1])]
    assert bounds[-1][1] == layout.size
    sizes = [stop - start for start, stop in bounds]
    assert max(sizes) - min(sizes) in (0, ALIGNMENT)
    count = [
        np.zeros(size // dtype.itemsize) for size, dtype in zip(layout.sizes, layout.dtypes, strict=True)
    ]
    for start, stop in bounds:
        for piece in layout.pieces(start, stop):
            assert piece.start < piece.stop
            assert piece.start * layout.dtypes[piece.leaf].itemsize % ALIGNMENT == 0
            count[piece.leaf][piece.start : piece.stop] += 1
    assert all((each == 1).all() for each in count)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(leaves=st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=6), data=st.data())
def test_pieces_are_the_elements_that_begin_in_a_range(
    leaves: list[tuple[tuple[int, ...], str]], data: st.DataObject
) -> None:
    layout = Layout.of(leaves_of(0, 0, [a for a, _ in leaves], [b for _, b in leaves]))
    lines = st.integers(0, layout.size // ALIGNMENT)
    start, stop = (line * ALIGNMENT for line in sorted((data.draw(lines), data.draw(lines))))
    expected = []
    for leaf, (offset, size, dtype) in enumerate(
        zip(layout.offsets, layout.sizes, layout.dtypes, strict=True)
    ):
        begins = range(offset, offset + size, dtype.itemsize)
        inside = [i for i, begin in enumerate(begins) if start <= begin < stop]
        if inside:
            expected.append(Piece(leaf, inside[0], inside[-1] + 1))
    assert layout.pieces(start, stop) == tuple(expected)
