"""Taking memory that workers share."""

import os

from lockstep.errors import SharedMemoryError
from lockstep.system.memory import Available


def allocate(fd: int, start: int, size: int, available: Available) -> None:
    """Take memory for `size` bytes of a memfd from `start` on.

    Raises:
        SharedMemoryError: it cannot be had.
    """
    room = available()
    try:
        if size > room:
            raise MemoryError("not enough memory")
        # Without this, pages are taken when they are first written to, and where there are none left
        # the process is killed.
        os.posix_fallocate(fd, start, size)
    except (OSError, MemoryError) as error:
        raise SharedMemoryError(
            f"the exchange between workers needs {size} bytes more of shared memory ({room} bytes are "
            f"available): {error}. Use fewer workers on this host, a smaller model, or raise the "
            "memory limit of the container or the file size limit (ulimit -f)"
        ) from error
