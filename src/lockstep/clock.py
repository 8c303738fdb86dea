"""What time it is: the system's clocks, and one that a test moves by hand."""

import time
from typing import Protocol


class Clock(Protocol):
    """Two readings of one clock."""

    def now(self) -> float:
        """Seconds on a clock that never goes back; only differences mean something."""

    def wall(self) -> float:
        """Seconds since 1970, for people and files."""


class SystemClock:
    """The clocks of this machine."""

    def now(self) -> float:
        """Return the monotonic clock."""
        return time.monotonic()

    def wall(self) -> float:
        """Return the wall clock."""
        return time.time()


class VirtualClock:
    """A clock that stands still until `advance`; both readings start at `start`."""

    def __init__(self, start: float = 0.0) -> None:
        self._seconds = start

    def now(self) -> float:
        """Return the seconds that were given and advanced."""
        return self._seconds

    def wall(self) -> float:
        """Return the same as `now`."""
        return self._seconds

    def advance(self, seconds: float) -> None:
        """Move the clock; never backwards."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back by {-seconds} s")
        self._seconds += seconds
