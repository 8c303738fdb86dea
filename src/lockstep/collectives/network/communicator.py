"""The communicator of members on several hosts.

Members use shared memory inside a host and connections between hosts. Each host publishes the sums over the
subtrees that cover its replicas, so the bits do not depend on the hosts. With L workers on the smallest host
there are L lanes. Worker j of each host is connected to worker j of every other host, with one connection for
each direction. It exchanges lane j of a large total (`lane_reduce.py`). For a small total, the first worker
of each host sends the packed sums of its host to all hosts in one message, and every member sums everything.
This costs one latency of the network.

All sockets block. The calling thread sends as much as the kernel takes at once, and a thread for each
connection sends the rest. So members that send to each other cannot block each other. A receiver of many
bytes sleeps until the kernel has 128 KB for it (`SO_RCVLOWAT`), because waking it for each packet would take
longer than copying the packet.

The first message of a host in a call describes the call, as all of its members make it. If the calls differ,
or a host lacks memory, the hosts exchange the calls of all members, and all members raise the same error
(`disagreement.py`).

The hard part is a connection that breaks when one host has completed a call and another has not. Calls are
counted from the beginning of the job, and each worker keeps the number and the result of the last one
(`LastCall`), which outlives the view. Hosts begin a view with hellos that have their numbers (`entering.py`).
These differ by one at most: the end of call k + 1 takes a part of every host, which a host sends after its
end of call k. So a host that is one call behind receives the result from a host that has it, when its members
repeat the call in the new view. A newcomer begins after the call.

So the last total has to stay in memory until all hosts are certain to have it. The workers of one host that
publish sums for the next total write to another region of memory (`memory.py`), and everything else that
overwrites a total needs parts of all hosts. An all-to-all does not have a result that another host could
send, so its hosts end it with a barrier: a host that has begun the barrier has all parts for its members.
Values that depend on the moment of a call, such as gathered blobs, belong to the result. Code that makes
several calls in one `Job.exchange` therefore keeps the results of complete calls, and does not repeat those
calls.

Every view has its own connections, so bytes of an earlier view cannot arrive in it.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import msgspec
import numpy as np

from lockstep.collectives.adder import Adder, common_layout, flat
from lockstep.collectives.call import (
    CollectiveCall,
    abort_reason,
    check_length,
    check_parts,
)
from lockstep.collectives.contract import Bytes, Leaves, Span, WaitObserver, WaitPolicy
from lockstep.collectives.layout import Layout, allocate, joined
from lockstep.collectives.network.disagreement import common_error, exchange_details
from lockstep.collectives.network.entering import Entered, meet_hosts
from lockstep.collectives.network.frames import (
    LENGTH_LIMIT,
    Frame,
    FrameError,
    Header,
    Hello,
    MemberDetails,
    Standing,
    decode_blobs,
    decode_details,
    describe_call,
    encode_blobs,
    encode_details,
)
from lockstep.collectives.network.lane import Lane, Link
from lockstep.collectives.network.lane_reduce import LanePlacement, LaneReduce
from lockstep.collectives.network.last_call import KeptResult, LastCall, raise_again
from lockstep.collectives.network.memory import Extents, NetworkBuffers, Region, Sizes
from lockstep.collectives.network.part_table import PartTable
from lockstep.collectives.network.streams import Buffer
from lockstep.collectives.plan import HostPlan
from lockstep.collectives.shared.barrier import Barrier, CallScope
from lockstep.collectives.shared.buffers import cached
from lockstep.collectives.shared.control_segment import HOST_LIMIT, ControlSegment
from lockstep.collectives.shared.packed_reduce import (
    SMALL,
    PackedReduce,
    StretchSum,
    packed,
    packed_size,
    run_stretches,
    stretch_sums,
)
from lockstep.errors import InternalError, PeerLostError, SharedMemoryError
from lockstep.system.clock import Clock, SystemClock
from lockstep.system.memory import available_memory

Outcome = TypeVar("Outcome")


@dataclass(frozen=True)
class ViewOfJob:
    """A view, as the connections of its hosts prove it to each other.

    Attributes:
        job: 16 bytes.
        term: the term of the coordinator that began the view.
        number: the number of the view.
        incarnations: the incarnation of each host.
        names: the name of each host, for messages.
    """

    job: bytes
    term: int
    number: int
    incarnations: tuple[int, ...]
    names: tuple[str, ...]


_END = struct.Struct("<?I")


class _Entering(msgspec.Struct, frozen=True):
    """The message of a worker to the others of its host when it enters a view."""

    number: int
    has_result: bool
    extents: bytes


@dataclass(frozen=True)
class _Packed:
    """One worker's part in the reduce of a small total.

    Attributes:
        reduce: the worker's part.
        total: read-only.
        memory: the memory of the total.
        sends: the buffers that the first worker sends the other hosts.
        sums: the sums that it writes to these buffers.
        places: the memory in which it receives the sums of each other host.
    """

    reduce: PackedReduce
    total: Leaves
    memory: Bytes
    sends: memoryview
    sums: tuple[StretchSum, ...]
    places: Mapping[int, memoryview]


class NetworkCommunicator:
    """One member's communicator in a view of several hosts.

    The members of a host meet in a `ControlSegment`; the first `HostPlan.lanes` members of each host have
    connections to their counterparts on the other hosts. A call ends on a host for all its members or for
    none, and only while the segment permits it. Its number and result are in `LastCall`, which outlives the
    view: if one host has completed a call and another has not, the other receives the result in the next
    view, when it makes the call again.
    """

    def __init__(
        self,
        segment: ControlSegment,
        buffers: NetworkBuffers,
        last: LastCall,
        local: int,
        hosts: HostPlan,
        view: ViewOfJob,
        links: Mapping[int, Link],
        policy: WaitPolicy,
        observe: WaitObserver | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Enter a view; nothing is sent or awaited before the first call.

        Args:
            segment: the memory in which the members of this host meet in this view.
            buffers: the buffers of this worker, for all views.
            last: the last call of this worker, in any view.
            local: the index of this worker among those of its host.
            hosts: how this host takes part.
            view: the view, as hosts prove it to each other.
            links: connections to the other hosts, by their indices; empty if the worker has no lane.
            policy: the limits of waits.
            observe: receives reports on waits.
            clock: measures waits.
        """
        if segment.members != len(hosts.workers_here):
            raise InternalError(
                f"a control segment for {segment.members} members on a host with {len(hosts.workers_here)}"
            )
        if len(hosts.hosts) > HOST_LIMIT:
            raise InternalError(f"a view of {len(hosts.hosts)} hosts; at most {HOST_LIMIT} are supported")
        self._segment = segment
        self._buffers = buffers
        self._last = last
        self._local = local
        self._hosts = hosts
        self._view = view
        self._is_only_member = len(hosts.workers_here) == 1
        self._rank = hosts.rank(local)
        self._lane: Lane | None = None
        clock = clock or SystemClock()
        self._barrier = Barrier(
            segment=segment,
            rank=local,
            workers=hosts.workers_here,
            policy=policy,
            observe=observe,
            clock=clock,
            hosts=hosts.hosts,
        )
        if local < hosts.lanes and hosts.others:
            self._lane = Lane(
                index=local,
                links=links,
                hosts=hosts,
                names=view.names,
                segment=segment,
                policy=policy,
                observe=observe,
                clock=clock,
            )
        self._first = self._lane if local == 0 else None
        self._entered = False
        self._has_room = False
        self._number = 0
        self._notice = 0
        self._lengths: dict[int, int] = {}
        self._adder = Adder()
        self._lane_adders = {host: Adder() for host in hosts.others}
        self._placements: dict[Layout, LanePlacement] = {}
        self._packed: dict[tuple[Layout, tuple[Span, ...], int], _Packed] = {}
        self._sliced: dict[tuple[Layout, tuple[Span, ...], int], tuple[LaneReduce, Leaves, Bytes]] = {}

    # The methods of `Communicator`.

    @property
    def notice(self) -> int:
        """The notice of the view; see `Communicator`."""
        return self._notice

    @property
    def waited(self) -> float:
        """Seconds of waiting for others; see `Communicator`."""
        return self._barrier.waited + (self._lane.waited if self._lane else 0.0)

    def reduce(self, partials: Mapping[Span, Leaves], *, check: bytes = b"", what: str = "reduce") -> Leaves:
        """Sum the leaves of all replicas; see `Communicator`."""
        check_length(check)
        layout = common_layout(self._hosts.seen, self._rank, partials)
        call = CollectiveCall("reduce", what, check, layout=layout.digest)
        with self._during(call), np.errstate(all="ignore"):
            kept = self._enter(call, layout.size)
            if kept is not None:
                assert kept.total is not None
                return layout.shaped(layout.views(kept.total))
            if layout.size <= SMALL:
                return self._reduce_packed(call, layout, partials)
            return self._reduce_lanes(call, layout, partials)

    def gather(self, blob: bytes, *, what: str = "gather") -> list[bytes]:
        """Give every member the blobs of all members; see `Communicator`."""
        call = CollectiveCall("gather", what)
        with self._during(call):
            return list(self._gather(call, blob))

    def barrier(self, *, what: str = "barrier") -> None:
        """Return once every member has called it; see `Communicator`."""
        call = CollectiveCall("barrier", what)
        with self._during(call):
            self._gather(call, b"")

    def all_to_all(self, parts: Sequence[Sequence[Bytes]], *, what: str = "all_to_all") -> list[Bytes]:
        """Give each member the part that each member has for it; see `Communicator`."""
        check_parts(parts, len(self._hosts.workers))
        call = CollectiveCall("all_to_all", what)
        with self._during(call):
            kept = self._enter(call)
            return list(kept.parts if kept is not None else self._all_to_all(call, parts))

    def abort(self, reason: str) -> None:
        """End this view for the members of this host; see `Communicator`.

        The other hosts learn of it when a member of this host notices.
        """
        self._barrier.abort(reason)

    def close(self) -> None:
        """Make no more calls; members that wait for this one raise `PeerLostError`. See `Communicator`."""
        self._barrier.close()
        if self._lane is not None:
            self._lane.close()

    # Sums.

    def _reduce_packed(self, call: CollectiveCall, layout: Layout, partials: Mapping[Span, Leaves]) -> Leaves:
        room = 0 if self._is_only_member else 2 * packed_size(layout, self._hosts.seen)
        standing, unfit = self._make_room(call, (0, 0, 0, room))
        part = None
        if standing is Standing.READY:
            spans = tuple(partials)
            half = self._number % 2
            part = cached(self._packed, (layout, spans, half), lambda: self._plan_packed(layout, spans, half))
            part.reduce.publish({span: flat(leaves) for span, leaves in partials.items()}, self._adder)
            standing = self._meet(call)
        agreed = standing is Standing.READY
        if self._first is not None:
            if part is not None and agreed:
                run_stretches(part.sums, self._adder)
                agreed = self._announce(self._first, call, standing, part.sends)
            else:
                agreed = self._announce(self._first, call, standing)
            if agreed and part is not None:
                self._receive_places(self._first, call, part.places)
        self._end(call, agreed, layout.describe, unfit)
        assert part is not None
        part.reduce.sum(self._adder)
        self._complete(KeptResult(call, part.memory))
        return part.total

    def _plan_packed(self, layout: Layout, spans: tuple[Span, ...], half: int) -> _Packed:
        hosts, seen, size = self._hosts, self._hosts.seen, layout.size
        if self._is_only_member:
            memory = allocate(packed_size(layout, seen))
        else:
            # The place where a half begins is the same for all layouts, because others may still read the
            # other half.
            region = self._buffers.shared(Region.PACKED)
            memory = region[half * (region.size // 2) :]
        total = allocate(size)
        places: dict[Span, Bytes] = {}
        for published in seen.published:
            for span in published:
                places[span] = memory[len(places) * size : (len(places) + 1) * size]
        receives: dict[int, memoryview] = {}
        for host in hosts.others:
            first = list(places).index(hosts.published[host][0])
            receives[host] = memory[first * size : (first + len(hosts.published[host])) * size].data
        reduce = PackedReduce.of(layout, seen, self._rank, spans, (total, memory))
        sums: list[StretchSum] = []
        if self._is_only_member:
            first = list(places).index(hosts.published[hosts.host][0])
            sends = memory[first * size : (first + len(hosts.published[hosts.host])) * size]
        else:
            sends = allocate(len(hosts.published[hosts.host]) * size)
            published_here = [
                span for local in range(len(hosts.workers_here)) for span in seen.published[hosts.rank(local)]
            ]
            operands = {span: packed(layout, places[span]) for span in published_here}
            for index, each in enumerate(hosts.host_sums(published_here)):
                sums += stretch_sums(each, operands, packed(layout, sends[index * size : (index + 1) * size]))
        shaped = layout.shaped(layout.views(total))
        return _Packed(reduce, shaped, total, sends.data, tuple(sums), receives)

    def _reduce_lanes(self, call: CollectiveCall, layout: Layout, partials: Mapping[Span, Leaves]) -> Leaves:
        placement = cached(self._placements, layout, lambda: LanePlacement.of(layout, self._hosts))
        half, sizes = 0, (0, 0, 0, 0)
        if not self._is_only_member:
            # Workers that publish write before all hosts have begun this call, which shows that they have the
            # last total.
            half = self._number % 2
            sizes = ((layout.size, 0)[half], (0, layout.size)[half], placement.size, 0)
        standing, unfit = self._make_room(call, sizes)
        spans, flat_partials = tuple(partials), {}
        planned = None
        if standing is Standing.READY:
            planned = cached(
                self._sliced, (layout, spans, half), lambda: self._plan_lanes(layout, placement, spans, half)
            )
            flat_partials = {span: flat(leaves) for span, leaves in partials.items()}
            planned[0].publish(flat_partials, self._adder)
            standing = self._meet(call)
        agreed = standing is Standing.READY
        if self._lane is not None and planned is not None and agreed:
            agreed = self._exchange_lane(self._lane, call, planned[0], flat_partials)
        elif self._first is not None:
            agreed = self._announce(self._first, call, standing)
        elif planned is not None and not self._hosts.others:
            for chunk in planned[0].chunks:
                chunk.sum(flat_partials, self._adder)
        self._end(call, agreed, layout.describe, unfit)
        assert planned is not None
        _, total, memory = planned
        self._complete(KeptResult(call, memory))
        return total

    def _plan_lanes(
        self, layout: Layout, placement: LanePlacement, spans: tuple[Span, ...], half: int
    ) -> tuple[LaneReduce, Leaves, Bytes]:
        if self._is_only_member:
            memory = self._buffers.private(Region(half), layout.size)
            outside = memory[:0]
        else:
            memory = self._buffers.shared(Region(half))[: layout.size]
            outside = self._buffers.shared(Region.OUTSIDE)
        reduce = LaneReduce.of(layout, self._hosts, placement, self._local, spans, (memory, outside))
        return reduce, layout.shaped(layout.views(memory)), memory

    def _exchange_lane(
        self, lane: Lane, call: CollectiveCall, reduce: LaneReduce, partials: Mapping[Span, Leaves]
    ) -> bool:
        """Exchange this lane's bytes with the other hosts; return whether all hosts make the same call."""
        self._notice = self._barrier.notice
        header = self._header(call, Standing.READY)
        for host, length in reduce.lengths.items():
            lane.send_to(host, header._replace(length=length))
            lane.send_buffers(host, reduce.buffers(host, partials, self._lane_adders[host]))
        headers = lane.headers(call, header)
        if not self._agree(lane, call, headers, header):
            return False
        remaining = list(self._hosts.others)
        with lane.wait(call, remaining) as wait:
            for host, header in headers.items():
                expected = sum(len(chunk.received[host]) for chunk in reduce.chunks)
                lane.check_length(host, call, header.length, expected)
            for chunk in reduce.chunks:
                for host, view in chunk.received.items():
                    lane.receive(host, view, wait)
                chunk.sum(partials, self._adder)
                lane.send_chunk(chunk.out)
            for host, view in reduce.others.items():
                lane.receive(host, view, wait)
                remaining.remove(host)
        return True

    # Blobs.

    def _gather(self, call: CollectiveCall, blob: bytes) -> Sequence[bytes]:
        kept = self._enter(call)
        if kept is not None:
            return kept.blobs
        calls, blobs_here = self._barrier.arrive_and_collect(call, blob)
        standing = Standing.READY if calls is None else Standing.DIFFERING
        agreed = calls is None
        of_hosts: dict[int, list[bytes]] = {}
        if self._first is not None:
            payload = encode_blobs(blobs_here) if agreed and any(blobs_here) else []
            agreed = self._announce(self._first, call, standing, *payload)
            if agreed:
                of_hosts = self._receive_blobs(self._first, call)
        extra = b""
        if (
            self._first is not None
            and agreed
            and not self._is_only_member
            and any(map(any, of_hosts.values()))
        ):
            extra = msgspec.msgpack.encode([of_hosts[host] for host in sorted(of_hosts)])
        extra = self._end(call, agreed, list, "", extra)
        if self._first is None or not of_hosts:
            counts = [len(self._hosts.hosts[host]) for host in sorted(self._hosts.others)]
            of_others = (
                msgspec.msgpack.decode(extra, type=list[list[bytes]])
                if extra
                else [[b""] * each for each in counts]
            )
            of_hosts = dict(zip(sorted(self._hosts.others), of_others, strict=True))
        of_hosts[self._hosts.host] = blobs_here
        blobs = tuple(each for host in sorted(of_hosts) for each in of_hosts[host])
        self._complete(KeptResult(call, blobs=blobs))
        return blobs

    def _receive_blobs(self, lane: Lane, call: CollectiveCall) -> dict[int, list[bytes]]:
        remaining = list(self._hosts.others)
        of_hosts = {}
        with lane.wait(call, remaining) as wait:
            for host in self._hosts.others:
                count, length = len(self._hosts.hosts[host]), self._lengths[host]
                if length:
                    try:
                        of_hosts[host] = decode_blobs(lane.receive_blob(host, length, wait), count)
                    except FrameError as error:
                        raise lane.malformed(host, call, error) from error
                else:
                    of_hosts[host] = [b""] * count
                remaining.remove(host)
        return of_hosts

    # Parts.

    def _all_to_all(self, call: CollectiveCall, parts: Sequence[Sequence[Bytes]]) -> Sequence[Bytes]:
        """Exchange the sizes of all parts, then the parts, and then the fact that all hosts have them.

        So if the call is complete on any host, the members of all hosts have their parts. Later, no host
        could give them to another one.
        """
        lengths = np.array([sum(array.nbytes for array in part) for part in parts], np.int64)
        calls, rows = self._barrier.arrive_and_collect(call, lengths.tobytes())
        standing = Standing.READY if calls is None else Standing.DIFFERING
        agreed, data = calls is None, b""
        if self._first is not None:
            agreed = self._announce(self._first, call, standing, *(rows if agreed else []))
            data = self._receive_sizes(self._first, call, rows) if agreed else b""
        elif agreed:
            data = b"".join(rows)
        agreed, data = self._share(call, agreed, data)
        if not agreed:
            self._refuse(call, [], "")
        table = PartTable.of(np.frombuffer(data, np.int64).reshape(lengths.size, lengths.size), self._hosts)
        standing, unfit = self._make_room_for_parts(call, table)
        memory = self._buffers.shared(Region.OUTSIDE)
        if standing is Standing.READY and not self._is_only_member:
            for (start, stop), part in zip(table.sent(self._local), parts, strict=True):
                if part:
                    np.concatenate(part, out=memory[start:stop])
            self._barrier.arrive_and_wait(call)
        received: list[Bytes] = []
        if self._is_only_member and standing is Standing.READY:
            received = [allocate(size) for size in table.sizes[:, table.first].tolist()]
            received[table.first] = joined(parts[table.first])
        agreed = standing is Standing.READY
        if self._first is not None:
            agreed = self._exchange_parts(
                lane=self._first,
                call=call,
                standing=standing,
                table=table,
                memory=memory,
                parts=parts,
                received=received,
            )
        agreed, _ = self._share(call, agreed)
        if not agreed:
            self._refuse(call, [], unfit)
        if not self._is_only_member:
            received = [joined([memory[start:stop]]) for start, stop in table.received(self._local)]
        self._last.received = self._number + 1, tuple(received)
        if not self._is_only_member:
            self._barrier.arrive_and_wait(call)
        if self._first is not None:
            header = self._header(call, Standing.READY, 2)
            self._first.send(header)
            self._first.headers(call, header)
        self._end(call, True, list, "")
        self._complete(KeptResult(call, parts=tuple(received)))
        return received

    def _receive_sizes(self, lane: Lane, call: CollectiveCall, rows: Sequence[bytes]) -> bytes:
        remaining = list(self._hosts.others)
        of_hosts = {self._hosts.host: b"".join(rows)}
        with lane.wait(call, remaining) as wait:
            for host in self._hosts.others:
                expected = len(self._hosts.hosts[host]) * len(rows[0])
                lane.check_length(host, call, self._lengths[host], expected)
                of_hosts[host] = lane.receive_blob(host, expected, wait)
                sizes = np.frombuffer(of_hosts[host], np.int64)
                if sizes.min() < 0 or sizes.max() > LENGTH_LIMIT:
                    raise lane.malformed(host, call, FrameError("sizes that no part has"))
                remaining.remove(host)
        return b"".join(of_hosts[host] for host in sorted(of_hosts))

    def _make_room_for_parts(self, call: CollectiveCall, table: PartTable) -> tuple[Standing, str]:
        if not self._is_only_member:
            return self._make_room(call, (0, 0, table.room, 0))
        needed, available = int(table.sizes[:, table.first].sum()), available_memory()
        if needed > available:
            return Standing.UNFIT, f"{call} needs {needed} bytes of memory, but {available} are available"
        return Standing.READY, ""

    def _exchange_parts(
        self,
        lane: Lane,
        call: CollectiveCall,
        standing: Standing,
        table: PartTable,
        memory: Bytes,
        parts: Sequence[Sequence[Bytes]],
        received: Sequence[Bytes],
    ) -> bool:
        """Send and receive the parts of the members of different hosts; return whether all hosts can."""
        header = self._header(call, standing, 1)
        for host in self._hosts.others:
            buffers: list[memoryview] = []
            if standing is Standing.READY and self._is_only_member:
                buffers = [array.data for at in table.members(host) for array in parts[at] if array.size]
            elif standing is Standing.READY:
                ranges = [table.sent_to(local, host) for local in range(len(self._hosts.workers_here))]
                buffers = [memory[start:stop].data for start, stop in ranges if start < stop]
            length = sum(map(len, buffers))
            lane.send_to(host, header._replace(length=length))
            lane.send_buffers(host, buffers)
        headers = lane.headers(call, header)
        if not self._agree(lane, call, headers, header):
            return False
        remaining = list(self._hosts.others)
        with lane.wait(call, remaining) as wait:
            for host in self._hosts.others:
                if self._is_only_member:
                    views = [received[at] for at in table.members(host)]
                else:
                    start, stop = table.received_from(host)
                    views = [memory[start:stop]]
                lane.check_length(host, call, self._lengths[host], sum(view.size for view in views))
                for view in views:
                    lane.receive(host, view.data, wait)
                remaining.remove(host)
        return True

    # The frame of a call. All calls have the same phases:
    #
    # 1. Only in the first call of a view, hosts compare the numbers of their last calls (`_enter`). If
    #    another host has already completed this call, its result ends the call here.
    # 2. The workers of each host meet and compare the call (`_meet`, or with blobs). This gives the standing
    #    of the host: ready, differing, or unfit because it lacks memory.
    # 3. Each worker with a lane that takes part sends a header with this standing, and at once its data,
    #    before it knows the standing of the other hosts: asking first would cost another latency. If a header
    #    says anything but ready, or names another call, the data of all hosts is received and dropped
    #    (`_agree`). Without that, the next header would be read from the middle of the data.
    # 4. `_end`: everything must have been sent, because this process may end right after the call. The
    #    permission comes before the last barrier of the host, so all its workers end the call or none does.
    #    In this barrier, workers without a lane also learn whether the hosts agreed, and the notice of the
    #    view.
    #
    # If the hosts do not agree, they exchange the details of all members over the same connections
    # (`_refuse`). The call then counts as complete, with its error as the result. Otherwise, a host that has
    # raised the error and one that has not, because a connection broke in between, would count differently in
    # the next view.
    #
    # A connection may break between 3 and 4, when one host has everything and another has not. No order of
    # messages excludes that. It is harmless only because a result stays in memory until no host can lack it
    # (see the beginning of this file). So every path that overwrites the memory of a total must have heard
    # from all hosts since then.

    def _during(self, call: CollectiveCall) -> CallScope:
        try:
            self._barrier.during(call)
        except PeerLostError as error:
            self._leave(call, error)
            raise
        return CallScope(self._leave, call)

    def _enter(self, call: CollectiveCall, size: int = 0) -> KeptResult | None:
        """Enter the view in its first call; return the result if other hosts have completed this call.

        Raises:
            DisagreementError, SharedMemoryError: the call has ended in this error on other hosts.
        """
        if self._entered:
            return None
        last = self._last
        entering = _Entering(last.number, last.result is not None, self._buffers.extents.encode())
        entries = [entering]
        if not self._is_only_member:
            blobs = self._barrier.arrive_and_compare(
                CollectiveCall("enter", call.what), msgspec.msgpack.encode(entering), within=call
            )
            entries = [msgspec.msgpack.decode(blob, type=_Entering) for blob in blobs]
        numbers = {entry.number for entry in entries if entry.number >= 0}
        if len(numbers) > 1:
            raise InternalError(f"the workers of a host have completed different calls: {sorted(numbers)}")
        for entry in entries:
            if entry.number >= 0:
                self._buffers.extents = Extents.decode(entry.extents)
                break
        entered = Entered(max(numbers, default=0), None)
        if self._first is not None:
            has_result = entries[0].has_result
            entered = self._meet_hosts(self._first, call, max(numbers, default=-1), has_result)
        # The call ends here if another host has its result.
        self._barrier.await_permission(call)
        if not self._is_only_member:
            blob = msgspec.msgpack.encode(entered) if self._local == 0 else b""
            blob = self._barrier.arrive_and_compare(CollectiveCall("entered", call.what), blob, within=call)[
                0
            ]
            entered = msgspec.msgpack.decode(blob, type=Entered)
        self._entered, self._number = True, entered.number
        if last.number == self._number:
            return None
        is_new, parts = last.number < 0, last.parts(self._number)
        if is_new or entered.result is None:
            last.complete(self._number, None)
            return None
        kept = KeptResult.of(entered.result, call, size, parts)
        last.complete(self._number, kept)
        self._notice = 0
        if kept.error is not None:
            raise raise_again(kept.error)
        return kept

    def _meet_hosts(self, lane: Lane, call: CollectiveCall, done: int, has_result: bool) -> Entered:
        view, hosts = self._view, self._hosts
        hello = Hello(view.job, view.term, view.number, view.incarnations[hosts.host], done, has_result)
        return meet_hosts(
            lane=lane,
            call=call,
            hosts=hosts,
            hello=hello,
            incarnations=view.incarnations,
            names=view.names,
            last=self._last,
        )

    def _header(self, call: CollectiveCall, standing: Standing, step: int = 0, length: int = 0) -> Header:
        return Header(
            frame=Frame.CALL,
            standing=standing,
            step=step,
            notice=self._notice,
            number=self._number + 1,
            length=length,
            call=describe_call(call),
        )

    def _meet(self, call: CollectiveCall) -> Standing:
        """Wait for the workers of this host."""
        calls, _ = self._barrier.arrive_and_collect(call)
        return Standing.READY if calls is None else Standing.DIFFERING

    def _announce(self, lane: Lane, call: CollectiveCall, standing: Standing, *payload: Buffer) -> bool:
        """Send the host's call with `payload`; return whether all hosts can complete the same call.

        If so, `_lengths` has the bytes that follow from each host. If not, they have been dropped.
        """
        self._notice = self._barrier.notice
        header = self._header(call, standing, length=sum(map(len, payload)))
        lane.send(header, *payload)
        return self._agree(lane, call, lane.headers(call, header), header)

    def _agree(
        self,
        lane: Lane,
        call: CollectiveCall,
        headers: Mapping[int, Header],
        sent: Header,
    ) -> bool:
        """Return whether all hosts can complete the same call; see `_announce`."""
        if self._hosts.host > 0:
            self._notice = headers[0].notice
        self._lengths = {host: header.length for host, header in headers.items()}
        if sent.standing is Standing.READY and all(
            header is sent or (header.standing is Standing.READY and header.call == sent.call)
            for header in headers.values()
        ):
            return True
        with lane.wait(call, self._hosts.others) as wait:
            for host, header in headers.items():
                lane.drain(host, header.length, wait)
        return False

    def _receive_places(self, lane: Lane, call: CollectiveCall, places: Mapping[int, memoryview]) -> None:
        remaining = list(places)
        with lane.wait(call, remaining) as wait:
            for host, view in places.items():
                lane.check_length(host, call, self._lengths[host], len(view))
                lane.receive(host, view, wait)
                remaining.remove(host)

    def _end(
        self,
        call: CollectiveCall,
        agreed: bool,
        describe: Callable[[], list[str]],
        unfit: str,
        extra: bytes = b"",
    ) -> bytes:
        """End the call on this host; return the `extra` of the first worker.

        Raises:
            DisagreementError, SharedMemoryError: a member of a host makes another call, or cannot make it.
        """
        if self._lane is None and not self._hosts.others:
            self._notice = self._barrier.notice
        if self._lane is not None:
            self._lane.flush(call)
        self._barrier.await_permission(call)
        agreed, extra = self._share(call, agreed, extra)
        if not agreed:
            self._refuse(call, describe(), unfit)
        self._number += 1
        return extra

    def _share(self, call: CollectiveCall, agreed: bool, extra: bytes = b"") -> tuple[bool, bytes]:
        """Wait for the workers of this host; return whether all agree, and the `extra` of the first one."""
        if self._is_only_member:
            return agreed, extra
        end = _END.pack(agreed, self._notice) + extra if self._local < self._hosts.lanes else b""
        blobs = self._barrier.arrive_and_compare(CollectiveCall("end", call.what), end, within=call)
        ends = [_END.unpack_from(blob) for blob in blobs if blob]
        self._notice = ends[0][1]
        return all(each for each, _ in ends), blobs[0][_END.size :]

    def _complete(self, result: KeptResult) -> None:
        self._last.complete(self._number, result)

    def _refuse(self, call: CollectiveCall, leaves: list[str], unfit: str) -> NoReturn:
        """Raise, on all members of all hosts, the reason for which they do not complete their calls."""
        lane, number = self._lane, self._number + 1
        if lane is not None and lane is not self._first and lane.announced < number:
            self._announce(lane, call, Standing.DIFFERING)
        details = encode_details([MemberDetails.of(call, leaves, unfit)])
        blobs = self._barrier.arrive_and_compare(CollectiveCall("details", call.what), details, within=call)
        local = [decode_details(blob)[0] for blob in blobs]
        everybody: list[list[MemberDetails]] = [local]
        if self._first is not None:
            everybody = exchange_details(self._first, call, self._number + 1, self._hosts, local)
        self._barrier.await_permission(call)
        if not self._is_only_member:
            sent = b"" if self._first is None else msgspec.msgpack.encode(everybody)
            sent = self._barrier.arrive_and_compare(
                CollectiveCall("all details", call.what), sent, within=call
            )[0]
            if sent:
                everybody = msgspec.msgpack.decode(sent, type=list[list[MemberDetails]])
        members = [each for host in everybody for each in host]
        names = [name for name, host in zip(self._view.names, everybody, strict=True) for _ in host]
        self._number = number
        error = common_error(members, self._hosts.workers, names)
        self._complete(KeptResult(call, error=error))
        raise raise_again(error)

    # Shared memory of the host.

    def _make_room(self, call: CollectiveCall, sizes: Sizes) -> tuple[Standing, str]:
        """Make room for `sizes` in the memory that the workers of this host share.

        Returns:
            The standing of this host, and why this worker's memory is not sufficient.
        """
        if not any(sizes) or (self._has_room and self._buffers.extents.fits(sizes)):
            return Standing.READY, ""
        standing = self._meet(call)
        if standing is not Standing.READY:
            return standing, ""
        extents = self._buffers.extents.enlarged(sizes)
        pool = self._buffers.pool
        grown, _ = self._on_host(call, lambda: pool.grow(extents.end) if self._local == 0 else None)
        if grown:
            return Standing.UNFIT, grown
        unmapped, memory = self._on_host(call, lambda: np.frombuffer(pool.map(extents.end), np.uint8))
        if unmapped:
            return Standing.UNFIT, unmapped
        assert memory is not None
        self._packed.clear()
        self._sliced.clear()
        self._buffers.use(extents, memory)
        self._has_room = True
        return Standing.READY, ""

    def _on_host(self, call: CollectiveCall, act: Callable[[], Outcome]) -> tuple[str, Outcome | None]:
        """Call `act` on each worker of this host; return why it failed on any of them, and its result."""
        failed, result = "", None
        try:
            result = act()
        except SharedMemoryError as error:
            failed = str(error)
        texts = self._barrier.arrive_and_compare(
            CollectiveCall("memory", call.what), failed.encode(), within=call
        )
        return next((text.decode() for text in texts if text), ""), result

    def _leave(self, call: CollectiveCall, error: BaseException) -> None:
        """End the view for all members, because this one leaves `call` before it is complete."""
        self._segment.abort(abort_reason(self._hosts.workers_here[self._local], call, error))
        if self._lane is not None:
            self._lane.farewell(self._segment.reason() or "")
