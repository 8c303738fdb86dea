"""The person's terminal: what workers write, and what Lockstep says of them."""

from collections.abc import Callable
from functools import partial
from typing import Literal

from lockstep.system.output import LinePrefixer, Sink

_FULL = 1024 * 1024
_NAMES = ("stdout", "stderr")

Tee = Literal["chief", "all"]
"""Whose output is shown."""

Write = Callable[[bytes], None]


class Console:
    """Shows the output of the chief as it is, or of all workers line by line.

    Args:
        stdout: takes what workers write to stdout.
        stderr: takes what workers write to stderr, and notes.
        tee: whose output is shown.
        chief: the worker whose output is shown as it is; may change.

    Attributes:
        hurries: whether what a reader that is behind cannot take is lost: workers must not wait for it.
    """

    def __init__(self, stdout: Sink, stderr: Sink, tee: Tee, chief: int) -> None:
        self.sinks: tuple[Sink, ...] = (stdout, stderr)
        self.hurries = False
        self._tee = tee
        self.chief = chief
        self._prefixers: list[LinePrefixer] = []
        self._told: set[int] = set()

    @property
    def full(self) -> bool:
        """Whether the reader is so far behind that workers should wait for it, unless they hurry."""
        return any(sink.pending > _FULL for sink in self.sinks)

    @property
    def pending(self) -> int:
        """Bytes that the reader has not taken yet."""
        return sum(sink.pending for sink in self.sinks)

    def shown(self) -> int:
        """Return how many bytes were given to the terminal so far."""
        return sum(sink.taken for sink in self.sinks)

    def shows(self, worker: int) -> bool:
        """Whether the output of `worker` is shown."""
        return self._tee == "all" or worker == self.chief

    def outlets(self, worker: int) -> tuple[Write, Write]:
        """Return where the stdout and the stderr of `worker` go."""
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
        """Show a note, a line or several."""
        self.sinks[1].write(f"lockstep: {text}\n".encode(errors="backslashreplace"))

    def lost(self) -> list[str]:
        """Return, once for each, what the terminal does not show any more, and why."""
        failed = [at for at, sink in enumerate(self.sinks) if sink.failure and at not in self._told]
        self._told.update(failed)
        return [
            f"cannot write to {_NAMES[at]} ({self.sinks[at].failure}); training continues, and the logs keep "
            "the workers' output"
            for at in failed
        ]

    def end_lines(self) -> None:
        """Show last lines that have no end."""
        for prefixer in self._prefixers:
            prefixer.close()

    def flush(self) -> None:
        """Pass on what can be passed on now."""
        for sink in self.sinks:
            sink.flush()

    def _show(self, worker: int, sink: Sink, data: bytes) -> None:
        if self.shows(worker):
            self._pass_on(sink, data)

    def _pass_on(self, sink: Sink, data: bytes) -> None:
        if not (self.hurries and self.full):
            sink.write(data)
