"""The memory that this process may still allocate, and the memory that it returns."""

import ctypes
from collections.abc import Callable, Iterable
from pathlib import Path

from lockstep.system.cgroups import groups, read

_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""For versions 2 and 1: the files of the limit and the usage, and the reclaimable part in `memory.stat`."""


Available = Callable[[], int]
"""Returns how many bytes of memory may be allocated."""


def available_memory() -> int:
    """Return the bytes that this process can allocate, by the machine's memory and all cgroup limits."""
    # Imported late, because the agent, which never calls this, starts faster without it.
    import psutil

    machine = int(psutil.virtual_memory().available)
    return max(0, min([machine, *cgroup_rooms(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))]))


def memory_kills(
    membership: Path = Path("/proc/self/cgroup"),
    mount: Path = Path("/sys/fs/cgroup"),
    statistics: Path = Path("/proc/vmstat"),
) -> int:
    """Return the number of processes that the kernel has killed for lack of memory so far.

    The processes of this process's cgroup count, whichever limit they exceeded; in a container, those of the
    first visible ancestor. If no cgroup has such a number, like the root, the machine's processes count. 0 if
    the kernel reports neither.

    Args:
        membership: the file that names the cgroups.
        mount: where the cgroup file systems are mounted.
        statistics: the numbers of the machine.
    """
    names = "memory.events", "memory.oom_control"
    files = [group / name for group in groups(membership, mount, "memory") for name in names]
    counted = (read_numbers(file).get("oom_kill") for file in (*files, statistics))
    return next((number for number in counted if number is not None), 0)


def memory_in_use(meminfo: Path, limited: Iterable[Path]) -> tuple[int, int]:
    """Return the bytes in use, and the limit, of the machine or of the cgroup with the fewest bytes left.

    (0, 0) if the kernel reports neither.

    Args:
        meminfo: the file of the machine's memory, like `/proc/meminfo`.
        limited: the folders of cgroups with a limit.
    """
    numbers = read_numbers(meminfo)
    total, available = (numbers.get(name, 0) * 1024 for name in ("MemTotal:", "MemAvailable:"))
    machine = [(total - available, total)] if total else []
    uses = (use for group in limited for use in _uses(group))
    return min((*machine, *uses), key=lambda use: use[1] - use[0], default=(0, 0))


def limited_groups(meminfo: Path, membership: Path, mount: Path) -> list[Path]:
    """Return the folders of this process's cgroups whose limit is less than the machine's memory.

    The arguments are those of `memory_in_use` and `cgroup_rooms`.
    """
    total = read_numbers(meminfo).get("MemTotal:", 0) * 1024
    folders = dict.fromkeys(groups(membership, mount, "memory"))
    return [group for group in folders if any(most < total for _, most in _uses(group))]


def cgroup_rooms(membership: Path, mount: Path) -> list[int]:
    """Return the bytes left under each memory limit of this process's cgroups (versions 1 and 2).

    Args:
        membership: the file that names the cgroups, like `/proc/self/cgroup`.
        mount: where the cgroup file systems are mounted.
    """
    folders = groups(membership, mount, "memory")
    return [most - used for group in folders for used, most in _uses(group)]


def _uses(group: Path) -> list[tuple[int, int]]:
    """Return the bytes that a cgroup uses, without reclaimable ones, and its limit, if it has one."""
    uses = []
    for limit, usage, cache in _FILES:
        most, used = read(group / limit).strip(), read(group / usage).strip()
        if most.isdigit() and used.isdigit():
            uses.append((int(used) - read_numbers(group / "memory.stat").get(cache, 0), int(most)))
    return uses


def read_numbers(file: Path) -> dict[str, int]:
    """Return the numbers in a file with a name and a number per line, if the file can be read."""
    lines = (line.split() for line in read(file).splitlines())
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}


def return_freed_memory() -> None:
    """Return memory that this process has freed to the kernel, if its C library is glibc."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
