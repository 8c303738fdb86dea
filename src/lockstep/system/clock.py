"""The clock, and the parsing of durations."""

import re
import time
from typing import Protocol

from lockstep.errors import ConfigError

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_LONGEST = 24 * 3600.0


class Clock(Protocol):
    """A monotonic and a wall-clock reading."""

    def now(self) -> float:
        """Seconds on a monotonic clock; only differences are meaningful."""

    def wall(self) -> float:
        """Seconds since 1970, for users and files."""


class SystemClock:
    """The clocks of this machine.

    Args:
        start: the present reading of the monotonic clock; None for the machine's reading.
    """

    def __init__(self, start: float | None = None) -> None:
        self._ahead = start - time.monotonic() if start is not None else 0.0

    def now(self) -> float:
        """Return the monotonic clock."""
        return time.monotonic() + self._ahead

    def wall(self) -> float:
        """Return the wall clock."""
        return time.time()


def duration(text: str) -> float | None:
    """Return the seconds of a time with its unit, such as 30s, 1.5m or 1h, or None if it is not one."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)([smh])", text)
    return float(match[1]) * _UNITS[match[2]] if match else None


def parse_seconds(text: str, option: str) -> float:
    """Parse a time: seconds, or a number with its unit.

    Raises:
        ConfigError: the text is not a time, or the time is longer than a day; the message names `option`.
    """
    seconds = duration(f"{text}s" if text[-1:].isdigit() else text)
    if seconds is None or seconds > _LONGEST:
        raise ConfigError(f"{option} {text}: give a time such as 30s or 2m, of at most 24h")
    return seconds
