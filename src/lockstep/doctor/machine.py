"""Whether this machine can run a job: its cores, memory, limits, disk and clocks."""

import fcntl
import mmap
import os
import platform
import resource
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil

from lockstep.doctor.check import Finding, Sources, failure, fine, warning
from lockstep.launcher.backend import BACKENDS
from lockstep.system.cgroups import cpu_quota, processes_left, read
from lockstep.system.memory import cgroup_rooms
from lockstep.system.process_limits import processes_of_user_left
from lockstep.system.processor import instruction_set, limit_of, processor_features
from lockstep.system.prose import count
from lockstep.system.run_folder import RUNS

_PROCESSORS = ("x86_64", "aarch64")
_LEAST_MEMORY, _ENOUGH_MEMORY = 300 * 10**6, 2 * 10**9
_ENOUGH_SHM = 256 * 10**6
_ENOUGH_FILES, _MANY_FILES = 1024, 2**16
_ENOUGH_THREADS = 256
_ENOUGH_DISK = 10**9
_FAST_CLOCKS = ("tsc", "tsc-early", "arch_sys_counter", "kvm-clock", "hyperv_clocksource_tsc_page")
"""Clock sources that a program can read without a system call."""
_TOLERANCE = 600.0
"""Seconds by which the clock of a file server may be ahead."""
_MAX_STEP_BACK = 1e-3
"""Seconds. The clocks of a virtual machine's cores may differ by microseconds, which is harmless."""
_PROBE = 2**24
"""Bytes of shared memory to allocate and free as a test."""
_LEAST_PROBE = mmap.PAGESIZE
_PROBE_DIVISOR = 8
_READINGS = 5000


@dataclass(frozen=True)
class System:
    """The operating system.

    Attributes:
        system: its name, such as "Linux".
        processor: its kind, such as "x86_64".
        kernel: the version of the kernel.
        unwatched: why pidfds do not work; empty if they do.
    """

    system: str
    processor: str
    kernel: str
    unwatched: str


def look_at_system(sources: Sources) -> System:
    """Look at an operating system of any kind."""
    return System(platform.system(), platform.machine(), platform.release(), _pidfd_error())


def _pidfd_error() -> str:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        return str(getattr(error, "strerror", None) or error)
    return ""


def judge_system(system: System) -> Finding:
    """Judge a system of any kind."""
    if system.system != "Linux" or system.processor not in _PROCESSORS:
        return failure(
            f"workers exchange data only on Linux on {' and '.join(_PROCESSORS)}; this is {system.system} on "
            f"{system.processor}",
            "use such a machine, virtual machine or container",
        )
    if system.unwatched:
        return failure(
            f"Lockstep cannot watch workers: pidfd_open fails: {system.unwatched} (kernel {system.kernel})",
            "use Linux 5.3 or newer; a sandbox must allow pidfd_open",
        )
    return fine(f"Linux {system.kernel} on {system.processor}")


def look_at_instructions(sources: Sources) -> str:
    """Return the largest instruction set of the processor, or an empty string if unknown."""
    return instruction_set(processor_features(sources.proc / "cpuinfo"))


def judge_instructions(name: str) -> Finding:
    """Advise how to limit the hosts of a job to this instruction set."""
    reason = "hosts of one job need the same kind of processor"
    if name:
        limits = "; ".join(f"{backend}: {limit_of(backend, name)}" for backend in BACKENDS)
        reason = f"{name}; if another host of a job has a larger set, limit all to it ({limits})"
    return fine(reason, {"instructions": name})


@dataclass(frozen=True)
class Cores:
    """The cores.

    Attributes:
        all: the number of cores of the machine.
        usable: the number of cores on which this process may run.
        quota: the CPU quota of its cgroups in cores; None without a limit.
        load: the number of threads of the machine that compute, averaged over the last minute.
    """

    all: int
    usable: int
    quota: float | None
    load: float = 0.0


