"""The communicator of the only member of a view."""

from collections.abc import Mapping, Sequence

import numpy as np

from lockstep.collectives.adder import Adder, Array, common_layout, flat
from lockstep.collectives.call import CollectiveCall, check_length, check_parts
from lockstep.collectives.contract import Bytes, Leaves, Span
from lockstep.collectives.layout import Layout, allocate, joined
from lockstep.collectives.plan import ReducePlan, Sum
from lockstep.errors import InternalError, PeerLostError


class ReusedTotal:
    """Computes totals; a total reuses the memory of the previous one if the layout is the same."""

    def __init__(self) -> None:
        self._adder = Adder()
        self._layout = Layout((), ())
        self._flat: tuple[Array, ...] = ()
        self._shaped: tuple[Array, ...] = ()

    def of(self, whole: Span, partials: Mapping[Span, Leaves]) -> Leaves:
        """Sum partials that cover the replicas of `whole`, in tree order; a single one is its own total."""
        plan = Sum.of(whole, partials)
        operands = [partials[span] for span in plan.operands]
        layout = Layout.of(operands[0])
        if not plan.steps:
            return layout.shaped([leaf.view() for leaf in flat(operands[0])])
        if layout != self._layout:
            self._layout, self._flat = layout, layout.views(allocate(layout.size))
            self._shaped = layout.shaped(self._flat)
        flattened = [flat(leaves) for leaves in operands]
        with np.errstate(all="ignore"):
            for leaf, out in enumerate(self._flat):
                self._adder.add(plan, [operand[leaf] for operand in flattened], out)
        return self._shaped


class LoopbackCommunicator:
    """The `Communicator` of the only member of a view, which never waits.

    If it has a single partial, its total is a view of that.
    """

    notice = 0
    waited = 0.0

    def __init__(self, plan: ReducePlan) -> None:
        self._plan = plan
        self._total = ReusedTotal()
        self._reason: str | None = None
        self._is_closed = False

    def reduce(self, partials: Mapping[Span, Leaves], *, check: bytes = b"", what: str = "reduce") -> Leaves:
        """Sum the leaves of all replicas; see `Communicator`."""
        check_length(check)
        common_layout(self._plan, 0, partials)
        self._begin("reduce", what)
        return self._total.of(self._plan.whole, partials)

    def gather(self, blob: bytes, *, what: str = "gather") -> list[bytes]:
        """Return the member's own blob; see `Communicator`."""
        self._begin("gather", what)
        return [blob]

    def all_to_all(self, parts: Sequence[Sequence[Bytes]], *, what: str = "all_to_all") -> list[Bytes]:
        """Return the part that the member has for itself; see `Communicator`."""
        check_parts(parts, 1)
        self._begin("all_to_all", what)
        return [joined(parts[0])]

    def barrier(self, *, what: str = "barrier") -> None:
        """Return; see `Communicator`."""
        self._begin("barrier", what)

    def _begin(self, kind: str, what: str) -> None:
        if self._is_closed:
            raise InternalError(f"{CollectiveCall(kind, what)} on a closed communicator")
        if self._reason is not None:
            raise PeerLostError(self._reason)

    def abort(self, reason: str) -> None:
        """End this view; see `Communicator`."""
        if self._reason is None:
            self._reason = reason

    def close(self) -> None:
        """Make no more calls; see `Communicator`."""
        self._is_closed = True
