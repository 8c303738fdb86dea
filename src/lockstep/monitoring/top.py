"""The command `lockstep top`: shows a job, or this machine, as lines or in place on a terminal."""

import sys
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from typing import Literal

from lockstep.errors import ConfigError
from lockstep.monitoring.followed_job import FollowedJob, open_job
from lockstep.monitoring.overview import Overview
from lockstep.monitoring.top_text import as_csv, as_json, as_text, csv_heading
from lockstep.system.clock import SystemClock

Form = Literal["text", "csv", "json"]

_SHORTEST, _LONGEST = 0.1, 86400.0


def show_job(job: str, interval: float, form: Form, *, once: bool) -> None:
    """Show a job until it ends, or until Ctrl-C.

    Args:
        job: its name, the beginning of it, or a run folder.
        interval: seconds between two looks.
        form: as a table, or as lines of CSV or JSON.
        once: whether to show it once, instead of every `interval`.

    Raises:
        ConfigError: there is no such job or folder, or the interval is out of range.
        OSError: stdout cannot be written.
    """
    if not _SHORTEST <= interval <= _LONGEST:
        raise ConfigError(f"-i {interval:g}: give a number of seconds from {_SHORTEST:g} to {_LONGEST:.0f}")
    followed = open_job(job, SystemClock(), interval)
    with closing(followed.contact) if followed.contact is not None else nullcontext():
        if followed.contact is not None:
            followed.contact.start()
        if form == "csv":
            _write(csv_heading())
        if once or followed.contact is None or form == "text":
            _write(_SHOW[form](followed.look()))
            return
        _print_lines(followed, interval, _SHOW[form])


def _print_lines(followed: FollowedJob, interval: float, show: Callable[[Overview], str]) -> None:
    due = time.monotonic()
    while True:
        view = followed.look()
        _write(show(view))
        if view.end:
            return
        due = max(due + interval, time.monotonic())
        time.sleep(due - time.monotonic())


_SHOW: dict[Form, Callable[[Overview], str]] = {"text": as_text, "csv": as_csv, "json": as_json}


def _write(text: str) -> None:
    if sys.stdout is not None:
        sys.stdout.buffer.write(text.encode(sys.stdout.encoding, "backslashreplace"))
        sys.stdout.flush()
