"""The resources of this machine, and the part that this process may use. Inspects without judging."""

import fcntl
import mmap
import os
import platform
import resource
import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil

from lockstep.system.cgroups import cpu_quota, processes_left, read
from lockstep.system.clock import Clock, SystemClock
from lockstep.system.memory import cgroup_rooms
from lockstep.system.process_limits import processes_of_user_left
from lockstep.system.processor import instruction_set, processor_features

_PROBE = 2**24
"""Bytes of shared memory to allocate and free as a test."""
_LEAST_PROBE = mmap.PAGESIZE
_PROBE_DIVISOR = 8
_READINGS = 5000


@dataclass(frozen=True)
class SystemPaths:
    """The paths that `inspect_machine` inspects.

    Attributes:
        proc: the mount point of procfs.
        cgroups: where the cgroup file systems are mounted.
        shm: the folder of files in shared memory.
        clock_source: the file that names the clock source.
        folder: the current folder of jobs.
        installed: files written by the installation of Lockstep and its dependencies.
    """

    proc: Path = Path("/proc")
    cgroups: Path = Path("/sys/fs/cgroup")
    shm: Path = Path("/dev/shm")
    clock_source: Path = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    folder: Path = Path()
    installed: tuple[Path, ...] = (Path(__file__), Path(psutil.__file__), Path(sys.executable))


HERE = SystemPaths()
_CLOCK = SystemClock()


@dataclass(frozen=True)
class System:
    """The operating system.

    Attributes:
        name: such as "Linux".
        processor: such as "x86_64".
        kernel: its version.
        unwatched: why pidfds do not work; empty if they do.
    """

    name: str
    processor: str
    kernel: str
    unwatched: str


@dataclass(frozen=True)
class Cores:
    """The cores.

    Attributes:
        all: the number of cores of the machine.
        usable: the number of cores on which this process may run.
        quota: the CPU quota of its cgroups in cores; None for no limit.
        load: the number of threads of the machine that compute, averaged over the last minute.
    """

    all: int
    usable: int
    quota: float | None
    load: float = 0.0


@dataclass(frozen=True)
class HostMemory:
    """The memory, in bytes.

    Attributes:
        total: of the machine.
        available: free memory of the machine.
        room: memory left under the limits of the cgroups; None without limits.
    """

    total: int
    available: int
    room: int | None

    @property
    def usable(self) -> int:
        """The memory that this process can still allocate."""
        return max(0, self.available if self.room is None else min(self.available, self.room))


@dataclass(frozen=True)
class SharedMemoryTest:
    """The result of a test of shared memory.

    Attributes:
        probed: bytes of the test allocation.
        fault: why the allocation failed; empty if it succeeded.
        files_fault: why no file can be created in shared memory; empty if files can be created.
        files: bytes left for such files; None for no limit.
    """

    probed: int
    fault: str
    files_fault: str
    files: int | None


@dataclass(frozen=True)
class UserLimits:
    """Limits; None for no limit.

    Attributes:
        files: the number of files that a process may open.
        most_files: the highest value to which a process may raise that limit.
        user_left: the number of processes and threads that this user may still start.
        group_left: the same for the cgroups of this process.
    """

    files: int | None
    most_files: int | None
    user_left: int | None
    group_left: int | None


@dataclass(frozen=True)
class Disk:
    """The disk for the files of runs.

    Attributes:
        has_runs: whether a file or folder named "runs" exists.
        fault: why nothing can be written; empty if it can.
        free: bytes; None if unknown.
    """

    has_runs: bool
    fault: str
    free: int | None


@dataclass(frozen=True)
class Clocks:
    """The clocks.

    Attributes:
        source: the clock source of the kernel; empty if unknown.
        cost: seconds that a reading takes.
        back: seconds by which the monotonic clock went back; 0 if it never did.
        wall: seconds since 1970.
        installed: the modification time of the newest file of the installation; 0 if there is none.
    """

    source: str
    cost: float
    back: float
    wall: float
    installed: float


