"""A clock that a test advances."""


class VirtualClock:
    """A clock that stands still until `advance`; both readings start at `start`."""

    def __init__(self, start: float = 0.0) -> None:
        self._seconds = start

    def now(self) -> float:
        """Return `start` plus the seconds advanced."""
        return self._seconds

    def wall(self) -> float:
        """Return the same as `now`."""
        return self._seconds

    def advance(self, seconds: float) -> None:
        """Advance the clock; `seconds` is never negative."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back by {-seconds} s")
        self._seconds += seconds
