"""The rows of a report: a label, the median, and the 10th and 90th percentiles."""

import statistics
from dataclasses import dataclass

UNITS = {
    "ms": (1e3, ".1f"),
    "us": (1e6, ".1f"),
    "s": (1.0, ".2f"),
    "images/s": (1.0, ",.0f"),
    "examples/s": (1.0, ",.0f"),
    "batches/s": (1.0, ",.0f"),
    "functions/s": (1.0, ",.0f"),
    "times": (1.0, ".2f"),
    "kB": (1e-3, ",.0f"),
    "MB": (1e-6, ",.0f"),
    "": (1.0, ".3f"),
}
"""For each unit, the factor by which seconds, bytes or plain numbers are multiplied, and the format."""


@dataclass(frozen=True)
class Spread:
    """The median and the 10th and 90th percentiles of numbers."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        tenths = statistics.quantiles(values, n=10, method="inclusive")
        return cls(statistics.median(values), tenths[0], tenths[-1])

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def print_row(label: str, values: list[float], unit: str = "", to_reach: str = "") -> None:
    """Print a row; at least two values."""
    factor, form = UNITS[unit]
    spread = Spread.of([value * factor for value in values])
    low, middle, high = (f"{value:{form}}" for value in (spread.low, spread.median, spread.high))
    note = f"   to reach {to_reach}" if to_reach else ""
    print(f"  {label:61} {middle} {unit}{' ' if unit else ''}({low}-{high}){note}", flush=True)


def print_regime(regime: list[float]) -> None:
    """Print the speed of the memory, in GB/s per core."""
    print(f"  memory: each core copies {Spread.of(regime)} GB/s while the others do")
