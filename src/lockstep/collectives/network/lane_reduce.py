"""The reduce of a large total over hosts: the sums that each worker computes, sends and receives.

This module only computes in memory that callers pass. The bytes of a total are divided into lanes, one for
each worker of the host with the fewest workers. Each lane is divided into one slice for each host. In its
lane, a worker

* sends every other host the sums over this host's replicas, for the slice of that host,
* sums the slice of its own host, in chunks, as the sums of the other hosts arrive,
* sends each chunk to all other hosts, and receives their slices in their place in the total.

A chunk is sent from the arrays of the backend if one of the worker's partials is the sum that is needed, and
from shared memory if another worker has published it. The other workers of the host publish their sums first;
one of these sums has its place in the total itself, which overwrites it.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self, TypeAlias

import numpy as np

from lockstep.collectives.adder import Adder, Array
from lockstep.collectives.contract import Bytes, Span
from lockstep.collectives.layout import ALIGNMENT, Layout, Piece, allocate
from lockstep.collectives.plan import HostPlan, Sum
from lockstep.collectives.shared.packed_reduce import SMALL
from lockstep.collectives.shared.slice_reduce import PieceSum, run_sums
from lockstep.topology import View

CHUNK = 1 << 19
"""Bytes that a host receives before it sums: so few that they stay in the cache."""
SMALLEST_CHUNK = 1 << 16
"""Bytes of the total that it sums at least."""
DIRECT = 1 << 14
"""Bytes of a leaf that are worth a system call of their own; smaller pieces are copied together."""

Leaves: TypeAlias = Sequence[Array]
Range: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class LanePlacement:
    """The lanes of a layout, and the places of the sums that the workers of a host publish.

    Attributes:
        slices: for each lane and each host, the bytes of the total that the host sums.
        inside: for each lane, the span whose place is in the total; None if no other worker publishes one.
        outside: for each lane and each other published span, the offset of its place.
        size: bytes of all places in `outside`.
    """

    slices: tuple[tuple[Range, ...], ...]
    inside: tuple[Span | None, ...]
    outside: Mapping[tuple[int, Span], int]
    size: int

    @classmethod
    def of(cls, layout: Layout, hosts: HostPlan) -> Self:
        """Divide `layout` among the lanes and hosts of `hosts`."""
        count = len(hosts.hosts)
        bounds = layout.bounds(hosts.lanes * count)
        slices = tuple(bounds[lane * count : (lane + 1) * count] for lane in range(hosts.lanes))
        inside: list[Span | None] = []
        outside: dict[tuple[int, Span], int] = {}
        end = 0
        for lane, ranges in enumerate(slices):
            first, *others = published_beside(hosts, lane) or (None,)
            inside.append(first)
            for span in others:
                outside[lane, span] = end
                end += ranges[-1][1] - ranges[0][0]
        return cls(slices, tuple(inside), outside, end)

    def whole(self, lane: int) -> Range:
        """Return the bytes of a lane."""
        return self.slices[lane][0][0], self.slices[lane][-1][1]


def summer_of(layout: Layout, view: View, byte: int) -> int | None:
    """Return the worker that sums a byte of a total, or None if each worker sums all."""
    if layout.size <= SMALL or byte < 0:
        return None
    placement = LanePlacement.of(layout, HostPlan.of(view, 0))
    return next(
        view.hosts[host][lane]
        for lane, ranges in enumerate(placement.slices)
        for host, (start, stop) in enumerate(ranges)
        if start <= byte < stop
    )


def published_beside(hosts: HostPlan, local: int) -> tuple[Span, ...]:
    """Return the spans that the other workers of the host publish."""
    return tuple(
        span
        for other in range(len(hosts.workers_here))
        if other != local
        for span in hosts.seen.published[hosts.rank(other)]
    )


class _Copied(NamedTuple):
    """Bytes of several leaves of one of the worker's own partials, copied to `out`."""

    pieces: tuple[tuple[Piece, Bytes], ...]
    out: memoryview


class _OwnSend(NamedTuple):
    """A range of the worker's own partial over `span`, in pieces that count bytes instead of elements."""

    span: Span
    runs: tuple[Piece | _Copied, ...]


class _SumSend(NamedTuple):
    """Sums that are computed before `out` is sent; none if another worker has written `out`."""

    sums: tuple[PieceSum, ...]
    out: memoryview


