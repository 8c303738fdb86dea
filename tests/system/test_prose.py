"""Times in words are rounded, and equal everywhere."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.system.prose import clock_text, date_text, duration_text

_SECONDS = {"ms": 1e-3, "s": 1, "min": 60, "h": 3600, "d": 86400}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((-1.0, "0 s"), (0.0, "0 s"), (0.00032, "0.3 ms"), (0.0438, "44 ms"), (0.9996, "1.0 s")),
        *((4.24, "4.2 s"), (9.96, "10 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (192.4, "3 min 12 s")),
        *((3599.4, "59 min 59 s"), (3599.6, "1 h 0 min"), (7500.0, "2 h 5 min"), (7199.0, "2 h 0 min")),
        *((3570.0, "59 min 30 s"), (86399.0, "1 d 0 h"), (93600.0, "1 d 2 h"), (8640000.0, "100 d 0 h")),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@given(st.floats(1e-3, 1e8))
def test_a_duration_is_off_by_half_of_its_smallest_unit_at_most(seconds: float) -> None:
    parts = re.findall(r"([\d.]+) (\w+)", duration_text(seconds))
    number, unit = parts[-1]
    step = _SECONDS[unit] * (0.1 if "." in number else 1)
    said = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    assert abs(said - seconds) <= step / 2 * (1 + 1e-6)


def test_a_clock() -> None:
    assert [clock_text(seconds) for seconds in (-1, 5.4, 59.6, 750, 26102.9)] == [
        *("0:00", "0:05", "1:00", "12:30", "7:15:03"),
    ]


def test_a_time_without_a_date_is_in_seconds() -> None:
    assert [date_text(seconds) for seconds in (1e300, math.nan, -math.inf)] == ["1e+300 s", "nan s", "-inf s"]
