"""The periodic display of the load, and its log."""

import csv
import errno
import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from lockstep.doctor.load_monitor import HostLoad, host_now, log_once, watch
from lockstep.errors import ConfigError, UnfitError
from lockstep.system.clock import VirtualClock
from lockstep.system.nvml import Driver, Gpu, GpuMemory, GpuReading, Process

GIB = 2**30
START = 1_700_000_000.0
HOST = HostLoad(12.4, 3 * GIB, 8 * GIB)
H100 = Gpu(
    0,
    "NVIDIA [h100]",
    "GPU-aa",
    "00000000:1B:00.0",
    GpuMemory(80 * GIB, 20 * GIB, 60 * GIB),
    GpuMemory(128 * GIB, GIB, 127 * GIB),
    34,
    75.54,
    700.0,
    3,
    (Process(41, "a, [b]", 12 * GIB), Process(42, "", None)),
)
LOST = Gpu(1, fault="it has fallen off the bus")
BOTH = GpuReading(Driver("570.124.06", (12, 8)), (H100, LOST))
NONE = GpuReading(None, (), "none on the PCI bus, and no driver")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def screen(text: str) -> list[str]:
    """Return the lines that a terminal shows after it has processed cursor movements."""
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[[0-9;?]*[a-zA-Z]|\r|\n|[^\x1b\r\n]+", text):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\x1b[1A":
            row -= 1
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part[0] not in "\r\x1b":
            lines[row] += part
    return [line.rstrip() for line in lines]


class Sleep:
    """Advances the clock; after a number of calls, raises KeyboardInterrupt like Ctrl-C."""

    def __init__(self, clock: VirtualClock, times: int) -> None:
        self.slept: list[float] = []
        self._clock = clock
        self._times = times

    def __call__(self, seconds: float) -> None:
        self.slept.append(seconds)
        if len(self.slept) == self._times:
            raise KeyboardInterrupt
        self._clock.advance(seconds)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    return Terminal()


def watched(
    readings: Sequence[GpuReading | Exception],
    *,
    seconds: float = 2.0,
    log: Path | None = None,
    out: io.StringIO | None = None,
    took: float = 0.0,
) -> tuple[str, list[float]]:
    """Watch until the readings are used up; return the output and the pauses."""
    clock = VirtualClock(START)
    sleep = Sleep(clock, len(readings))
    left: Iterator[GpuReading | Exception] = iter(readings)
    out = io.StringIO() if out is None else out

    def read() -> GpuReading:
        clock.advance(took)
        reading = next(left)
        if isinstance(reading, Exception):
            raise reading
        return reading

    watch(seconds, log, read, out, host=lambda: HOST, clock=clock, sleep=sleep)
    return out.getvalue(), sleep.slept


def rows(log: Path) -> list[dict[str, str]]:
    with log.open(newline="") as file:
        return list(csv.DictReader(file))


def test_each_sample_is_plain_lines_without_a_terminal() -> None:
    shown, slept = watched([BOTH, BOTH])
    lines = shown.splitlines()
    assert len(lines) == 6
    assert lines[0].endswith("  cores 12 %, memory 3.0 of 8.0 GiB")
    assert lines[1].startswith("GPU 0: NVIDIA [h100], memory 20.0 of 80.0 GiB, BAR1 1.0 of 128.0 GiB, ")
    assert lines[1].endswith("utilization 3 %, processes 41 a, [b] (12.0 GiB), 42")
    assert lines[2] == "GPU 1: it has fallen off the bus"
    assert lines[4:] == lines[1:3]
    assert lines[3] != lines[0]
    assert "\x1b" not in shown
    assert slept == [2.0, 2.0]


def test_without_a_gpu_the_host_is_shown() -> None:
    shown, _ = watched([NONE])
    host, why = shown.splitlines()
    assert "cores 12 %" in host
    assert why == "no GPU (none on the PCI bus, and no driver); workers compute on the CPU"


def test_a_terminal_is_updated_in_place(terminal: Terminal) -> None:
    hot = GpuReading(BOTH.driver, (replace(H100, temperature=99), LOST))
    watched([BOTH, hot, BOTH, hot], out=terminal)
    host, headings, first, *_, last, end = screen(terminal.getvalue())
    assert host.endswith("cores 12 %, memory 3.0 of 8.0 GiB")
    assert headings.split() == ["GPU", "memory", "BAR1", "temp", "power", "util", "processes"]
    assert first.split()[:3] == ["0", "NVIDIA", "[h100]"]
    assert "20.0 of 80.0 GiB" in first
    assert "99 C" in first
    assert last.split() == ["1", *LOST.fault.split(), *"------"]
    assert "41 a, [b] (12.0 GiB), 42" in first
    assert end == ""
    # Each sample was shown.
    assert terminal.getvalue().count("34 C") == 2


def test_a_terminal_without_a_gpu_shows_the_host(terminal: Terminal) -> None:
    watched([NONE, NONE], out=terminal)
    host, why, _ = screen(terminal.getvalue())
    assert "cores 12 %" in host
    assert why == "no GPU (none on the PCI bus, and no driver); workers compute on the CPU"


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    shown, _ = watched([BOTH], out=Terminal())
    assert "\x1b" not in shown
    assert shown.splitlines()[2] == "GPU 1: it has fallen off the bus"


def test_the_pause_ends_when_the_next_sample_is_due() -> None:
    assert watched([BOTH] * 3, took=0.5)[1] == [1.5, 1.5, 1.5]
    # Samples that are overdue are skipped.
    assert watched([BOTH] * 3, took=5.0)[1] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), 86401.0])
