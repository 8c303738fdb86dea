"""Shows the output of a job in the program that started it."""

import codecs
import sys


class CallerStreams:
    """Writes to `sys.stdout` and `sys.stderr`, even if these are replaced, as in a notebook."""

    def __init__(self) -> None:
        new = codecs.getincrementaldecoder("utf-8")
        self._decoders = {1: new("replace"), 2: new("replace")}

    def write(self, number: int, data: bytes) -> None:
        """Write to stdout (`number` 1) or stderr (2). Empty data ends the stream."""
        stream = sys.stdout if number == 1 else sys.stderr
        stream.write(self._decoders[number].decode(data, not data))
        stream.flush()
