"""Phrases in messages of several rooms."""

import time
from collections.abc import Sequence


def name_workers(workers: Sequence[int]) -> str:
    """Return "worker 3", "workers 1 and 2", "workers 0, 1 and 2"."""
    if len(workers) == 1:
        return f"worker {workers[0]}"
    return f"workers {', '.join(map(str, workers[:-1]))} and {workers[-1]}"


def printable(text: str, kept: str = "") -> str:
    """Return a text with control characters replaced by question marks, except for those in `kept`."""
    return "".join(sign if sign.isprintable() or sign in kept else "?" for sign in text)


def shortened(text: str, most: int) -> str:
    """Return a text; of a longer one, the first `most` characters and "..."."""
    return text if len(text) <= most else f"{text[:most]}..."


def first_of(names: Sequence[str], most: int) -> str:
    """Return names; of more than `most`, the first ones and the number of others: "a, b and 3 more"."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def count(number: int, noun: str) -> str:
    """Return "1 worker", "2 workers"."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def percent(share: float) -> str:
    """Return a share between 0 and 1 such as "61 %"."""
    return f"{100 * share:.0f} %"


def size_text(size: int) -> str:
    """Return a number of bytes such as "1,234.5 MB"."""
    return f"{size / 1e6:,.1f} MB"


def transferred(done: int, size: int, seconds: float) -> str:
    """Return the arrived part of some bytes, and their speed: "1.2 of 4.0 GB, 110 MB/s"."""
    scale, unit = (1e9, "GB") if size >= 1e9 else (1e6, "MB")
    rate = f", {done / seconds / 1e6:,.0f} MB/s" if seconds > 0 else ""
    return f"{done / scale:,.1f} of {size / scale:,.1f} {unit}{rate}"


def interval(steps: int | None, seconds: float | None) -> str:
    """Return the frequency of an event: "every step", "every 50 steps", "every 10 min", "every 90 s"."""
    if steps is not None:
        return "every step" if steps == 1 else f"every {steps} steps"
    whole = [(unit, size) for unit, size in (("h", 3600), ("min", 60)) if seconds and seconds % size == 0]
    unit, size = whole[0] if whole else ("s", 1)
    return f"every {(seconds or 0) / size:g} {unit}"


def whose_lines(workers: int, replicas: int) -> str:
    """Name the processes that run the script's own lines, outside of distributed calls."""
    if workers > 1:
        return f"each of the {workers} workers runs the whole script by itself"
    return f"the {replicas} replicas have nothing to compute"


def duration_text(seconds: float) -> str:
    """Return a time, rounded: "0.3 ms", "44 ms", "4.2 s", "42 s", "3 min 12 s", "2 h 5 min", "1 d 2 h"."""
    if seconds <= 0:
        return "0 s"
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms" if seconds >= 0.00095 else f"{1000 * seconds:.1g} ms"
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    if (whole := round(seconds)) < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if (minutes := round(seconds / 60)) < 24 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"


def date_text(seconds: float) -> str:
    """Return a time since 1970 as the local date and time: "2026-01-02 15:04:05".

    A time that has no date, which a damaged file may contain, is returned in seconds.
    """
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return f"{seconds:g} s"


def clock_text(seconds: float) -> str:
    """Return a time since a start as a clock shows it, rounded: "0:05", "12:30", "7:15:03"."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours}:{minutes_left:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def install_command(extra: str) -> str:
    """Return the command that installs what an extra of Lockstep needs."""
    return f"pip install 'keras-lockstep[{extra}]'"


def os_error(error: OSError) -> str:
    """Return the reason for an error of the system, after the file if the error is about one."""
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename else reason


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table of texts, whose columns are as wide as their longest text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