def look_at_cores(sources: Sources) -> Cores:
    """Look at the cores of a machine that runs Linux."""
    try:
        load = float((sources.proc / "loadavg").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        # A sandbox may hide it.
        load = 0.0
    quota = cpu_quota(sources.proc / "self" / "cgroup", sources.cgroups)
    return Cores(os.cpu_count() or 1, len(os.sched_getaffinity(0)), quota, load)


def judge_cores(cores: Cores) -> Finding:
    """Judge whether several workers compute faster than one."""
    text = f"{cores.usable} of {cores.all} cores"
    if cores.usable == cores.all:
        text = count(cores.all, "core")
    allowed = cores.usable
    if cores.quota is not None and cores.quota < cores.usable:
        allowed = max(1, int(cores.quota))
        text += f" by affinity, of which the cgroup allows the time of {cores.quota:.3g}"
    if allowed < 2:
        return warning(
            f"{text}: all workers share one core, so two are no faster than one",
            "use more cores (taskset, docker run --cpuset-cpus and --cpus, srun --cpus-per-task)",
        )
    if cores.all - cores.load <= allowed - 1:
        return warning(
            f"{text}: other programs use some of them (load average {cores.load:.3g}), so steps take longer",
            "stop the other programs, or use fewer workers",
        )
    return fine(text)


@dataclass(frozen=True)
class HostMemory:
    """The memory, in bytes.

    Attributes:
        total: all memory of the machine.
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


def look_at_memory(sources: Sources) -> HostMemory:
    """Look at the memory and its limits."""
    memory = psutil.virtual_memory()
    # Version 1 of cgroups represents "no limit" with a very large number.
    rooms = cgroup_rooms(sources.proc / "self" / "cgroup", sources.cgroups)
    room = min((room for room in rooms if room < memory.total), default=None)
    return HostMemory(int(memory.total), int(memory.available), room)


def judge_memory(memory: HostMemory) -> Finding:
    """Judge whether there is memory for some workers."""
    is_limited = memory.room is not None and memory.room < memory.available
    where = "left under the cgroup's limit" if is_limited else "available"
    text = f"{_size(memory.usable)} of {_size(memory.total)} {where}"
    remedy = "stop other programs, or raise the memory limit of the container"
    if memory.usable < _LEAST_MEMORY:
        return failure(f"{text}: too little for a worker and its backend", remedy)
    if memory.usable < _ENOUGH_MEMORY:
        return warning(
            f"{text}: each worker has its own copy of the model, its optimizer and the backend",
            f"use few workers; {remedy}",
        )
    return fine(text)


@dataclass(frozen=True)
class SharedMemoryTest:
    """A test allocation of shared memory.

    Attributes:
        bytes: its size.
        fault: why it failed; empty if it succeeded.
    """

    bytes: int
    fault: str


def look_at_shared_memory(sources: Sources) -> SharedMemoryTest:
    """Allocate shared memory as the exchange between workers does, and free it."""
    # A process that takes the last memory of a cgroup may be killed.
    size = max(_LEAST_PROBE, min(_PROBE, look_at_memory(sources).usable // _PROBE_DIVISOR))
    return SharedMemoryTest(size, _sharing_error(size))


def _sharing_error(size: int) -> str:
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


def judge_shared_memory(test: SharedMemoryTest) -> Finding:
    """Judge whether workers can exchange gradients."""
    if test.fault:
        return failure(
            f"workers cannot exchange gradients: allocating {_size(test.bytes)} fails: {test.fault}",
            "raise the limits on the size of files (ulimit -f) and processes (ulimit -v); a sandbox must "
            "allow memfd_create",
        )
    return fine(f"{_size(test.bytes)} could be allocated; it counts as memory of the workers")


@dataclass(frozen=True)
class Space:
    """A file system in which this process may write.

    Attributes:
        free: the free bytes; None if there is no limit, or if it is unknown.
        fault: why nothing can be written; empty if it can.
        where: the path of the folder.
    """

    free: int | None
    fault: str
    where: str

    @classmethod
    def of(cls, folder: Path, where: str) -> "Space":
        """Return the space that is left in a folder. Raises OSError."""
        status = os.statvfs(folder)
        return cls(status.f_bavail * status.f_frsize if status.f_blocks else None, "", where)


def look_at_shared_files(sources: Sources) -> Space:
    """Look at the folder of files in shared memory."""
    try:
        space = Space.of(sources.shm, "/dev/shm")
    except OSError as error:
        return Space(None, error.strerror or str(error), "/dev/shm")
    if not os.access(sources.shm, os.W_OK | os.X_OK):
        return Space(None, "no file can be created there", "/dev/shm")
    return space


def judge_shared_files(space: Space) -> Finding:
    """Judge whether programs that share files in memory work."""
    remedy = (
        "docker run --shm-size=2g; in Kubernetes, mount an emptyDir with medium: Memory there; or "
        "use DataLoader(num_workers=0)"
    )
    if space.fault:
        return warning(
            f"{space.fault}: Lockstep does not use it, but multiprocessing and the workers of "
            "PyTorch's DataLoader do",
            remedy,
        )
    if space.free is not None and space.free < _ENOUGH_SHM:
        return warning(
            f"{_size(space.free)} are free: Lockstep does not use it, but the workers of PyTorch's "
            "DataLoader share tensors there and fail with a bus error when it is full",
            remedy,
        )
    return fine("no limit" if space.free is None else f"{_size(space.free)} are free")


@dataclass(frozen=True)
class Limits:
    """Limits of this user and this process; None without a limit.

    Attributes:
        soft: the number of files that a process may open.
        hard: the highest value to which a process may raise that limit.
        user_left: the number of processes and threads that this user may still start.
        group_left: the same for the cgroups of this process.
    """

    soft: int | None
    hard: int | None
    user_left: int | None
    group_left: int | None


def look_at_limits(sources: Sources) -> Limits:
    """Look at the limits on open files, processes and threads."""
    soft, hard = (
        None if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    group_left = processes_left(sources.proc / "self" / "cgroup", sources.cgroups)
    return Limits(soft, hard, processes_of_user_left(sources.proc), group_left)


def judge_open_files(limits: Limits) -> Finding:
    """Judge whether a process may open enough files."""
    if limits.soft is None or limits.soft >= _ENOUGH_FILES:
        return fine("no limit" if limits.soft is None else f"{limits.soft:,} per process")
    return warning(
        f"{limits.soft:,} per process: many workers, or an input with many files, need more",
        f"ulimit -n {min(limits.hard or _MANY_FILES, _MANY_FILES)}"
        if limits.hard is None or limits.hard >= _ENOUGH_FILES
        else "raise the hard limit (limits.conf, LimitNOFILE= of systemd, the container's --ulimit nofile=)",
    )


def judge_threads(limits: Limits) -> Finding:
    """Judge whether enough processes and threads may start."""
    left = min((each for each in (limits.user_left, limits.group_left) if each is not None), default=None)
    if left is None:
        return fine("no limit")
    text = f"{left:,} more can start"
    if left >= _ENOUGH_THREADS:
        return fine(text)
    return warning(
        f"{text}: each worker needs several dozen",
        "raise the limit of this user (ulimit -u, limits.conf), or stop other programs of this user"
        if limits.user_left == left
        else "raise the limit of the cgroup (the container's --pids-limit, TasksMax= of systemd)",
    )


def look_at_disk(sources: Sources) -> Space:
    """Write a file where runs keep theirs, and remove it."""
    folder, where = sources.folder, "the current folder"
    if os.path.lexists(folder / RUNS):
        folder, where = folder / RUNS, "runs/ in the current folder"
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"lockstep")
            file.flush()
        return Space.of(folder, where)
    except OSError as error:
        return Space(None, error.strerror or str(error), where)


def judge_disk(space: Space) -> Finding:
    """Judge whether runs can keep their files."""
    if space.fault:
        return failure(
            f"cannot write to {space.where}, where a run keeps its logs: {space.fault}",
            "start jobs in a folder that you own, or give lockstep run --run-dir",
        )
    if space.free is None:
        return fine(f"{space.where} is writable")
    if space.free < _ENOUGH_DISK:
        return warning(
            f"{_size(space.free)} are free in {space.where}, where a run keeps its logs",
            "free space, or give lockstep run --run-dir; checkpoints go to --checkpoint",
        )
    return fine(f"{_size(space.free)} are free in {space.where}")


@dataclass(frozen=True)
class Clocks:
    """The clocks.

    Attributes:
        source: the clock source of the kernel; empty if unknown.
        seconds_a_reading: the time that a reading takes.
        seconds_back: the time by which the monotonic clock went back; 0 if it never did.
        now: seconds since 1970.
        installed: the modification time of the newest file of the installation; 0 if there is none.
    """

    source: str
    seconds_a_reading: float
    seconds_back: float
    now: float
    installed: float


def look_at_clocks(sources: Sources) -> Clocks:
    """Read the clocks many times."""
    readings = [sources.clock.now() for _ in range(_READINGS)]
    return Clocks(
        source=read(sources.clock_source).strip(),
        seconds_a_reading=(readings[-1] - readings[0]) / (_READINGS - 1),
        seconds_back=max(0.0, *(before - after for before, after in pairwise(readings))),
        now=sources.clock.wall(),
        installed=max(map(_modified, sources.dated_files), default=0.0),
    )


def _modified(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def judge_monotonic_clock(clocks: Clocks) -> Finding:
    """Judge whether timeouts are correct, and waiting is cheap."""
    text = f"{clocks.source or 'of an unknown source'}, {clocks.seconds_a_reading * 1e9:,.0f} ns per reading"
    if clocks.seconds_back > _MAX_STEP_BACK:
        return warning(
            f"{text}: it went back by {clocks.seconds_back:.3g} s; all timeouts depend on it",
            "select another clock source (the kernel's log names the unstable ones)",
        )
    if clocks.source and clocks.source not in _FAST_CLOCKS:
        return warning(
            f"{text}: each reading is a system call, and waiting workers read the clock continuously",
            f"select the clock source {_FAST_CLOCKS[0]} or that of the hypervisor, unless the kernel's log "
            "calls it unstable",
        )
    return fine(text)


def judge_wall_clock(clocks: Clocks) -> Finding:
    """Judge whether the date can be right."""
    if clocks.now < clocks.installed - _TOLERANCE:
        return warning(
            f"it shows {_date(clocks.now)}, but installed files date from {_date(clocks.installed)}: names "
            "of runs and times in logs will be wrong, and downloads may fail",
            "set the clock (timedatectl set-ntp true)",
        )
    return fine(_date(clocks.now))


def _size(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 10**9 else f"{size / 1e6:,.0f} MB"


def _date(wall: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(wall))