@dataclass(frozen=True)
class Machine:
    """The result of `inspect_machine`; `instructions` is the largest instruction set, empty if unknown."""

    system: System
    instructions: str
    cores: Cores
    memory: HostMemory
    shared: SharedMemoryTest
    limits: UserLimits
    disk: Disk
    clocks: Clocks


def inspect_system() -> System:
    """Inspect an operating system of any kind."""
    return System(platform.system(), platform.machine(), platform.release(), _unwatched())


def inspect_machine(system: System, places: SystemPaths = HERE, clock: Clock = _CLOCK) -> Machine:
    """Inspect a machine that runs Linux."""
    membership = places.proc / "self" / "cgroup"
    memory = _memory(membership, places.cgroups)
    return Machine(
        system,
        instruction_set(processor_features(places.proc / "cpuinfo")),
        inspect_cores(places),
        memory,
        _shared(places.shm, memory.usable),
        _limits(places.proc, processes_left(membership, places.cgroups)),
        _disk(places.folder),
        _clocks(places, clock),
    )


def inspect_cores(places: SystemPaths = HERE) -> Cores:
    """Inspect the cores of a machine that runs Linux."""
    quota = cpu_quota(places.proc / "self" / "cgroup", places.cgroups)
    return Cores(os.cpu_count() or 1, len(os.sched_getaffinity(0)), quota, _load(places.proc / "loadavg"))


def _load(file: Path) -> float:
    try:
        return float(file.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        # A sandbox may hide it.
        return 0.0


def _unwatched() -> str:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        return str(getattr(error, "strerror", None) or error)
    return ""


def _memory(membership: Path, mount: Path) -> HostMemory:
    machine = psutil.virtual_memory()
    # Version 1 of cgroups represents "no limit" by a very large number.
    rooms = [room for room in cgroup_rooms(membership, mount) if room < machine.total]
    return HostMemory(int(machine.total), int(machine.available), min(rooms, default=None))


def _shared(shm: Path, usable: int) -> SharedMemoryTest:
    # A process that takes the last memory of a cgroup may be killed.
    size = max(_LEAST_PROBE, min(_PROBE, usable // _PROBE_DIVISOR))
    files_fault, files = _files_in_memory(shm)
    return SharedMemoryTest(size, _sharing_error(size), files_fault, files)


def _sharing_error(size: int) -> str:
    """Allocate memory as the exchange between workers does, free it, and return the error, if any."""
    try:
        descriptor = os.memfd_create("lockstep-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return f"memfd_create: {error.strerror}"
    try:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        os.posix_fallocate(descriptor, 0, size)
        mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE).close()
    except OSError as error:
        return error.strerror or str(error)
    finally:
        os.close(descriptor)
    return ""


def _files_in_memory(shm: Path) -> tuple[str, int | None]:
    try:
        found = os.statvfs(shm)
    except OSError as error:
        return error.strerror or str(error), None
    if not os.access(shm, os.W_OK | os.X_OK):
        return "no file can be created there", None
    return "", found.f_bavail * found.f_frsize if found.f_blocks else None


def _limits(proc: Path, group_left: int | None) -> UserLimits:
    files, most_files = map(_number, resource.getrlimit(resource.RLIMIT_NOFILE))
    return UserLimits(files, most_files, processes_of_user_left(proc), group_left)


def _number(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def _disk(folder: Path) -> Disk:
    runs = folder / "runs"
    has_runs = os.path.lexists(runs)
    place = runs if has_runs else folder
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"lockstep")
            file.flush()
        found = os.statvfs(place)
    except OSError as error:
        return Disk(has_runs, error.strerror or str(error), None)
    return Disk(has_runs, "", found.f_bavail * found.f_frsize if found.f_blocks else None)


def _clocks(places: SystemPaths, clock: Clock) -> Clocks:
    readings = [clock.now() for _ in range(_READINGS)]
    return Clocks(
        source=read(places.clock_source).strip(),
        cost=(readings[-1] - readings[0]) / (_READINGS - 1),
        back=max(0.0, *(before - after for before, after in pairwise(readings))),
        wall=clock.wall(),
        installed=max(map(_modified, places.installed), default=0.0),
    )


def _modified(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
