"""The report: findings as a table for users, and as JSON for programs."""

import json
from collections.abc import Sequence
from itertools import groupby
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.doctor.check import Finding, Rating, worst
from lockstep.system.prose import count, printable

_MARKS = {
    Rating.FINE: ("ok", "green"),
    Rating.WARNING: ("warn", "yellow"),
    Rating.FAILURE: ("FAIL", "bold red"),
}
_SUMMARY = {
    Rating.FINE: "this machine is ready",
    Rating.WARNING: "jobs work here",
    Rating.FAILURE: "jobs will not work here",
}
_LINES = "\n"
_NAME_WIDTH = 34
_PLAIN_WIDTH = 120
"""Columns if the output is not a terminal."""


def show(findings: Sequence[Finding], console: Console) -> None:
    """Write a table per section, and a summary in the last line."""
    for section, group in groupby(findings, key=lambda finding: finding.section):
        table = Table(title=section, title_justify="left", title_style="bold", show_header=False, box=None)
        table.add_column(width=4)
        table.add_column(overflow="fold", width=min(_NAME_WIDTH, console.width // 3))
        table.add_column(overflow="fold")
        for finding in group:
            text, style = _MARKS[finding.rating]
            # The reason may contain output of failed programs.
            reason = Text(printable(finding.reason, _LINES))
            if finding.remedy:
                reason.append("\n-> " + printable(finding.remedy, _LINES), style="cyan")
            table.add_row(Text(text, style=style), Text(printable(finding.name)), reason)
        console.print(table)
    console.print(Text(summary(findings), style=_MARKS[worst(findings)][1]))


def console(out: TextIO, is_terminal: bool) -> Console:
    """Return the console of `show` for `out`: styled as the terminal allows, or plain."""
    width = None if is_terminal else _PLAIN_WIDTH
    return Console(file=out, highlight=False, force_terminal=is_terminal, width=width)


def summary(findings: Sequence[Finding]) -> str:
    """Return a summary of all findings in one line."""
    numbers = {
        rating: sum(finding.rating == rating for finding in findings)
        for rating in (Rating.FAILURE, Rating.WARNING)
    }
    counted = [count(number, str(rating)) for rating, number in numbers.items() if number]
    rating = _SUMMARY[worst(findings)]
    return f"{rating}: {' and '.join(counted)}" if counted else rating


def as_json(findings: Sequence[Finding]) -> str:
    """Return `{"status", "findings": [{"section", "name", "verdict", "reason", "remedy", "facts"}]}`."""
    rows = [
        {
            "section": finding.section,
            "name": finding.name,
            "verdict": str(finding.rating),
            "reason": finding.reason,
            "remedy": finding.remedy,
            "facts": finding.facts,
        }
        for finding in findings
    ]
    return json.dumps({"status": int(worst(findings)), "findings": rows}, indent=2)
