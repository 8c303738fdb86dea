"""The load of GPUs and cores: a periodic display, and a log in CSV."""

import csv
import io
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn, TextIO

import psutil
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lockstep.doctor.gpus import absence, describe, quantities, title
from lockstep.errors import ConfigError, UnfitError
from lockstep.system.clock import Clock, SystemClock
from lockstep.system.files import AppendFile
from lockstep.system.nvml import Gpu, GpuReading, Process

_CLOCK = SystemClock()
_MAX_INTERVAL = 86400.0
_GIB = 2**30
_MIB = 2**20
_COLUMNS = (
    "time",
    "index",
    "uuid",
    "name",
    "memory_total_mib",
    "memory_used_mib",
    "memory_free_mib",
    "bar1_used_mib",
    "temperature_c",
    "power_w",
    "utilization_percent",
    "processes",
    "fault",
)
_HEADINGS = ("GPU", "", "memory", "BAR1", "temp", "power", "util", "processes")
"""Short headings for the result of `quantities`, since a terminal may have 80 columns."""


@dataclass(frozen=True)
class HostLoad:
    """The load of the host: percent of its cores' time since the last sample, and bytes of memory."""

    cpu: float
    used: int
    total: int


@dataclass(frozen=True)
class Sample:
    """The values at one time.

    Attributes:
        wall: seconds since 1970.
        host: the machine.
        reading: its GPUs.
    """

    wall: float
    host: HostLoad
    reading: GpuReading


Show = Callable[[Sample], None]


class GpuLog:
    """A CSV file with one line per GPU and sample."""

    def __init__(self, file: AppendFile) -> None:
        self._file = file

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator["GpuLog"]:
        """Open or create the file at `path`, with a line of headings if it is empty.

        Raises:
            ConfigError: it cannot be opened, or has other columns.
            UnfitError: it cannot be written.
        """
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            file = AppendFile(path, os.open(path, flags, 0o666), _give_up)
        except OSError as error:
            raise ConfigError(f"{path} cannot be opened: {error.strerror}; name another file") from None
        try:
            file.write(_missing_start(file))
            yield cls(file)
        finally:
            file.close()

    def add(self, reading: GpuReading, wall: float) -> None:
        """Add a line for each GPU, in one write.

        Args:
            reading: the driver's report.
            wall: seconds since 1970.

        Raises:
            UnfitError: it cannot be written.
        """
        stamp = _local(wall).isoformat(timespec="milliseconds")
        self._file.write(_csv(*((stamp, *_values(gpu)) for gpu in reading.gpus)))


def log_once(log: Path, reading: GpuReading, clock: Clock = _CLOCK) -> None:
    """Append the current values of the GPUs to a CSV file.

    Raises:
        ConfigError: it cannot be opened, or has other columns.
        UnfitError: it cannot be written.
    """
    with GpuLog.open(log) as file:
        file.add(reading, clock.wall())


def host_now() -> HostLoad:
    """Return the load of this machine."""
    memory = psutil.virtual_memory()
    return HostLoad(float(psutil.cpu_percent()), int(memory.used), int(memory.total))


