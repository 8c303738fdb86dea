"""Whether this machine can run a job: cores, memory, limits, disk and clocks."""

import time

from lockstep.doctor.finding import Finding, Section
from lockstep.doctor.resources import (
    HERE,
    Clocks,
    Cores,
    Disk,
    HostMemory,
    Machine,
    SharedMemoryTest,
    System,
    SystemPaths,
    UserLimits,
    inspect_machine,
    inspect_system,
)
from lockstep.launcher.backend import BACKENDS
from lockstep.system.clock import Clock, SystemClock
from lockstep.system.processor import limit_of
from lockstep.system.prose import count

_ROWS = Section("machine")

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
_CLOCK = SystemClock()


def examine_machine(places: SystemPaths = HERE, clock: Clock = _CLOCK) -> list[Finding]:
    """Return the findings on this machine; if it does not run Linux, only that finding.

    Args:
        places: the paths to inspect.
        clock: the clock to inspect.
    """
    system = inspect_system()
    return judge(inspect_machine(system, places, clock)) if system.name == "Linux" else [judge_system(system)]


def judge(machine: Machine) -> list[Finding]:
    """Return the findings on a machine. Pure."""
    return [
        judge_system(machine.system),
        _instructions(machine.instructions),
        judge_cores(machine.cores),
        _memory(machine.memory),
        _shared_memory(machine.shared),
        _files_in_memory(machine.shared),
        _open_files(machine.limits),
        _threads(machine.limits),
        _disk(machine.disk),
        _monotonic_clock(machine.clocks),
        _wall_clock(machine.clocks),
    ]


def judge_system(system: System) -> Finding:
    """Return the finding on a system of any kind. Pure."""
    facts = {"system": system.name, "processor": system.processor, "kernel": system.kernel}
    if system.name != "Linux" or system.processor not in _PROCESSORS:
        return _ROWS.failure(
            "system",
            f"workers exchange data only on Linux on {' and '.join(_PROCESSORS)}; this is {system.name} on "
            f"{system.processor}",
            "use such a machine, virtual machine or container",
            **facts,
        )
    if system.unwatched:
        return _ROWS.failure(
            "system",
            f"Lockstep cannot watch workers: pidfd_open fails: {system.unwatched} (kernel {system.kernel})",
            "use Linux 5.3 or newer; a sandbox must allow pidfd_open",
            **facts,
        )
    return _ROWS.fine("system", f"Linux {system.kernel} on {system.processor}", **facts)


def _instructions(name: str) -> Finding:
    if not name:
        return _ROWS.fine("instructions", "hosts of one job need processors of one kind", instructions=name)
    limits = "; ".join(f"{backend}: {limit_of(backend, name)}" for backend in BACKENDS)
    return _ROWS.fine(
        "instructions",
        f"{name}; if another host of a job has a larger set, limit all to it ({limits})",
        instructions=name,
    )


def judge_cores(cores: Cores) -> Finding:
    """Return the finding on the cores of a machine. Pure."""
    facts = {"all": cores.all, "usable": cores.usable, "quota": cores.quota, "load": cores.load}
    shown = f"{cores.usable} of {cores.all} cores"
    if cores.usable == cores.all:
        shown = count(cores.all, "core")
    counted = cores.usable
    if cores.quota is not None and cores.quota < cores.usable:
        counted = max(1, int(cores.quota))
        shown += f" by affinity, of which the cgroup allows the time of {cores.quota:.3g}"
    if counted < 2:
        return _ROWS.warning(
            "cores",
            f"{shown}: all workers share one core, so two are no faster than one",
            "use more cores (taskset, docker run --cpuset-cpus and --cpus, srun --cpus-per-task)",
            **facts,
        )
    if cores.all - cores.load <= counted - 1:
        return _ROWS.warning(
            "cores",
            f"{shown}: other programs use some of them (load average {cores.load:.3g}), so steps take longer",
            "stop the other programs, or use fewer workers",
            **facts,
        )
    return _ROWS.fine("cores", shown, **facts)


def _memory(memory: HostMemory) -> Finding:
    facts = {"total": memory.total, "available": memory.available, "room": memory.room}
    limited = memory.room is not None and memory.room < memory.available
    where = "left under the cgroup's limit" if limited else "available"
    shown = f"{_size(memory.usable)} of {_size(memory.total)} {where}"
    remedy = "stop other programs, or raise the memory limit of the container"
    if memory.usable < _LEAST_MEMORY:
        return _ROWS.failure("memory", f"{shown}: too little for a worker and its backend", remedy, **facts)
    if memory.usable < _ENOUGH_MEMORY:
        return _ROWS.warning(
            "memory",
            f"{shown}: each worker has its own copy of the model, its optimizer and the backend",
            f"use few workers; {remedy}",
            **facts,
        )
    return _ROWS.fine("memory", shown, **facts)


def _shared_memory(shared: SharedMemoryTest) -> Finding:
    facts = {"bytes": shared.probed, "fault": shared.fault}
    if shared.fault:
        return _ROWS.failure(
            "shared memory",
            f"workers cannot exchange gradients: allocating {_size(shared.probed)} fails: {shared.fault}",
            "raise the limits on the size of files (ulimit -f) and processes (ulimit -v); a sandbox must "
            "allow memfd_create",
            **facts,
        )
    return _ROWS.fine(
        "shared memory",
        f"{_size(shared.probed)} could be allocated; it counts as memory of the workers",
        **facts,
    )


