"""The communicator of members that are processes of one host."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from lockstep.collectives.adder import Adder, common_layout, flat
from lockstep.collectives.call import CollectiveCall, check_length, check_parts
from lockstep.collectives.contract import Bytes, Leaves, Span, WaitObserver, WaitPolicy
from lockstep.collectives.layout import Layout, joined
from lockstep.collectives.plan import ReducePlan
from lockstep.collectives.shared.barrier import Barrier
from lockstep.collectives.shared.buffers import Buffers, Sizes, cached
from lockstep.collectives.shared.control_segment import ControlSegment
from lockstep.collectives.shared.packed_reduce import SMALL, packed_size
from lockstep.collectives.shared.slice_reduce import SlicePlacement
from lockstep.errors import InternalError, SharedMemoryError
from lockstep.system.clock import Clock, SystemClock

ROOM = 1 << 25
"""The most bytes for what members publish outside of a large total."""

Result = TypeVar("Result")


class SharedCommunicator:
    """One member's communicator: barriers in a `ControlSegment`, partials and totals in `Buffers`.

    A reduce of a small total has one barrier: publish. A reduce of a large total has three: enter, after
    which no member reads the previous total; publish; and sum, after which all slices are summed. If it has
    several parts, each has the last two. `close` leaves the control segment open, so that `abort` still
    works.
    """

    def __init__(
        self,
        segment: ControlSegment,
        buffers: Buffers,
        rank: int,
        plan: ReducePlan,
        policy: WaitPolicy,
        observe: WaitObserver | None = None,
        clock: Clock | None = None,
    ) -> None:
        if segment.members != plan.members:
            raise InternalError(
                f"a control segment for {segment.members} members, but a plan for {plan.members}"
            )
        self._rank = rank
        self._plan = plan
        self._barrier = Barrier(segment, rank, plan.workers, policy, observe, clock or SystemClock())
        self._buffers = buffers
        self._has_room = False
        self._adder = Adder()
        self._placements: dict[Layout, tuple[SlicePlacement, ...]] = {}

    def reduce(self, partials: Mapping[Span, Leaves], *, check: bytes = b"", what: str = "reduce") -> Leaves:
        """Sum the leaves of all replicas; see `Communicator`."""
        check_length(check)
        layout = common_layout(self._plan, self._rank, partials)
        call = CollectiveCall("reduce", what, check, layout=layout.digest)
        with self._barrier.during(call), np.errstate(all="ignore"):
            if layout.size <= SMALL:
                return self._reduce_packed(call, layout, partials)
            return self._reduce_slices(call, layout, partials)

    def _reduce_packed(self, call: CollectiveCall, layout: Layout, partials: Mapping[Span, Leaves]) -> Leaves:
        needed = Sizes(0, 2 * packed_size(layout, self._plan))
        if not self._fits(needed):
            self._barrier.arrive_and_compare(call, describe=layout.describe)
            self._grow(call, needed)
        reduce, total = self._buffers.packed_reduce(layout, self._plan, self._rank, tuple(partials))
        reduce.publish({span: flat(leaves) for span, leaves in partials.items()}, self._adder)
        self._barrier.arrive_and_compare(call, describe=layout.describe)
        self._buffers.switch_halves()
        reduce.sum(self._adder)
        return total

    def _reduce_slices(self, call: CollectiveCall, layout: Layout, partials: Mapping[Span, Leaves]) -> Leaves:
        placements = cached(self._placements, layout, lambda: SlicePlacement.parts(layout, self._plan, ROOM))
        needed = Sizes(layout.size, max(placement.size for placement in placements))
        self._barrier.arrive_and_compare(call, describe=layout.describe)
        if not self._fits(needed):
            self._grow(call, needed)
        spans = tuple(partials)
        reduces, total = self._buffers.slice_reduces(layout, self._plan, placements, self._rank, spans)
        flat_partials = {span: flat(leaves) for span, leaves in partials.items()}
        for reduce in reduces:
            reduce.publish(flat_partials, self._adder)
            self._barrier.arrive_and_wait(call)
            reduce.sum(flat_partials, self._adder)
            self._barrier.arrive_and_wait(call)
        return total

    @property
    def notice(self) -> int:
        """The notice of the view; see `Communicator`."""
        return self._barrier.notice

    @property
    def waited(self) -> float:
        """Seconds of waiting for others; see `Communicator`."""
        return self._barrier.waited

    def gather(self, blob: bytes, *, what: str = "gather") -> list[bytes]:
        """Give every member the blobs of all members; see `Communicator`."""
        call = CollectiveCall("gather", what)
        with self._barrier.during(call):
            return self._barrier.arrive_and_compare(call, blob)

    def all_to_all(self, parts: Sequence[Sequence[Bytes]], *, what: str = "all_to_all") -> list[Bytes]:
        """Give each member the part that each member has for it; see `Communicator`.

        There are three barriers: enter, publish, and leave, after which no member reads the memory any more.
        """
        check_parts(parts, self._plan.members)
        call = CollectiveCall("all_to_all", what)
        with self._barrier.during(call):
            lengths = [sum(array.nbytes for array in part) for part in parts]
            blobs = self._barrier.arrive_and_compare(call, np.array(lengths, np.int64).tobytes())
            sizes = np.array([np.frombuffer(blob, np.int64) for blob in blobs])
            stops = np.cumsum(sizes).reshape(sizes.shape)
            needed = Sizes(0, int(stops[-1, -1]))
            if needed.outside and not self._fits(needed):
                self._grow(call, needed)
            memory, rank = self._buffers.parts(needed.outside), self._rank
            for stop, size, part in zip(stops[rank], lengths, parts, strict=True):
                if part:
                    np.concatenate(part, out=memory[stop - size : stop])
            self._barrier.arrive_and_wait(call)
            columns = zip(stops[:, rank], sizes[:, rank], strict=True)
            received = [joined([memory[stop - size : stop]]) for stop, size in columns]
            self._barrier.arrive_and_wait(call)
            return received

    def barrier(self, *, what: str = "barrier") -> None:
        """Return once every member has called it; see `Communicator`."""
        call = CollectiveCall("barrier", what)
        with self._barrier.during(call):
            self._barrier.arrive_and_compare(call)

    def abort(self, reason: str) -> None:
        """End this view for all members; see `Communicator`."""
        self._barrier.abort(reason)

    def close(self) -> None:
        """Make no more calls; members that wait for this one raise `PeerLostError`. See `Communicator`."""
        self._barrier.close()

    def _fits(self, needed: Sizes) -> bool:
        return self._has_room and self._buffers.fits(needed)

    def _grow(self, call: CollectiveCall, needed: Sizes) -> None:
        """Make room for `needed`: one member allocates the memory, then each member maps it.

        All members call this before their first write in a view, when no member writes for the previous view
        any more. Members of the previous view reuse their memory.
        """
        sizes = Sizes.largest(
            self._barrier.arrive_and_compare(
                CollectiveCall("sizes", call.what), self._buffers.enlarged(needed).encode()
            )
        )
        pool = self._buffers.pool
        self._on_all_members(call, lambda: pool.grow(sizes.whole) if self._rank == 0 else None)
        self._buffers.use(
            sizes, self._on_all_members(call, lambda: np.frombuffer(pool.map(sizes.whole), np.uint8))
        )
        self._has_room = True

    def _on_all_members(self, call: CollectiveCall, act: Callable[[], Result]) -> Result:
        """Call `act`; if it fails on any member, raise the error on every member."""
        failed, results = "", list[Result]()
        try:
            results.append(act())
        except SharedMemoryError as error:
            failed = str(error)
        texts = self._barrier.arrive_and_compare(CollectiveCall("memory", call.what), failed.encode())
        for text in texts:
            if text:
                raise SharedMemoryError(text.decode())
        return results[0]
