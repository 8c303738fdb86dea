"""Which checkpoint a job goes on from, and whether it can."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lockstep.checkpoint.keeper import Every
from lockstep.checkpoint.store import Store, load
from lockstep.errors import ConfigError

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}

Facts = Mapping[str, Any]
"""What a checkpoint says of the job that wrote it: replicas, seed, threads, and versions."""


def parse_every(text: str) -> Every:
    """Read how often: a number of steps, or a time with its unit.

    Raises:
        ConfigError: it is neither.
    """
    if re.fullmatch(r"[1-9]\d*", text):
        return Every(steps=int(text))
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if match and float(match[1]) > 0:
        return Every(seconds=float(match[1]) * _UNITS[match[2]])
    raise ConfigError(f"--checkpoint-every {text}: give a number of steps, or a time such as 30s, 10m or 1h")


def newest(folder: Path, report: Callable[[str], None]) -> tuple[Path, Facts] | None:
    """Return the newest whole checkpoint in `folder`, and what it says of its job; None without one.

    Args:
        folder: may not exist yet.
        report: is told of each damaged one that is newer.
    """
    if not folder.exists():
        return None
    for entry in reversed(Store(folder).entries()):
        if entry.fault is None:
            facts: Facts = load(entry.path).manifest["job"]
            return entry.path, facts
        report(f"checkpoint {entry.path} is passed over: {entry.fault}")
    return None


def refuse_another_job(path: Path, facts: Facts, asked: Mapping[str, Any]) -> None:
    """Raise ConfigError if the person asked for what changes the result that the checkpoint belongs to."""
    for name, value in asked.items():
        if value is not None and value != facts[name]:
            raise ConfigError(
                f"checkpoint {path} was made with --{name} {facts[name]}, not {value}, on which the result "
                f"depends; leave --{name} out to go on, or give another --checkpoint folder to begin anew"
            )
