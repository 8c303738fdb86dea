"""A finding of a check, which is a row of the report: its rating, reason and remedy. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any


class Rating(IntEnum):
    """Whether a job would work; the worst rating of a report is the exit status of the command."""

    FINE = 0
    WARNING = 1
    FAILURE = 2

    def __str__(self) -> str:
        return ("fine", "warning", "failure")[self]


@dataclass(frozen=True)
class Finding:
    """One row.

    Attributes:
        section: the part of the report: "versions", "gpus", "backends", "machine", "environment", "training",
            "hosts".
        name: what was examined.
        rating: `FAILURE` if a job would not work, `WARNING` if it works with a problem.
        reason: what was found, in at most one sentence.
        remedy: what to do about it; empty if nothing needs to be done.
        facts: the same as JSON values, for programs.
    """

    section: str
    name: str
    rating: Rating
    reason: str
    remedy: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Section:
    """A part of the report; makes its findings."""

    name: str

    def fine(self, name: str, reason: str, **facts: Any) -> Finding:
        """Return a row without a problem."""
        return Finding(self.name, name, Rating.FINE, reason, "", facts)

    def warning(self, name: str, reason: str, remedy: str, **facts: Any) -> Finding:
        """Return a row on a problem despite which jobs work."""
        return Finding(self.name, name, Rating.WARNING, reason, remedy, facts)

    def failure(self, name: str, reason: str, remedy: str, **facts: Any) -> Finding:
        """Return a row on a problem that keeps jobs from working."""
        return Finding(self.name, name, Rating.FAILURE, reason, remedy, facts)


def worst(findings: Iterable[Finding]) -> Rating:
    """Return the worst rating; `FINE` if there is none."""
    return max((finding.rating for finding in findings), default=Rating.FINE)
