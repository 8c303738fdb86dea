"""The exchange between members that are processes on one host."""

from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np

from lockstep.collectives.calls import CollectiveCall, check_length, outgoing
from lockstep.collectives.contract import Leaves, Span, WaitObserver, WaitPolicy
from lockstep.collectives.layout import Layout
from lockstep.collectives.plan import ReducePlan
from lockstep.collectives.shared.barrier import Barrier
from lockstep.collectives.shared.buffers import Buffers, Sizes, remembered
from lockstep.collectives.shared.control_segment import ControlSegment
from lockstep.collectives.shared.packed_reduce import SMALL, size
from lockstep.collectives.shared.slice_reduce import SliceReduce, run
from lockstep.collectives.summing import Adder, common_layout, flat
from lockstep.errors import InternalError, SharedMemoryError
from lockstep.system.clock import Clock, SystemClock

Result = TypeVar("Result")


class SharedCommunicator:
    """One member's end of the exchange in a `ControlSegment`, with partials and totals in `Buffers`.

    A reduction with a small total has one barrier: publish. One with a large total has three: enter, so that
    no member still reads the last total; publish; and sum, when all have summed their slices. Closing this
    leaves the control segment open, so that `abort` still works.
    """

    def __init__(
        self,
        segment: ControlSegment,
        buffers: Buffers,
        position: int,
        plan: ReducePlan,
        policy: WaitPolicy | None = None,
        observe: WaitObserver | None = None,
        clock: Clock | None = None,
    ) -> None:
        if segment.members != plan.members:
            raise InternalError(
                f"a control segment for {segment.members} members and a plan for {plan.members}"
            )
        self._position = position
        self._plan = plan
        self._barrier = Barrier(
            segment, position, plan.workers, policy or WaitPolicy(), observe, clock or SystemClock()
        )
        self._buffers = buffers
        self._has_room = False
        self._adder = Adder()
        self._places: dict[Layout, SliceReduce] = {}

    def reduce(self, partials: Mapping[Span, Leaves], *, check: bytes = b"", what: str = "reduce") -> Leaves:
        """Sum the leaves of all replicas; see `Communicator`."""
        check_length(check)
        layout = common_layout(self._plan, self._position, partials)
        call = CollectiveCall("reduce", what, check, layout=layout.digest)
        with self._barrier.calling(call), np.errstate(all="ignore"):
            if layout.size <= SMALL:
                return self._swap_packets(call, layout, partials)
            return self._sum_slices(call, layout, partials)

    def _swap_packets(self, call: CollectiveCall, layout: Layout, partials: Mapping[Span, Leaves]) -> Leaves:
        needed = Sizes(0, 2 * size(layout, self._plan))
        if not self._fits(needed):
            self._barrier.exchange(call, describe=layout.describe)
            self._grow(call, needed)
        packets, total = self._buffers.packets(layout, self._plan, self._position, tuple(partials))
        packets.publish({span: flat(leaves) for span, leaves in partials.items()}, self._adder)
        self._barrier.exchange(call, describe=layout.describe)
        self._buffers.turn()
        packets.sum(self._adder)
        return total

    def _sum_slices(self, call: CollectiveCall, layout: Layout, partials: Mapping[Span, Leaves]) -> Leaves:
        places = remembered(self._places, layout, lambda: SliceReduce.of(layout, self._plan))
        needed = Sizes(layout.size, places.size)
        self._barrier.exchange(call, describe=layout.describe)
        if not self._fits(needed):
            self._grow(call, needed)
        work, total = self._buffers.slices(layout, self._plan, places, self._position, tuple(partials))
        own = {span: flat(leaves) for span, leaves in partials.items()}
        run(work.publish, own, self._adder)
        self._barrier.sync(call)
        run(work.total, own, self._adder)
        self._barrier.sync(call)
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
        with self._barrier.calling(call):
            return self._barrier.exchange(call, blob)

    def broadcast(self, blob: bytes | None, *, root: int, what: str = "broadcast") -> bytes:
        """Give every member the blob of the member at `root`; see `Communicator`."""
        sent = outgoing(blob, is_root=self._position == root)
        call = CollectiveCall("broadcast", what, root=root)
        with self._barrier.calling(call):
            return self._barrier.exchange(call, sent)[root]

    def barrier(self, *, what: str = "barrier") -> None:
        """Return once every member has called it; see `Communicator`."""
        call = CollectiveCall("barrier", what)
        with self._barrier.calling(call):
            self._barrier.exchange(call)

    def abort(self, reason: str) -> None:
        """End this view for all members; see `Communicator`."""
        self._barrier.abort(reason)

    def close(self) -> None:
        """Make no more calls; members that wait for this one raise `PeerLostError`."""
        self._barrier.close()

    def _fits(self, needed: Sizes) -> bool:
        return self._has_room and self._buffers.fits(needed)

    def _grow(self, call: CollectiveCall, needed: Sizes) -> None:
        """Make room: one member allocates the memory for all, then each maps it.

        All members call this before their first write in a view, when none writes for the previous view any
        more. Members of the previous view reuse its memory.
        """
        sizes = Sizes.largest(
            self._barrier.exchange(
                CollectiveCall("sizes", call.what), self._buffers.enlarged(needed).packed()
            )
        )
        self._together(call, lambda: self._buffers.take(sizes) if self._position == 0 else None)
        self._buffers.use(sizes, self._together(call, lambda: self._buffers.map(sizes)))
        self._has_room = True

    def _together(self, call: CollectiveCall, act: Callable[[], Result]) -> Result:
        """Call `act`, and raise an error of any member on every member."""
        failed, results = "", list[Result]()
        try:
            results.append(act())
        except SharedMemoryError as error:
            failed = str(error)
        texts = self._barrier.exchange(CollectiveCall("memory", call.what), failed.encode())
        for text in texts:
            if text:
                raise SharedMemoryError(text.decode())
        return results[0]
