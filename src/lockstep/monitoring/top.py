"""The command `lockstep top`: shows a job, or this machine, as lines or in place on a terminal."""

import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from queue import SimpleQueue
from typing import Literal

from rich.console import Console

from lockstep.errors import ConfigError
from lockstep.monitoring.followed_job import FollowedJob, JobContact, open_job
from lockstep.monitoring.machine import (
    MachineWatch,
    machine_csv,
    machine_csv_heading,
    machine_json,
    machine_lines,
    machine_now,
    machine_text,
)
from lockstep.monitoring.overview import Overview
from lockstep.monitoring.terminal import PictureTerminal
from lockstep.monitoring.top_screen import QUIT, TopScreen, read_keys
from lockstep.monitoring.top_text import as_csv, as_json, as_text, clipped, csv_heading
from lockstep.protocol.admin import AdminRequest, Reply
from lockstep.system.clock import Clock, SystemClock
from lockstep.system.nvml import GpuReading, load, reader
from lockstep.system.standard_streams import wait_unless_closed, write_stdout

Form = Literal["text", "csv", "json"]

_SHORTEST, _LONGEST = 0.1, 86400.0


def show_job(job: str, interval: float, form: Form, *, once: bool) -> int:
    """Show a job until it ends, or until the user quits; return the exit status.

    A table is shown in place on a terminal, and once elsewhere.

    Args:
        job: a name, the beginning of a name, or the folder of a run.
        interval: seconds between two looks.
        form: a table, or lines of CSV or JSON.
        once: whether to show it once, instead of every `interval`.

    Raises:
        ConfigError: there is no such job or folder, or the interval is out of range.
        OSError: stdout cannot be written; BrokenPipeError if its reader has closed it.
    """
    _check(interval)
    followed = open_job(job, SystemClock(), interval)
    console = terminal_console()
    width = console.width if console is not None else None
    if followed.contact is None or once or (form == "text" and console is None):
        if form == "csv":
            _write(csv_heading())
        view = followed.look()
        _write(as_text(view, width) if form == "text" else _SHOW[form](view))
        return 0
    with closing(followed.contact) as contact:
        contact.start()
        if form != "text":
            return _print_lines(followed, interval, form)
        assert console is not None
        with PictureTerminal(console) as terminal:
            status = _show_in_place(followed, contact, interval, terminal)
        # The picture is gone.
        if end := followed.look().end:
            _write(end + "\n")
        return status


def show_machine(interval: float, form: Form, *, once: bool) -> int:
    """Show the GPUs of this machine and the running jobs until the user quits; return the exit status.

    Arguments and errors are those of `show_job`.
    """
    _check(interval)
    clock, console = SystemClock(), terminal_console()
    with reader(load()) as read_gpus, closing(_machine_watch(read_gpus, clock, interval)) as watch:
        if form == "csv":
            _write(machine_csv_heading())
        if form == "text" and console is not None and not once:
            with PictureTerminal(console) as terminal:
                return _show_machine_in_place(watch, clock, interval, terminal)
        while True:
            machine = watch.newest()
            match form:
                case "text":
                    _write(machine_text(machine, clock.wall(), interval))
                case "csv":
                    _write(machine_csv(machine))
                case "json":
                    _write(machine_json(machine))
            if once or form == "text":
                return 0
            wait_unless_closed(interval)


def _machine_watch(read_gpus: Callable[[], GpuReading], clock: Clock, interval: float) -> MachineWatch:
    return MachineWatch(partial(machine_now, read_gpus, clock, socket.gethostname()), interval)


def _show_machine_in_place(
    watch: MachineWatch, clock: Clock, interval: float, terminal: PictureTerminal
) -> int:
    while True:
        width, height = terminal.size
        lines = machine_lines(watch.newest(), clock.wall(), interval)
        shown = [(clipped(line, width), "") for line in lines[: height - 2]]
        terminal.show([*shown, ("", ""), ("q quit", "dim")])
        happened = terminal.wait(interval)
        if happened.ended is not None:
            return _status_of(happened.ended)
        if "q" in read_keys(happened.typed):
            return 0


def _status_of(number: int) -> int:
    """Return the exit status after a signal; Ctrl-C is a way to quit."""
    return 0 if number == signal.SIGINT else 128 + number


def _check(interval: float) -> None:
    if not _SHORTEST <= interval <= _LONGEST:
        raise ConfigError(f"-i {interval:g}: give a number of seconds from {_SHORTEST:g} to {_LONGEST:.0f}")


def terminal_console() -> Console | None:
    """Return the console of stdout if it is a terminal that can show a picture in place, or None."""
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    console = Console(file=sys.stdout, highlight=False)
    return None if console.is_dumb_terminal else console


def _show_in_place(
    followed: FollowedJob, contact: JobContact, interval: float, terminal: PictureTerminal
) -> int:
    screen = TopScreen()
    replies: SimpleQueue[tuple[AdminRequest, Reply | str]] = SimpleQueue()

    def keep(request: AdminRequest, reply: Reply | str) -> None:
        replies.put((request, reply))
        terminal.wake()

    due = 0.0
    while True:
        while not replies.empty():
            screen.see(*replies.get())
            due = 0.0
        if (now := time.monotonic()) >= due:
            view, due = followed.look(), now + interval
        if view.end:
            return 0
        terminal.show(screen.lines(view, *terminal.size))
        happened = terminal.wait(max(0.0, due - time.monotonic()))
        if happened.ended is not None:
            return _status_of(happened.ended)
        for key in read_keys(happened.typed):
            wanted = screen.press(key, view)
            if wanted == QUIT:
                return 0
            if wanted is not None:
                contact.ask(wanted, partial(keep, wanted))


def _print_lines(followed: FollowedJob, interval: float, form: Form) -> int:
    show, due = _SHOW[form], time.monotonic()
    if form == "csv":
        _write(csv_heading())
    while True:
        view = followed.look()
        _write(show(view))
        if view.end:
            return 0
        due = max(due + interval, time.monotonic())
        wait_unless_closed(max(0.0, due - time.monotonic()))


_SHOW: dict[Form, Callable[[Overview], str]] = {"text": as_text, "csv": as_csv, "json": as_json}


def _write(text: str) -> None:
    encoding = sys.stdout.encoding if sys.stdout is not None else "utf-8"
    write_stdout(text.encode(encoding, "backslashreplace"))
