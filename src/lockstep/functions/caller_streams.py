"""Shows what a job writes in the program that has called it."""

import codecs
import sys


class CallerStreams:
    """Writes to `sys.stdout` and `sys.stderr`, also if these are replaced, as a notebook does."""

    def __init__(self) -> None:
        new = codecs.getincrementaldecoder("utf-8")
        self._decoders = {1: new("replace"), 2: new("replace")}

    def write(self, number: int, data: bytes) -> None:
        """Write to stdout, 1, or stderr, 2. No data means that nothing follows."""
        stream = sys.stdout if number == 1 else sys.stderr
        stream.write(self._decoders[number].decode(data, not data))
        stream.flush()
