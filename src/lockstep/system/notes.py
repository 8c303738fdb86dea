"""Notes to the person: failing to show one never fails the program."""

import contextlib
import os
import sys

_STDERR = 2


def note(text: str) -> None:
    """Show a note on stderr; lost where that is closed, or its reader or its disk has failed."""
    stream = sys.stderr
    if stream is None:
        return
    line = f"lockstep: {text}\n"
    with contextlib.suppress(OSError, ValueError):
        if _descriptor(stream) == _STDERR:
            stream.flush()
            # Past the buffer: what a failed write leaves there would spoil the exit status.
            os.write(_STDERR, line.encode(errors="backslashreplace"))
        else:
            stream.write(line)
            stream.flush()


def flush_streams() -> None:
    """Pass on what waits in the buffers of stdout and stderr; lost where that fails."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()


def _descriptor(stream: object) -> int | None:
    try:
        return int(stream.fileno())  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return None