class _OwnChunk(NamedTuple):
    """A chunk of the slice that this host sums.

    Attributes:
        received: for each other host, the memory of its sums.
        sums: the additions.
        out: the chunk in the total.
    """

    received: Mapping[int, memoryview]
    sums: tuple[PieceSum, ...]
    out: memoryview

    def sum(self, partials: Mapping[Span, Leaves], adder: Adder) -> None:
        """Write the chunk of the total; call this after receiving the sums of the other hosts."""
        run_sums(self.sums, partials, adder)


@dataclass(frozen=True)
class LaneReduce:
    """One worker's part in a reduce, for its partials' spans and for certain memory.

    Attributes:
        published: sums of its own partials that other workers of its host need.
        sends: the ranges and sums that this worker sends each other host.
        lengths: the number of bytes that it sends each other host.
        chunks: the chunks of its slice.
        others: for each other host, its slice of this lane in the total.
    """

    published: tuple[PieceSum, ...]
    sends: Mapping[int, tuple[_OwnSend | _SumSend, ...]]
    lengths: Mapping[int, int]
    chunks: tuple[_OwnChunk, ...]
    others: Mapping[int, memoryview]

    @classmethod
    def of(
        cls,
        layout: Layout,
        hosts: HostPlan,
        placement: LanePlacement,
        local: int,
        local_spans: Collection[Span],
        memory: tuple[Bytes, Bytes],
    ) -> Self:
        """Plan the part of one worker of this host, whose partials cover `local_spans`.

        Args:
            layout: the layout of every partial.
            hosts: the plan of the view.
            placement: the placement of the lanes.
            local: the index of the worker.
            local_spans: the spans of its partials.
            memory: the memory of the total, and of the places outside it.
        """
        planner = _Planner(layout, hosts, placement, local, local_spans, *memory)
        published = planner.published()
        if local >= hosts.lanes:
            return cls(published, {}, {}, (), {})
        slices = placement.slices[local]
        return cls(
            published,
            {host: planner.sends(host, *slices[host]) for host in hosts.others},
            {
                host: len(hosts.published[hosts.host]) * (slices[host][1] - slices[host][0])
                for host in hosts.others
            },
            planner.chunks(*slices[hosts.host]),
            {host: memory[0][slices[host][0] : slices[host][1]].data for host in hosts.others},
        )

    def publish(self, partials: Mapping[Span, Leaves], adder: Adder) -> None:
        """Write the sums of this worker's `partials`, flat leaves, that other workers of its host need."""
        run_sums(self.published, partials, adder)

    def buffers(self, host: int, partials: Mapping[Span, Leaves], adder: Adder) -> Iterator[memoryview]:
        """Yield the buffers for another host; each is valid until the next one is requested."""
        addresses = {span: [leaf.view(np.uint8) for leaf in leaves] for span, leaves in partials.items()}
        for each in self.sends[host]:
            if isinstance(each, _SumSend):
                run_sums(each.sums, partials, adder)
                yield each.out
                continue
            for run in each.runs:
                if isinstance(run, Piece):
                    yield addresses[each.span][run.leaf][run.start : run.stop].data
                else:
                    for (leaf, start, stop), out in run.pieces:
                        out[:] = addresses[each.span][leaf][start:stop]
                    yield run.out


