"""The memory in which the members of a view meet, as an agent makes it."""

from lockstep.agent.views import ExchangeHandle
from lockstep.collectives.shared.control_segment import ControlSegment


def open_exchange(workers: int) -> ExchangeHandle:
    """Make what so many members share.

    Raises:
        SharedMemoryError: this machine has too little memory.
    """
    segment = ControlSegment.create(workers)
    return ExchangeHandle(segment.fd, segment.abort, segment.leave_notice, segment.close)