def _files_in_memory(shared: SharedMemoryTest) -> Finding:
    facts = {"free": shared.files, "fault": shared.files_fault}
    remedy = (
        "docker run --shm-size=2g; in Kubernetes, mount an emptyDir with medium: Memory there; or "
        "use DataLoader(num_workers=0)"
    )
    if shared.files_fault:
        return _ROWS.warning(
            "/dev/shm",
            f"{shared.files_fault}: Lockstep does not use it, but multiprocessing and the workers of "
            "PyTorch's DataLoader do",
            remedy,
            **facts,
        )
    if shared.files is not None and shared.files < _ENOUGH_SHM:
        return _ROWS.warning(
            "/dev/shm",
            f"{_size(shared.files)} are free: Lockstep does not use it, but the workers of PyTorch's "
            "DataLoader share tensors there and fail with a bus error when it is full",
            remedy,
            **facts,
        )
    shown = "no limit" if shared.files is None else f"{_size(shared.files)} are free"
    return _ROWS.fine("/dev/shm", shown, **facts)


def _open_files(limits: UserLimits) -> Finding:
    facts = {"soft": limits.files, "hard": limits.most_files}
    if limits.files is None or limits.files >= _ENOUGH_FILES:
        shown = "no limit" if limits.files is None else f"{limits.files:,} per process"
        return _ROWS.fine("open files", shown, **facts)
    raised = limits.most_files is None or limits.most_files >= _ENOUGH_FILES
    return _ROWS.warning(
        "open files",
        f"{limits.files:,} per process: many workers, or an input with many files, need more",
        f"ulimit -n {min(limits.most_files or _MANY_FILES, _MANY_FILES)}"
        if raised
        else "raise the hard limit (limits.conf, LimitNOFILE= of systemd, the container's --ulimit nofile=)",
        **facts,
    )


def _threads(limits: UserLimits) -> Finding:
    facts = {"user_left": limits.user_left, "group_left": limits.group_left}
    left = [each for each in (limits.user_left, limits.group_left) if each is not None]
    if not left:
        return _ROWS.fine("processes and threads", "no limit", **facts)
    shown = f"{min(left):,} more can start"
    if min(left) >= _ENOUGH_THREADS:
        return _ROWS.fine("processes and threads", shown, **facts)
    by_user = limits.user_left == min(left)
    return _ROWS.warning(
        "processes and threads",
        f"{shown}: each worker needs several dozen",
        "raise the limit of this user (ulimit -u, limits.conf), or stop other programs of this user"
        if by_user
        else "raise the limit of the cgroup (the container's --pids-limit, TasksMax= of systemd)",
        **facts,
    )


def _disk(disk: Disk) -> Finding:
    facts = {"free": disk.free, "fault": disk.fault}
    where = "runs/ in the current folder" if disk.has_runs else "the current folder"
    if disk.fault:
        return _ROWS.failure(
            "disk",
            f"cannot write to {where}, where a run keeps its logs: {disk.fault}",
            "start jobs in a folder that you own, or give lockstep run --run-dir",
            **facts,
        )
    if disk.free is None:
        return _ROWS.fine("disk", f"{where} is writable", **facts)
    if disk.free < _ENOUGH_DISK:
        return _ROWS.warning(
            "disk",
            f"{_size(disk.free)} are free in {where}, where a run keeps its logs",
            "free space, or give lockstep run --run-dir; checkpoints go to --checkpoint",
            **facts,
        )
    return _ROWS.fine("disk", f"{_size(disk.free)} are free in {where}", **facts)


def _monotonic_clock(clocks: Clocks) -> Finding:
    facts = {"source": clocks.source, "seconds_a_reading": clocks.cost, "seconds_back": clocks.back}
    shown = f"{clocks.source or 'of an unknown source'}, {clocks.cost * 1e9:,.0f} ns per reading"
    if clocks.back > _MAX_STEP_BACK:
        return _ROWS.warning(
            "monotonic clock",
            f"{shown}: it went back by {clocks.back:.3g} s; all timeouts depend on it",
            "select another clock source (the kernel's log names the unstable ones)",
            **facts,
        )
    if clocks.source and clocks.source not in _FAST_CLOCKS:
        return _ROWS.warning(
            "monotonic clock",
            f"{shown}: each reading is a system call, and waiting workers read the clock continuously",
            f"select the clock source {_FAST_CLOCKS[0]} or that of the hypervisor, unless the kernel's log "
            "calls it unstable",
            **facts,
        )
    return _ROWS.fine("monotonic clock", shown, **facts)


def _wall_clock(clocks: Clocks) -> Finding:
    facts = {"now": clocks.wall, "installed": clocks.installed}
    if clocks.wall < clocks.installed - _TOLERANCE:
        return _ROWS.warning(
            "wall clock",
            f"it shows {_date(clocks.wall)}, but installed files date from {_date(clocks.installed)}: names "
            "of runs and times in logs will be wrong, and downloads may fail",
            "set the clock (timedatectl set-ntp true)",
            **facts,
        )
    return _ROWS.fine("wall clock", _date(clocks.wall), **facts)


def _size(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 10**9 else f"{size / 1e6:,.0f} MB"


def _date(wall: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(wall))
