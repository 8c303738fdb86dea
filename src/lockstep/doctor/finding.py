"""What a check has found: a row of the report, with a verdict, the reason and the remedy. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any


class Rating(IntEnum):
    """How well a job would go; the worst of a report is the exit status of the command."""

    FINE = 0
    WARNING = 1
    FAILURE = 2

    def __str__(self) -> str:
        return ("fine", "warning", "failure")[self]


@dataclass(frozen=True)
class Finding:
    """One row.

    Attributes:
        section: the part of the report: "versions", "gpus", "backends", "machine", "environment", "training".
        name: what was looked at.
        rating: `FAILURE` where a job would not work, `WARNING` where it works but something is not as it
            should be.
        reason: what was found, in one sentence or less.
        remedy: what to do about it; empty where nothing is to be done.
        facts: the same in numbers and names, for programs; JSON.
    """

    section: str
    name: str
    rating: Rating
    reason: str
    remedy: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Section:
    """A part of the report, which makes its findings."""

    name: str

    def fine(self, name: str, reason: str, **facts: Any) -> Finding:
        """Return a row on what is as it should be."""
        return Finding(self.name, name, Rating.FINE, reason, "", facts)

    def warning(self, name: str, reason: str, remedy: str, **facts: Any) -> Finding:
        """Return a row on what is not as it should be."""
        return Finding(self.name, name, Rating.WARNING, reason, remedy, facts)

    def failure(self, name: str, reason: str, remedy: str, **facts: Any) -> Finding:
        """Return a row on what keeps jobs from working."""
        return Finding(self.name, name, Rating.FAILURE, reason, remedy, facts)


def worst(findings: Iterable[Finding]) -> Rating:
    """Return the worst verdict, `FINE` if there is none."""
    return max((finding.rating for finding in findings), default=Rating.FINE)
