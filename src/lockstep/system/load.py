"""The load of this host and of its processes, from counters of the kernel.

Reading takes about 10 microseconds per thread of a process, and never waits.
"""

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

from lockstep.system.cgroups import groups, read, throttled_seconds
from lockstep.system.clock import Clock
from lockstep.system.memory import limited_groups, memory_in_use, read_numbers

_MOST_BYTES = 4096
_TICK = 1 / os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_NANO = 1e-9
_BUSY = (0, 1, 2, 5, 6)
"""The columns of the first line of /proc/stat in which a core works: for users, and in the kernel."""
PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
"""Where the kernel's data on processes, and the cgroup file systems, are mounted."""


class ProcessCounters(NamedTuple):
    """The resources that a process has used so far.

    Attributes:
        cpu: seconds of processor time.
        delays: seconds for which each of its threads was ready to run and had no core; empty if the kernel
            does not report them.
        memory: its resident memory, in bytes.
        faults: number of page faults that read from the disk.
    """

    cpu: float
    delays: dict[int, float]
    memory: int
    faults: int


def process_counters(pid: int, proc: Path) -> ProcessCounters | None:
    """Read the counters of a process, or None if it has ended, or this user may not read them."""
    folder = f"{proc}/{pid}"
    try:
        # The name in parentheses may contain anything.
        fields = _bytes(f"{folder}/stat").rpartition(b")")[2].split()
        cpu, memory = (int(fields[11]) + int(fields[12])) * _TICK, int(fields[21]) * _PAGE
        faults = int(fields[9])
    except (OSError, IndexError, ValueError):
        return None
    if not memory:
        # It has released everything, and is about to end.
        return None
    return ProcessCounters(cpu, _delays(f"{folder}/task"), memory, faults)


def _delays(tasks: str) -> dict[int, float]:
    delays = {}
    # A process may end meanwhile; the kernel may not keep these counters.
    with contextlib.suppress(OSError):
        for thread in os.listdir(tasks):  # noqa: PTH208 - paths would cost ten times as much
            with contextlib.suppress(OSError, IndexError, ValueError):
                delays[int(thread)] = int(_bytes(f"{tasks}/{thread}/schedstat").split()[1]) * _NANO
    return delays


def _bytes(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, _MOST_BYTES)
    finally:
        os.close(descriptor)


class HostLoad(NamedTuple):
    """The resources that all processes of the host use.

    Attributes:
        busy: cores in use, on average between two samples.
        memory_used: bytes in use, on the host or in the container with the least memory left.
        memory_total: all bytes of that host or container.
        swapping: bytes per second read from and written to swap.
        throttled: seconds per second in which a CPU quota has stopped processes.
    """

    busy: float
    memory_used: int
    memory_total: int
    swapping: float
    throttled: float


class HostSampler:
    """Samples the load of this host.

    Args:
        clock: measures the time between two samples.
        proc: the folder in which the kernel's data on processes are mounted.
        cgroups: the folder in which the cgroup file systems are mounted.
    """

    def __init__(self, clock: Clock, proc: Path = PROC, cgroups: Path = CGROUPS) -> None:
        self._clock, self._proc = clock, proc
        membership = proc / "self" / "cgroup"
        self._limited = limited_groups(proc / "meminfo", membership, cgroups)
        files = dict.fromkeys(group / "cpu.stat" for group in groups(membership, cgroups, "cpu"))
        self._statistics = [file for file in files if file.exists()]
        self._before, self._read_at = self._counters(), clock.now()

    def sample(self) -> HostLoad:
        """Return the load since the last sample, or since this was created."""
        before, memory = self._before, memory_in_use(self._proc / "meminfo", self._limited)
        now, read_at = self._counters(), self._clock.now()
        seconds = max(read_at - self._read_at, _TICK)
        self._before, self._read_at = now, read_at
        changes = zip(before, now, strict=True)
        busy, swapped, throttled = (max(0.0, end - begin) / seconds for begin, end in changes)
        return HostLoad(round(busy, 3), *memory, swapping=round(swapped, 1), throttled=round(throttled, 3))

    def _counters(self) -> tuple[float, int, float]:
        """Return processor seconds, bytes read from and written to swap, and throttled seconds so far.

        Counters that the kernel does not report are 0.
        """
        columns = read(self._proc / "stat").partition("\n")[0].split()[1:]
        busy = sum(int(columns[at]) for at in _BUSY if at < len(columns)) * _TICK
        vmstat = read_numbers(self._proc / "vmstat")
        pages = vmstat.get("pswpin", 0) + vmstat.get("pswpout", 0)
        return busy, pages * _PAGE, throttled_seconds(self._statistics)