def test_an_invalid_interval_raises(seconds: float) -> None:
    with pytest.raises(ConfigError, match=r"--watch .*: expected a number of seconds"):
        watched([BOTH], seconds=seconds)


def test_errors_are_not_treated_as_ctrl_c() -> None:
    with pytest.raises(UnfitError, match="broken"):
        watched([BOTH, UnfitError("broken")])


def test_the_log_has_a_line_per_gpu_and_sample(tmp_path: Path) -> None:
    log = tmp_path / "gpus.csv"
    watched([BOTH, BOTH], log=log)
    written = rows(log)
    assert len(written) == 4
    stamps = [datetime.fromisoformat(row.pop("time")) for row in written]
    assert [(stamp - datetime.fromtimestamp(START, UTC)).total_seconds() for stamp in stamps] == [0, 0, 2, 2]
    assert written[0] == {
        "index": "0",
        "uuid": "GPU-aa",
        "name": "NVIDIA [h100]",
        "memory_total_mib": "81920",
        "memory_used_mib": "20480",
        "memory_free_mib": "61440",
        "bar1_used_mib": "1024",
        "temperature_c": "34",
        "power_w": "75.5",
        "utilization_percent": "3",
        "processes": "41 a, [b] 12288 MiB; 42",
        "fault": "",
    }
    assert written[1] == dict.fromkeys(written[0], "") | {"index": "1", "fault": "it has fallen off the bus"}
    assert written[2:] == written[:2]


def test_each_sample_is_logged_before_the_pause(tmp_path: Path) -> None:
    log = tmp_path / "gpus.csv"
    seen = []

    class CheckedSleep(Sleep):
        def __call__(self, seconds: float) -> None:
            seen.append(len(rows(log)))
            super().__call__(seconds)

    clock = VirtualClock(START)
    watch(1.0, log, lambda: BOTH, io.StringIO(), host=lambda: HOST, clock=clock, sleep=CheckedSleep(clock, 2))
    assert seen == [2, 4]


def test_an_existing_log_gets_no_second_heading(tmp_path: Path) -> None:
    log = tmp_path / "gpus.csv"
    for _ in range(2):
        log_once(log, BOTH, VirtualClock(START))
    assert len(rows(log)) == 4
    assert log.read_text().count("memory_total_mib") == 1


def test_without_a_gpu_the_log_has_only_the_heading(tmp_path: Path) -> None:
    log = tmp_path / "gpus.csv"
    for _ in range(2):
        log_once(log, NONE)
    assert log.read_text().count("\n") == 1


def test_an_incomplete_line_is_ended(tmp_path: Path) -> None:
    log = tmp_path / "gpus.csv"
    log_once(log, BOTH, VirtualClock(START))
    whole = log.read_text()
    log.write_text(whole[:-10])
    log_once(log, BOTH, VirtualClock(START))
    assert log.read_text() == whole[:-10] + "\n" + "".join(whole.splitlines(keepends=True)[1:])


@pytest.mark.parametrize("content", ["time,index\n1,2\n", "my notes", "time"])
def test_a_file_with_other_content_raises_and_is_unchanged(tmp_path: Path, content: str) -> None:
    log = tmp_path / "gpus.csv"
    log.write_text(content)
    for add in (lambda: log_once(log, BOTH), lambda: watched([BOTH], log=log)):
        with pytest.raises(
            ConfigError, match=r"gpus.csv has other columns: expected the first line time,index,"
        ):
            add()
    assert log.read_text() == content
    assert not [each for each in Path("/proc/self/fd").iterdir() if each.resolve() == log]


def test_a_log_that_cannot_be_opened_raises(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none/gpus.csv cannot be opened: No such file or directory"):
        log_once(tmp_path / "none" / "gpus.csv", BOTH)
    with pytest.raises(ConfigError, match="cannot be opened: Is a directory"):
        log_once(tmp_path, BOTH)


def test_a_full_disk_raises() -> None:
    with pytest.raises(
        UnfitError, match=r"cannot write /dev/full: No space left on device.* name another file"
    ):
        watched([BOTH], log=Path("/dev/full"))


def test_a_disk_that_becomes_full_raises_and_restores_the_cursor(
    tmp_path: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[bytes] = []

    def write(descriptor: int, data: bytes) -> int:
        lines.append(data)
        if len(lines) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return len(data)

    monkeypatch.setattr("lockstep.system.files.os.write", write)
    with pytest.raises(UnfitError, match="No space left on device"):
        watched([BOTH] * 3, log=tmp_path / "gpus.csv", out=terminal)
    assert len(lines) == 3
    shown = terminal.getvalue()
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_names_with_commas_and_quotes_are_preserved(tmp_path: Path) -> None:
    log = tmp_path / "gpus.csv"
    name = 'a "b", c; d'
    log_once(log, GpuReading(BOTH.driver, (Gpu(0, name),)))
    assert rows(log)[0]["name"] == name


def test_this_machine_can_be_sampled() -> None:
    host = host_now()
    assert 0 <= host.cpu <= 100
    assert 0 < host.used < host.total


@pytest.mark.parametrize("where", ["read", "host", "sleep"])
def test_ctrl_c_at_any_time_ends_the_display(where: str, terminal: Terminal) -> None:
    def interrupt(*_: float) -> Any:
        raise KeyboardInterrupt

    steps: dict[str, Callable[..., Any]] = {
        "read": lambda: BOTH,
        "host": lambda: HOST,
        "sleep": interrupt,
        where: interrupt,
    }
    watch(1.0, None, steps["read"], terminal, host=steps["host"], sleep=steps["sleep"])
    shown = terminal.getvalue()
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
