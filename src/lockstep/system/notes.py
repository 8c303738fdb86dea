"""Notes to the user; a failure to show one never fails the program."""

import contextlib
import os
import sys

_STDERR = 2


def note(text: str) -> None:
    """Write a note to stderr; it is lost if stderr is closed or cannot be written."""
    stream = sys.stderr
    if stream is None:
        return
    line = f"lockstep: {text}\n"
    with contextlib.suppress(OSError, ValueError):
        if _descriptor(stream) == _STDERR:
            stream.flush()
            # Bypasses the buffer: the remains of a failed write there would change the exit status.
            os.write(_STDERR, line.encode(errors="backslashreplace"))
        else:
            stream.write(line)
            stream.flush()


def _descriptor(stream: object) -> int | None:
    try:
        return int(stream.fileno())  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return None
