"""Programs that may crash, hang or write anything: each is a process of its own, with a time limit."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

_ENDING = 5.0
_SHOWN = 300


@dataclass(frozen=True)
class Ended:
    """How a program has ended.

    Attributes:
        status: its exit status, negative for a signal; None if the time was over.
        output: what it wrote to stdout.
        errors: what it wrote to stderr.
        seconds: how long it has had.
    """

    status: int | None
    output: str
    errors: str
    seconds: float

    def how(self) -> str:
        """Say how it has ended, as the end of a sentence."""
        if self.status is None:
            return f"had not ended after {self.seconds:.0f} s"
        how = f"ended with status {self.status}"
        if self.status < 0:
            how = f"was ended by {signal.Signals(-self.status).name}"
        line = self._last_line()
        return f"{how}: {line}" if line else how

    def _last_line(self) -> str:
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        return lines[-1][-_SHOWN:] if lines else ""


class Program:
    """A process that runs."""

    def __init__(self, process: "subprocess.Popen[bytes]", output: int, errors: int, begun: float) -> None:
        self._process = process
        self._output = output
        self._errors = errors
        self._begun = begun
        self._has_ended = False

    @classmethod
    def start(cls, command: Sequence[str], environment: Mapping[str, str]) -> Self:
        """Start it, in a session of its own, so that all of it can be ended.

        Raises:
            OSError: the machine cannot.
        """
        # Files, not pipes: a program that writes much must not have to wait for a reader.
        output, errors = (os.memfd_create(f"lockstep-{name}") for name in ("output", "errors"))
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env=environment,
            start_new_session=True,
        )
        return cls(process, output, errors, time.monotonic())

    def result(self, deadline: float) -> Ended:
        """Wait for the end, until `deadline` on the monotonic clock, and tell how it was; call it once."""
        try:
            status: int | None = self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            status = None
        seconds = time.monotonic() - self._begun
        self.end()
        return Ended(status, _read(self._output), _read(self._errors), seconds)

    def end(self) -> None:
        """End it, if it runs, and what it has left in its session."""
        if self._has_ended:
            return
        self._has_ended = True
        if self._process.poll() is None:
            # `lockstep run` ends its workers then, which have sessions of their own.
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_ENDING)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _read(descriptor: int) -> str:
    with open(descriptor, "rb") as file:
        file.seek(0)
        return file.read().decode("utf-8", "replace")
