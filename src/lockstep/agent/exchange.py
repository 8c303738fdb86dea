"""The exchange of a view, as the agent that opens it sees it."""

from collections.abc import Callable
from typing import Protocol

from lockstep.collectives.shared.control_segment import ControlSegment
from lockstep.protocol.channel import Attachment
from lockstep.protocol.worker import Endpoint, SharedMemory


class HostExchange(Protocol):
    """What the members of one view share.

    Attributes:
        endpoint: how a member reaches it.
    """

    endpoint: Endpoint

    def post_notice(self, notice: int) -> None:
        """Leave a number for the members, who all see it from the same call on."""

    def abort(self, reason: str) -> None:
        """End the view: members that wait, or call later, raise `PeerLostError(reason)`."""

    def close(self) -> None:
        """Release it here; the members keep it."""


OpenExchange = Callable[[int], HostExchange]
"""Opens an exchange for so many members.

Raises:
    SharedMemoryError: this machine has too little memory.
    OSError: this process has too many descriptors.
"""


class SharedExchange:
    """An exchange in the memory of this host; an `HostExchange`."""

    def __init__(self, segment: ControlSegment) -> None:
        self._segment = segment
        self.endpoint: Endpoint = SharedMemory(Attachment.copy_of(segment.fd))
        self.post_notice = segment.post_notice
        self.abort = segment.abort
        self.close = segment.close


def open_shared(members: int) -> SharedExchange:
    """Open an exchange for so many members; see `OpenExchange`."""
    return SharedExchange(ControlSegment.create(members))
