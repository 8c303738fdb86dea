"""The exchange of a view on one host, as seen by the agent that opens it."""

from collections.abc import Callable
from typing import Protocol

from lockstep.collectives.shared.control_segment import ControlSegment
from lockstep.protocol.channel import Attachment


class HostExchange(Protocol):
    """The agent's side of the exchange of one view on its host.

    Attributes:
        control: the memory in which the members on this host synchronize.
    """

    control: Attachment

    def post_notice(self, notice: int) -> None:
        """Set the notice of the view; all members see it from the same call on."""

    def permit(self, until: float) -> None:
        """Let the calls of a job over hosts end until then, by the monotonic clock of this machine.

        Without this, they may end at any time.
        """

    def abort(self, reason: str) -> None:
        """End the exchange: members that wait, or call later, raise `PeerLostError(reason)`."""

    def close(self) -> None:
        """Release what this process holds of it; the members keep theirs."""


OpenExchange = Callable[[int], HostExchange]
"""Opens an exchange for a number of members.

Raises:
    SharedMemoryError: this machine has too little memory.
    OSError: this process has too many descriptors.
"""


class SharedExchange:
    """An exchange in the memory of this host; a `HostExchange`."""

    def __init__(self, segment: ControlSegment) -> None:
        self._segment = segment
        self.control = Attachment.copy_of(segment.fd)
        self.post_notice = segment.post_notice
        self.permit = segment.permit
        self.abort = segment.abort
        self.close = segment.close


def open_shared(members: int) -> SharedExchange:
    """Open an exchange for a number of members; an `OpenExchange`."""
    return SharedExchange(ControlSegment.create(members))