@dataclass(frozen=True)
class _Planner:
    """Plans the parts of a `LaneReduce`."""

    layout: Layout
    hosts: HostPlan
    placement: LanePlacement
    local: int
    local_spans: Collection[Span]
    total: Bytes
    outside: Bytes

    def published(self) -> tuple[PieceSum, ...]:
        rank = self.hosts.rank(self.local)
        seen, sums = self.hosts.seen, list[PieceSum]()
        for lane in range(self.hosts.lanes):
            if lane != self.local:
                start, stop = self.placement.whole(lane)
                for local_sum, span in zip(
                    seen.local_sums(rank, self.local_spans), seen.published[rank], strict=True
                ):
                    place = self._place(lane, span, start, stop)
                    sums += self._sums(local_sum, start, stop, {}, place)
        return tuple(sums)

    def sends(self, host: int, start: int, stop: int) -> tuple[_OwnSend | _SumSend, ...]:
        """Plan the data for the host that sums the bytes `start` to `stop`."""
        size = self._chunk_size(host)
        beside = published_beside(self.hosts, self.local)
        sums = self.hosts.host_sums([*self.local_spans, *beside])
        staging = allocate(min(size, stop - start))
        staging.fill(0)
        sends: list[_OwnSend | _SumSend] = []
        for first, last in _chunks(start, stop, size):
            out = staging[: last - first]
            for each in sums:
                if each.steps:
                    places = {span: self._place(self.local, span, first, last) for span in beside}
                    sends.append(_SumSend(tuple(self._sums(each, first, last, places, out)), out.data))
                elif each.operands[0] in beside:
                    sends.append(_SumSend((), self._place(self.local, each.operands[0], first, last).data))
                else:
                    sends.append(_OwnSend(each.operands[0], self._runs(first, last, out)))
        return tuple(sends)

    def chunks(self, start: int, stop: int) -> tuple[_OwnChunk, ...]:
        """Plan the sums of the bytes `start` to `stop`, the slice of this host."""
        hosts = self.hosts
        everything = hosts.seen.total(hosts.rank(self.local), self.local_spans)
        beside = published_beside(hosts, self.local)
        length = min(self._chunk_size(hosts.host), stop - start)
        memory = {host: allocate(len(hosts.published[host]) * length) for host in hosts.others}
        chunks = []
        for first, last in _chunks(start, stop, length):
            size = last - first
            places = {span: self._place(self.local, span, first, last) for span in beside}
            for host in hosts.others:
                for index, span in enumerate(hosts.published[host]):
                    places[span] = memory[host][index * size : (index + 1) * size]
            out = self.total[first:last]
            received = {host: memory[host][: len(hosts.published[host]) * size].data for host in hosts.others}
            chunks.append(
                _OwnChunk(received, tuple(self._sums(everything, first, last, places, out)), out.data)
            )
        return tuple(chunks)

    def _chunk_size(self, host: int) -> int:
        """Return the number of bytes of the total that a host sums at a time."""
        received = sum(len(spans) for other, spans in enumerate(self.hosts.published) if other != host)
        return max(CHUNK // max(received, 1), SMALLEST_CHUNK) // ALIGNMENT * ALIGNMENT

    def _place(self, lane: int, span: Span, start: int, stop: int) -> Bytes:
        """Return the memory of the bytes `start` to `stop` of a sum that another worker has published."""
        if self.placement.inside[lane] == span:
            return self.total[start:stop]
        offset = self.placement.outside[lane, span] - self.placement.whole(lane)[0]
        return self.outside[offset + start : offset + stop]

    def _sums(
        self, each: Sum, start: int, stop: int, places: Mapping[Span, Bytes], out: Bytes
    ) -> Iterator[PieceSum]:
        for piece in self.layout.pieces(start, stop):
            operands = tuple(
                self._typed(places[span], start, piece) if span in places else None for span in each.operands
            )
            yield PieceSum(each, piece, operands, self._typed(out, start, piece))

    def _typed(self, memory: Bytes, start: int, piece: Piece) -> Array:
        """Return a piece in `memory`, which begins with the byte `start` of the layout."""
        dtype = self.layout.dtypes[piece.leaf]
        first = self.layout.offsets[piece.leaf] + piece.start * dtype.itemsize - start
        return memory[first : first + (piece.stop - piece.start) * dtype.itemsize].view(dtype)

    def _runs(self, start: int, stop: int, staging: Bytes) -> tuple[Piece | _Copied, ...]:
        """Divide the bytes `start` to `stop` into ranges of large leaves, and others, which are copied."""
        runs: list[Piece | _Copied] = []
        copied: list[tuple[Piece, Bytes]] = []
        begin = start

        def end_copy(end: int) -> None:
            if begin < end:
                runs.append(_Copied(tuple(copied), staging[begin - start : end - start].data))
                copied.clear()

        for leaf, first, last in self.layout.pieces(start, stop):
            size = self.layout.dtypes[leaf].itemsize
            offset, first, last = self.layout.offsets[leaf], first * size, last * size
            lines = (last - first) // ALIGNMENT * ALIGNMENT
            if lines >= DIRECT:
                end_copy(offset + first)
                runs.append(Piece(leaf, first, first + lines))
                first += lines
                begin = offset + first
            if first < last:
                place = staging[offset + first - start : offset + last - start]
                copied.append((Piece(leaf, first, last), place))
        end_copy(stop)
        return tuple(runs)


def _chunks(start: int, stop: int, size: int) -> Iterator[Range]:
    for first in range(start, stop, size):
        yield first, min(first + size, stop)
