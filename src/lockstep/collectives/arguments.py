"""Checks what callers give to a communicator before anybody waits for it. Pure."""

from collections.abc import Mapping

from lockstep.collectives.contract import Leaves, Span
from lockstep.collectives.layout import Layout
from lockstep.collectives.plan import ReducePlan
from lockstep.errors import InternalError

CHECK_LIMIT = 64
"""Bytes that `check` may have."""


def check_length(check: bytes) -> None:
    """Make sure that `check` has a size that every implementation can carry.

    Raises:
        InternalError: it is too long.
    """
    if len(check) > CHECK_LIMIT:
        raise InternalError(f"a check of {len(check)} bytes; at most {CHECK_LIMIT} are allowed")


def common_layout(plan: ReducePlan, position: int, partials: Mapping[Span, Leaves]) -> Layout:
    """Return the layout that all partials of one member share.

    Raises:
        InternalError: they do not share one, or do not make up what the member owns.
        ModelError: they cannot be summed.
    """
    plan.merges(position, partials)
    layout, *others = map(Layout.of, partials.values())
    if any(other is not layout for other in others):
        raise InternalError("the partials of one member differ in the shapes or dtypes of their leaves")
    layout.check()
    return layout


def outgoing(blob: bytes | None, *, is_root: bool) -> bytes:
    """Return what a member sends in a broadcast: nothing, unless it is the root.

    Raises:
        InternalError: the root has nothing to send, or another member has.
    """
    if is_root != (blob is not None):
        raise InternalError("in a broadcast the root gives a blob and the others give None")
    return blob or b""
