"""Notes to the user; a failure to show one never fails the program."""

import contextlib
import os
import sys

from lockstep.system.prose import printable

NOTE_EVERY = 10.0
"""Seconds between two notes about the same wait."""
GATHERING_NOTE_EVERY = 5.0
"""The same while the hosts and processes of a job find each other."""

_STDERR = 2


def written(text: str) -> str:
    """Return the lines of a note. The name of a file or an argument in it must not control the terminal."""
    return "lockstep: " + printable(text, kept="\n\t") + "\n"


def note(text: str) -> None:
    """Write a note to stderr; it is lost if stderr is closed or cannot be written."""
    stream = sys.stderr
    if stream is None:
        return
    line = written(text)
    with contextlib.suppress(OSError, ValueError):
        if _descriptor(stream) == _STDERR:
            stream.flush()
            # Bypasses the buffer: the remains of a failed write there would change the exit status.
            os.write(_STDERR, line.encode(errors="backslashreplace"))
        else:
            stream.write(line)
            stream.flush()


class RepeatedNotes:
    """Writes notes to stderr. It repeats a note with the same text only if its number is a power of ten."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def __call__(self, text: str) -> None:
        """Write a note, with its number if its text is repeated."""
        number = self._numbers[text] = self._numbers.get(text, 0) + 1
        if str(number).strip("0") == "1":
            note(f"{text} ({number} times so far)" if number > 1 else text)


def _descriptor(stream: object) -> int | None:
    try:
        return int(stream.fileno())  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return None
