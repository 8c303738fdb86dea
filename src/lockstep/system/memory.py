"""How much memory this process may still allocate, to check before it does."""

from pathlib import Path
from typing import Protocol

from lockstep.system.cgroups import groups, read

_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""For versions 2 and 1: the files of the limit and the usage, and the reclaimable part in `memory.stat`."""


class Available(Protocol):
    """Returns how much memory may be allocated."""

    def __call__(self) -> int:
        """Return the number of bytes."""


def available_memory() -> int:
    """Return the bytes that this process can allocate, by the machine's memory and all cgroup limits."""
    # Imported late, because the agent, which never calls this, starts faster without it.
    import psutil

    machine = int(psutil.virtual_memory().available)
    return max(0, min([machine, *cgroup_rooms(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))]))


def memory_kills(statistics: Path = Path("/proc/vmstat")) -> int:
    """Return how many processes the kernel has killed for lack of memory since the machine started.

    This includes those that exceeded only the limit of a cgroup. 0 if the kernel does not report it.
    """
    return _statistic(statistics, "oom_kill")


def cgroup_rooms(membership: Path, mount: Path) -> list[int]:
    """Return the bytes left under each memory limit of this process's cgroups (versions 1 and 2).

    Args:
        membership: the file that names the cgroups, like `/proc/self/cgroup`.
        mount: where the cgroup file systems are mounted.
    """
    rooms = []
    for group in groups(membership, mount, "memory"):
        for limit, usage, cache in _FILES:
            most, used = read(group / limit).strip(), read(group / usage).strip()
            if most.isdigit() and used.isdigit():
                rooms.append(int(most) - int(used) + _statistic(group / "memory.stat", cache))
    return rooms


def _statistic(file: Path, name: str) -> int:
    for line in read(file).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
