"""A published state in parts, which agents send to each other through the coordinator.

Without NumPy, whose import would take a part of each launch of an agent.
"""

import fcntl
import os
from collections.abc import Iterator

from lockstep.protocol.channel import Attachment


def parts_of(state: Attachment, size: int) -> Iterator[bytes]:
    """Yield the bytes of a published state in parts of at most `size` bytes."""
    start = 0
    while part := os.pread(state.descriptor, size, start):
        yield part
        start += len(part)


class ArrivingState:
    """A state of which parts arrive from another host.

    Raises:
        OSError: this process has too many descriptors.
    """

    def __init__(self) -> None:
        self._state = Attachment(os.memfd_create("lockstep-state", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))

    def add(self, part: bytes) -> None:
        """Append a part.

        Raises:
            OSError: there is too little memory.
        """
        while part:
            part = part[os.write(self._state.descriptor, part) :]

    def complete(self) -> Attachment:
        """Return the whole state."""
        fcntl.fcntl(self._state.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return self._state
