"""A row of a report: a label, the median, and the 10th and 90th percentiles."""

from turns import Spread

UNITS = {
    "ms": (1e3, ".1f"),
    "us": (1e6, ".1f"),
    "s": (1.0, ".2f"),
    "images/s": (1.0, ",.0f"),
    "examples/s": (1.0, ",.0f"),
    "times": (1.0, ".2f"),
    "": (1.0, ".3f"),
}
"""What seconds, or plain numbers, are multiplied with, and how they are written."""


def print_row(label: str, values: list[float], unit: str = "", to_reach: str = "") -> None:
    """Print a row; at least two values."""
    factor, form = UNITS[unit]
    spread = Spread.of([value * factor for value in values])
    low, middle, high = (f"{value:{form}}" for value in (spread.low, spread.median, spread.high))
    note = f"   to reach {to_reach}" if to_reach else ""
    print(f"  {label:61} {middle} {unit}{' ' if unit else ''}({low}-{high}){note}", flush=True)
