"""The user's terminal: the output of workers, and notes of Lockstep."""

from collections.abc import Callable
from functools import partial
from typing import Literal

from lockstep.system.notes import written
from lockstep.system.output import LinePrefixer, Sink

_FULL = 1024 * 1024
_NAMES = ("stdout", "stderr")

Tee = Literal["chief", "all"]
"""Workers whose output the terminal shows."""

Write = Callable[[bytes], None]


class Console:
    """Shows the output of the chief as it is, or of all workers line by line.

    Args:
        stdout: receives the stdout of workers.
        stderr: receives the stderr of workers, and notes.
        tee: the workers whose output is shown.
        chief: the first chief.

    Attributes:
        chief: the worker whose output is shown as it is; changes with views.
        drops: whether output is dropped while the reader is far behind; otherwise workers wait for it.
        readers: readers that also get each note.
    """

    def __init__(self, stdout: Sink, stderr: Sink, tee: Tee, chief: int) -> None:
        self.sinks: tuple[Sink, ...] = (stdout, stderr)
        self.drops = False
        self._tee = tee
        self.chief = chief
        self._prefixers: list[LinePrefixer] = []
        self._told: set[int] = set()
        self.readers: list[Callable[[str], object]] = []

    @property
    def full(self) -> bool:
        """Whether the reader is so far behind that workers should wait for it, unless output is dropped."""
        return any(sink.pending > _FULL for sink in self.sinks)

    @property
    def pending(self) -> int:
        """Number of bytes that the reader has not taken yet."""
        return sum(sink.pending for sink in self.sinks)

    def shown(self) -> int:
        """Return the number of bytes that were written so far."""
        return sum(sink.taken for sink in self.sinks)

    def shows(self, worker: int) -> bool:
        """Whether the output of `worker` is shown."""
        return self._tee == "all" or worker == self.chief

    def outlets(self, worker: int) -> tuple[Write, Write]:
        """Return the functions that show the stdout and the stderr of `worker`."""
        stdout, stderr = self.sinks[:2]
        if self._tee == "chief":
            return partial(self._show, worker, stdout), partial(self._show, worker, stderr)
        prefix = f"[worker {worker}] ".encode()
        prefixers = (
            LinePrefixer(prefix, partial(self._pass_on, stdout)),
            LinePrefixer(prefix, partial(self._pass_on, stderr)),
        )
        self._prefixers += prefixers
        return prefixers[0].write, prefixers[1].write

    def say(self, text: str) -> None:
        """Show a note of one line or several."""
        self.sinks[1].write(written(text).encode(errors="backslashreplace"))
        for read in self.readers:
            read(text)

    def lost(self) -> list[str]:
        """Return a message for each stream that can no longer be written; each is returned once."""
        failed = [at for at, sink in enumerate(self.sinks) if sink.failure and at not in self._told]
        self._told.update(failed)
        return [
            f"cannot write to {_NAMES[at]} ({self.sinks[at].failure}); training continues, and the logs keep "
            "the workers' output"
            for at in failed
        ]

    def end_lines(self) -> None:
        """Show unterminated last lines."""
        for prefixer in self._prefixers:
            prefixer.close()

    def flush(self) -> None:
        """Write as much as possible without blocking."""
        for sink in self.sinks:
            sink.flush()

    def _show(self, worker: int, sink: Sink, data: bytes) -> None:
        if self.shows(worker):
            self._pass_on(sink, data)

    def _pass_on(self, sink: Sink, data: bytes) -> None:
        if not (self.drops and self.full):
            sink.write(data)
