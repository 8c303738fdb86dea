"""The order in which replicas are added, and the sums that each member publishes. Pure.

All sums follow one binary tree over the replicas `[0, R)`. A span of more than one replica is the sum of its
two halves, split at the largest power of two smaller than its length. So every left half is a perfect tree,
and the tree depends only on R. A worker may pre-sum only whole subtrees, so the bits of the total do not
depend on the number of workers.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, Self

from lockstep.collectives.contract import Span
from lockstep.errors import InternalError
from lockstep.topology import View


def halves(span: Span) -> tuple[Span, Span]:
    """Return the two subtrees of a span of at least two replicas."""
    length = span.stop - span.start
    middle = span.start + (1 << ((length - 1).bit_length() - 1))
    return Span(span.start, middle), Span(middle, span.stop)


def cover(owned: range | Span, replicas: int) -> tuple[Span, ...]:
    """Return the maximal subtrees of the tree over `replicas` that lie inside `owned`, in order."""
    inside = Span(owned.start, owned.stop)
    if inside.start >= inside.stop:
        return ()
    return _cover(inside, Span(0, replicas))


def _cover(inside: Span, node: Span) -> tuple[Span, ...]:
    if inside.start <= node.start and node.stop <= inside.stop:
        return (node,)
    if node.stop <= inside.start or inside.stop <= node.start:
        return ()
    left, right = halves(node)
    return _cover(inside, left) + _cover(inside, right)


class Step(NamedTuple):
    """One addition: `register[out] = register[left] + register[right]`."""

    left: int
    right: int
    out: int


@dataclass(frozen=True)
class Sum:
    """The additions that compute the sum over a span from its parts, in tree order.

    Attributes:
        operands: the parts, in the order of their replicas; part `i` is register `i`.
        steps: the additions; the last one yields the whole span. Empty if the only part is the span itself.
        scratch: the number of scratch registers, which follow those of the operands. The `out` of the last
            step is the register after them.
    """

    operands: tuple[Span, ...]
    steps: tuple[Step, ...]
    scratch: int

    @classmethod
    def of(cls, span: Span, parts: Collection[Span]) -> Self:
        """Plan the sum over `span`, a subtree, from `parts`.

        Raises:
            InternalError: the parts are not disjoint subtrees that cover the span.
        """
        return cls(*_additions(span, tuple(sorted(parts))))


@lru_cache(maxsize=256)
def _additions(span: Span, operands: tuple[Span, ...]) -> tuple[tuple[Span, ...], tuple[Step, ...], int]:
    registers = {part: index for index, part in enumerate(operands)}
    steps: list[Step] = []
    used: set[Span] = set()

    def evaluate(node: Span, depth: int) -> int:
        if node in registers:
            used.add(node)
            return registers[node]
        if node.stop - node.start == 1:
            raise InternalError(f"no partial for replica {node.start} among {_text(operands)}")
        first, second = halves(node)
        left = evaluate(first, depth)
        # The left result may occupy the scratch register `depth` until this addition.
        right = evaluate(second, depth + 1)
        steps.append(Step(left, right, len(operands) + depth))
        return len(operands) + depth

    evaluate(span, 0)
    if used != set(operands):
        spare = _text(sorted(set(operands) - used))
        raise InternalError(f"partials over {spare} are not subtrees of the tree over {_text([span])}")
    scratch = 1 + max((step.out for step in steps[:-1]), default=len(operands) - 1) - len(operands)
    if steps:
        steps[-1] = steps[-1]._replace(out=len(operands) + scratch)
    return operands, tuple(steps), scratch


def _text(spans: Collection[Span]) -> str:
    return ", ".join(f"[{span.start}, {span.stop})" for span in spans) or "nothing"


@dataclass(frozen=True)
class ReducePlan:
    """How the members of one view compute a total.

    Attributes:
        replicas: R, the number of replicas.
        workers: ids of the members' workers, in the order of their ranks.
        owned: the contiguous span of replicas of each member.
        published: the subtrees that each member sums locally and publishes: the cover of its span.
    """

    replicas: int
    workers: tuple[int, ...]
    owned: tuple[Span, ...]
    published: tuple[tuple[Span, ...], ...]

    @classmethod
    def of(cls, view: View) -> Self:
        """Plan the sums of `view`.

        Raises:
            InternalError: a worker owns no replica, or the owners are not in the order of the workers.
        """
        ranges = [view.replicas_of(worker) for worker in view.workers]
        ends = [0, *(owned.stop for owned in ranges)]
        if any(not owned or owned.start != end for owned, end in zip(ranges, ends, strict=False)):
            raise InternalError(
                f"owners {view.owners}: each of the workers {view.workers} must own one range, in order"
            )
        if ends[-1] != view.replicas:
            raise InternalError(f"owners {view.owners} are not all among the workers {view.workers}")
        owned = tuple(Span(each.start, each.stop) for each in ranges)
        published = tuple(cover(span, view.replicas) for span in owned)
        return cls(view.replicas, view.workers, owned, published)

    @property
    def members(self) -> int:
        """W, the number of members."""
        return len(self.workers)

    @property
    def whole(self) -> Span:
        """The root of the tree: all replicas."""
        return Span(0, self.replicas)

    def foreign(self, rank: int) -> tuple[Span, ...]:
        """Return the spans that the other members publish, in order."""
        others = [spans for other, spans in enumerate(self.published) if other != rank]
        return tuple(span for spans in others for span in spans)

    def total(self, rank: int, partials: Collection[Span]) -> Sum:
        """Plan the total from a member's own `partials` and the spans that the others publish.

        Raises:
            InternalError: `partials` do not cover the span that the member owns.
        """
        return Sum.of(self.whole, [*partials, *self.foreign(rank)])

    def local_sums(self, rank: int, partials: Collection[Span]) -> tuple[Sum, ...]:
        """Plan the sum of each span that a member publishes, from its `partials`.

        Raises:
            InternalError: `partials` do not cover the span that the member owns.
        """
        return _local_sums(self.owned[rank], self.published[rank], tuple(partials))


@lru_cache(maxsize=256)
def _local_sums(owned: Span, published: tuple[Span, ...], partials: tuple[Span, ...]) -> tuple[Sum, ...]:
    for span in partials:
        if not owned.start <= span.start < span.stop <= owned.stop:
            raise InternalError(f"the owner of {_text([owned])} passed a partial over {_text([span])}")
    return tuple(
        Sum.of(span, [part for part in partials if span.start <= part.start < span.stop])
        for span in published
    )


@dataclass(frozen=True)
class HostPlan:
    """How one host takes part in the total of a view.

    Attributes:
        host: the index of this host among the view's hosts.
        hosts: the worker ids of each host.
        published: for each host, the subtrees that it sums and sends: the cover of its replicas.
        seen: the plan as this host sees it: each of its own workers is a member, and so is each other host.
    """

    host: int
    hosts: tuple[tuple[int, ...], ...]
    published: tuple[tuple[Span, ...], ...]
    seen: ReducePlan

    @classmethod
    def of(cls, view: View, host: int) -> Self:
        """Plan the sums of `view` for the host with index `host`.

        Raises:
            InternalError: as `ReducePlan.of`.
        """
        plan = ReducePlan.of(view)
        owned: list[Span] = []
        end = 0
        for workers in view.hosts:
            first, end = end, end + len(workers)
            owned.append(Span(plan.owned[first].start, plan.owned[end - 1].stop))
        published = tuple(cover(span, view.replicas) for span in owned)
        start = sum(map(len, view.hosts[:host]))
        stop = start + len(view.hosts[host])
        seen = ReducePlan(
            view.replicas,
            (
                *(workers[0] for workers in view.hosts[:host]),
                *view.hosts[host],
                *(workers[0] for workers in view.hosts[host + 1 :]),
            ),
            (*owned[:host], *plan.owned[start:stop], *owned[host + 1 :]),
            (*published[:host], *plan.published[start:stop], *published[host + 1 :]),
        )
        return cls(host, view.hosts, published, seen)

    @property
    def workers_here(self) -> tuple[int, ...]:
        """Ids of the workers of this host."""
        return self.hosts[self.host]

    @cached_property
    def others(self) -> tuple[int, ...]:
        """The indices of the other hosts, beginning with the one after this host."""
        count = len(self.hosts)
        return tuple((self.host + step) % count for step in range(1, count))

    @cached_property
    def workers(self) -> tuple[int, ...]:
        """The ids of all workers of the view."""
        return tuple(worker for workers in self.hosts for worker in workers)

    @cached_property
    def lanes(self) -> int:
        """The number of lanes: the number of workers of the host with the fewest workers."""
        return min(map(len, self.hosts))

    def rank(self, local: int) -> int:
        """Return the rank in `seen` of this host's worker with index `local`."""
        return self.host + local

    def host_sums(self, parts: Collection[Span]) -> tuple[Sum, ...]:
        """Plan the sum of each span that this host publishes, from `parts` that cover its replicas.

        Raises:
            InternalError: they do not cover them.
        """
        return tuple(
            Sum.of(span, [part for part in parts if span.start <= part.start < span.stop])
            for span in self.published[self.host]
        )
