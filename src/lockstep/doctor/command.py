"""`lockstep doctor`, as the command line calls it. No logic: it composes and calls."""

import importlib.util
import sys
from pathlib import Path

import click

from lockstep.config import environment_at_start, keras_backend
from lockstep.doctor import report
from lockstep.doctor.checkup import Surroundings, examine
from lockstep.doctor.finding import worst
from lockstep.doctor.gpus import absence
from lockstep.doctor.nvml import load, read, reader
from lockstep.doctor.versions import Wish
from lockstep.doctor.watching import log_once, watch


def check(*, as_json: bool, train: bool) -> int:
    """Examine the machine, show what was found, and return the exit status."""
    around = Surroundings(
        environment=environment_at_start(),
        wish=Wish(*keras_backend()),
        installed=lambda name: importlib.util.find_spec(name) is not None,
        reading=read(load()),
        say=lambda text: click.echo(f"lockstep: {text}", err=True),
    )
    findings = examine(around, train=train)
    if as_json:
        click.echo(report.as_json(findings))
    else:
        report.show(findings, report.console(sys.stdout.isatty()))
    return worst(findings)


def follow(seconds: float | None, log: Path | None) -> None:
    """Show what GPUs and cores do, every so many seconds until Ctrl-C, and log it; if none are given, once.

    Raises:
        LockstepError: see `watch`.
    """
    with reader(load()) as look:
        if seconds is not None:
            watch(seconds, log, look, sys.stdout)
        elif log is not None:
            reading = look()
            log_once(log, reading)
            if not reading.gpus:
                click.echo(f"lockstep: {absence(reading)}", err=True)