def watch(
    seconds: float,
    log: Path | None,
    read: Callable[[], GpuReading],
    out: TextIO,
    *,
    host: Callable[[], HostLoad] = host_now,
    clock: Clock = _CLOCK,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Show the load of GPUs and cores until Ctrl-C, in place on a terminal, line by line elsewhere.

    Args:
        seconds: the interval between two samples.
        log: the CSV file for all samples, if any.
        read: queries the driver.
        out: the stream for the display.
        host: returns the load of the machine.
        clock: determines when the next sample is due, and the times in the log.
        sleep: waits for a number of seconds.

    Raises:
        ConfigError: `seconds` is not positive or too long, or the log cannot be opened or has other columns.
        UnfitError: the log cannot be written.
    """
    if not 0 < seconds <= _MAX_INTERVAL:
        raise ConfigError(
            f"--watch {seconds:g}: expected a number of seconds, more than 0 and at most {_MAX_INTERVAL:.0f}"
        )
    with suppress(KeyboardInterrupt), ExitStack() as stack:
        file = stack.enter_context(GpuLog.open(log)) if log is not None else None
        show = stack.enter_context(_screen(out))
        due = clock.now()
        while True:
            sample = Sample(clock.wall(), host(), read())
            show(sample)
            if file is not None:
                file.add(sample.reading, sample.wall)
            # Samples that are overdue are skipped.
            now = clock.now()
            due = max(due + seconds, now)
            sleep(due - now)


@contextmanager
def _screen(out: TextIO) -> Iterator[Show]:
    console = Console(file=out, force_terminal=True, highlight=False) if out.isatty() else None
    if console is None or console.is_dumb_terminal:
        yield lambda sample: print(*_lines(sample), sep="\n", file=out, flush=True)
        return
    with Live(console=console, auto_refresh=False) as live:
        yield lambda sample: live.update(_picture(sample), refresh=True)


def _picture(sample: Sample) -> Group:
    host = Text(_show_host(sample))
    if reason := absence(sample.reading):
        return Group(host, Text(reason))
    table = Table(box=None, pad_edge=False)
    for heading in _HEADINGS:
        table.add_column(heading, overflow="fold")
    for gpu in sample.reading.gpus:
        kind = describe(gpu) if gpu.fault else title(gpu)
        table.add_row(str(gpu.index), Text(kind), *(Text(text or "-") for text in quantities(gpu).values()))
    return Group(host, table)


def _lines(sample: Sample) -> list[str]:
    if reason := absence(sample.reading):
        return [_show_host(sample), reason]
    gpus = (f"GPU {gpu.index}: {describe(gpu)}" for gpu in sample.reading.gpus)
    return [_show_host(sample), *gpus]


def _show_host(sample: Sample) -> str:
    host, when = sample.host, f"{_local(sample.wall):%Y-%m-%d %H:%M:%S}"
    memory = f"{host.used / _GIB:.1f} of {host.total / _GIB:.1f} GiB"
    return f"{when}  cores {host.cpu:.0f} %, memory {memory}"


def _values(gpu: Gpu) -> tuple[str | int, ...]:
    """Return the columns of a GPU, without the time; empty for values that it does not report."""
    memory: tuple[str, ...] = ("", "", "")
    if gpu.memory is not None:
        memory = tuple(str(part // _MIB) for part in (gpu.memory.total, gpu.memory.used, gpu.memory.free))
    return (
        gpu.index,
        gpu.uuid or "",
        gpu.name or "",
        *memory,
        "" if gpu.bar1 is None else gpu.bar1.used // _MIB,
        "" if gpu.temperature is None else gpu.temperature,
        "" if gpu.power is None else f"{gpu.power:.1f}",
        "" if gpu.utilization is None else gpu.utilization,
        "; ".join(map(_show_process, gpu.processes or ())),
        gpu.fault,
    )


def _show_process(process: Process) -> str:
    memory = "" if process.memory is None else f"{process.memory // _MIB} MiB"
    return " ".join(filter(None, (str(process.pid), process.name, memory)))


def _local(wall: float) -> datetime:
    return datetime.fromtimestamp(wall, UTC).astimezone()


def _missing_start(file: AppendFile) -> bytes:
    """Return the bytes to write before the first new line.

    Raises:
        ConfigError: the file has other columns.
    """
    heading = _csv(_COLUMNS)
    if file.start == 0:
        return heading
    if os.pread(file.descriptor, len(heading), 0) != heading:
        expected = heading.decode().strip()
        raise ConfigError(
            f"{file.path} has other columns: expected the first line {expected}; name another file"
        )
    # If the disk was full, the last line may be incomplete.
    return b"" if os.pread(file.descriptor, 1, file.start - 1) == b"\n" else b"\n"


def _csv(*rows: tuple[str | int, ...]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _give_up(complaint: str) -> NoReturn:
    raise UnfitError(f"{complaint}. Free space there, or name another file")
