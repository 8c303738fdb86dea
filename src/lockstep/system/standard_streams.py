"""The standard streams of this process."""

import contextlib
import io
import os
import select
import sys

_STDOUT = 1


def fill_standard_descriptors() -> None:
    """Open the null device for each standard stream that the caller has closed (`>&-`).

    Otherwise, a file that this process opens would get the descriptor of a standard stream.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def close_other_descriptors(*kept: int) -> None:
    """Close all descriptors except those of the standard streams and those to keep."""
    # os.closerange is not used, because the limit on descriptors may be infinite.
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - its own descriptor is among them
        if int(name) > 2 and int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))


def write_whole_lines() -> None:
    """Write each line of stdout and stderr at once when it is complete, or when the program flushes it.

    Without a buffer, `print` writes a line in pieces, between which a reader of both streams can find a line
    of the other stream.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def flush_streams() -> None:
    """Flush stdout and stderr; the data is lost if that fails."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()


def discard_stdout() -> None:
    """Discard the buffer of stdout, because Python would try to write it again when this process exits."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write_stdout(data: bytes) -> None:
    """Write all of `data` to stdout at once, past its buffer.

    Raises:
        OSError: it cannot be written.
    """
    while data:
        data = data[os.write(_STDOUT, data) :]


def wait_unless_closed(seconds: float) -> None:
    """Wait for `seconds`, or until the reader of stdout closes it.

    Raises:
        BrokenPipeError: the reader has closed stdout.
    """
    poll = select.poll()
    # The kernel reports the end of the reader even if no other event is requested.
    poll.register(_STDOUT, 0)
    if poll.poll(seconds * 1e3):
        raise BrokenPipeError
