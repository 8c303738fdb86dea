"""The metrics that callbacks in this process report to the caller of a function."""

from typing import Protocol


class Reporter(Protocol):
    """Reports metrics.

    Attributes:
        metrics: the last metrics that it has reported; empty before.
        report: the number of that report among those of all reporters, from 1; 0 before.
    """

    metrics: dict[str, float]
    report: int


_reporters: list[Reporter] = []


def add(reporter: Reporter) -> None:
    """Add a reporter to those of this process."""
    _reporters.append(reporter)


def count() -> int:
    """Return the number of reports that the reporters have made, including those of earlier workers."""
    return max((reporter.report for reporter in _reporters), default=0)


def latest() -> dict[str, float]:
    """Return the metrics that were reported last, or an empty dict if there are none."""
    last = max(_reporters, key=lambda reporter: reporter.report, default=None)
    return last.metrics if last is not None else {}
