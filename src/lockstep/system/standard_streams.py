"""The standard streams of this process."""

import contextlib
import os
import sys


def fill_standard_descriptors() -> None:
    """Open the null device for each standard stream that the caller has closed (`>&-`).

    Otherwise, a file that this process opens would get the descriptor of a standard stream.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def flush_streams() -> None:
    """Flush stdout and stderr; the data is lost if that fails."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()


def discard_stdout() -> None:
    """Discard what stdout has buffered: Python would try to write it again when this process exits."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
