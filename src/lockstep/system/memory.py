"""How much memory this process may still take, so that it asks before it takes."""

from pathlib import Path
from typing import Protocol

from lockstep.system.cgroups import groups, read

_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Of versions 2 and 1: the limit, what is used, and what of that the kernel gives back, in `memory.stat`."""


class Available(Protocol):
    """Says how much memory may be taken."""

    def __call__(self) -> int:
        """Return bytes."""


def available_memory() -> int:
    """Return the bytes that this process can take: what the machine has, within all cgroup limits."""
    # Late: the agent, which never asks, starts sooner without it.
    import psutil

    machine = int(psutil.virtual_memory().available)
    return max(0, min([machine, *cgroup_rooms(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))]))


def memory_kills(statistics: Path = Path("/proc/vmstat")) -> int:
    """Return how many processes the kernel has killed for want of memory since the machine started.

    Those that only a cgroup had no memory for are among them. 0 where the kernel does not say.
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
