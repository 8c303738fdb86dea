"""The exchange between members that are processes on one host."""

from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np

from lockstep.clock import Clock, SystemClock
from lockstep.collectives.arena import Arena
from lockstep.collectives.arguments import check_length, common_layout, outgoing
from lockstep.collectives.calls import Call
from lockstep.collectives.contract import Leaves, Span, WaitObserver, WaitPolicy
from lockstep.collectives.layout import Layout
from lockstep.collectives.meeting import Meeting
from lockstep.collectives.packets import SMALL, size
from lockstep.collectives.places import Places, run
from lockstep.collectives.plan import ReducePlan
from lockstep.collectives.pool import Pool
from lockstep.collectives.room import Room, Sizes, remembered
from lockstep.collectives.summing import Adder, flat
from lockstep.errors import InternalError, SharedMemoryError

Result = TypeVar("Result")

__all__ = ["Arena", "Pool", "Room", "SharedCommunicator"]


class SharedCommunicator:
    """One member's end of the exchange in an `Arena`, with partials and totals in a `Room`; a `Communicator`.

    The members meet once in a reduction with a small total: when all have published what others sum. With a
    large one they meet also before, so that nobody reads the last total any more, and after, when all have
    summed their slices. The arena stays open when this is closed, so that `abort` still works.
    """

    def __init__(
        self,
        arena: Arena,
        room: Room,
        position: int,
        plan: ReducePlan,
        policy: WaitPolicy | None = None,
        observe: WaitObserver | None = None,
        clock: Clock | None = None,
    ) -> None:
        if arena.members != plan.members:
            raise InternalError(f"an arena for {arena.members} members and a plan for {plan.members}")
        self._position = position
        self._plan = plan
        self._meeting = Meeting(
            arena, position, plan.workers, policy or WaitPolicy(), observe, clock or SystemClock()
        )
        self._room = room
        self._has_room = False
        self._adder = Adder()
        self._places: dict[Layout, Places] = {}

    def reduce(self, partials: Mapping[Span, Leaves], *, check: bytes = b"", what: str = "reduce") -> Leaves:
        """Sum the leaves of all replicas; see `Communicator`."""
        check_length(check)
        layout = common_layout(self._plan, self._position, partials)
        call = Call("reduce", what, check, layout=layout.digest)
        with self._meeting.calling(call), np.errstate(all="ignore"):
            if layout.size <= SMALL:
                return self._swap_packets(call, layout, partials)
            return self._sum_slices(call, layout, partials)

    def _swap_packets(self, call: Call, layout: Layout, partials: Mapping[Span, Leaves]) -> Leaves:
        needed = Sizes(0, 2 * size(layout, self._plan))
        if not self._fits(needed):
            self._meeting.meet(call, describe=layout.describe)
            self._grow(call, needed)
        packets, total = self._room.packets(layout, self._plan, self._position, tuple(partials))
        packets.publish({span: flat(leaves) for span, leaves in partials.items()}, self._adder)
        self._meeting.meet(call, describe=layout.describe)
        self._room.turn()
        packets.sum(self._adder)
        return total

    def _sum_slices(self, call: Call, layout: Layout, partials: Mapping[Span, Leaves]) -> Leaves:
        places = remembered(self._places, layout, lambda: Places.of(layout, self._plan))
        needed = Sizes(layout.size, places.size)
        self._meeting.meet(call, describe=layout.describe)
        if not self._fits(needed):
            self._grow(call, needed)
        work, total = self._room.slices(layout, self._plan, places, self._position, tuple(partials))
        own = {span: flat(leaves) for span, leaves in partials.items()}
        run(work.publish, own, self._adder)
        self._meeting.sync(call)
        run(work.total, own, self._adder)
        self._meeting.sync(call)
        return total

    @property
    def notice(self) -> int:
        """What was left for the members; see `Communicator`."""
        return self._meeting.notice

    def gather(self, blob: bytes, *, what: str = "gather") -> list[bytes]:
        """Give every member the blobs of all members; see `Communicator`."""
        call = Call("gather", what)
        with self._meeting.calling(call):
            return self._meeting.meet(call, blob)

    def broadcast(self, blob: bytes | None, *, root: int, what: str = "broadcast") -> bytes:
        """Give every member the blob of the member at `root`; see `Communicator`."""
        sent = outgoing(blob, is_root=self._position == root)
        call = Call("broadcast", what, root=root)
        with self._meeting.calling(call):
            return self._meeting.meet(call, sent)[root]

    def barrier(self, *, what: str = "barrier") -> None:
        """Return once every member has called it; see `Communicator`."""
        call = Call("barrier", what)
        with self._meeting.calling(call):
            self._meeting.meet(call)

    def abort(self, reason: str) -> None:
        """End this view for all members; see `Communicator`."""
        self._meeting.abort(reason)

    def close(self) -> None:
        """Make no more calls; members that wait for this one raise `PeerLostError`."""
        self._meeting.close()

    def _fits(self, needed: Sizes) -> bool:
        return self._has_room and self._room.fits(needed)

    def _grow(self, call: Call, needed: Sizes) -> None:
        """Find room: one member takes the memory for all, then each maps it.

        All come here before they write for the first time in a view: then nobody writes for the one before.
        Who was in it has its memory, which is used again.
        """
        sizes = Sizes.largest(
            self._meeting.meet(Call("sizes", call.what), self._room.enlarged(needed).packed())
        )
        self._together(call, lambda: self._room.take(sizes) if self._position == 0 else None)
        self._room.use(sizes, self._together(call, lambda: self._room.map(sizes)))
        self._has_room = True

    def _together(self, call: Call, act: Callable[[], Result]) -> Result:
        """Act, and raise on every member what failed on any."""
        failed, results = "", list[Result]()
        try:
            results.append(act())
        except SharedMemoryError as error:
            failed = str(error)
        texts = self._meeting.meet(Call("memory", call.what), failed.encode())
        for text in texts:
            if text:
                raise SharedMemoryError(text.decode())
        return results[0]
