"""How much memory this process may still take, so that it asks before it takes."""

from pathlib import Path
from typing import Protocol

import psutil


class Available(Protocol):
    """Says how much memory may be taken."""

    def __call__(self) -> int:
        """Return bytes."""


def available_memory() -> int:
    """Return the bytes that this process can take: what the machine has, within all cgroup limits."""
    machine = int(psutil.virtual_memory().available)
    return max(0, min([machine, *cgroup_rooms(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))]))


def cgroup_rooms(membership: Path, mount: Path) -> list[int]:
    """Return the bytes left under each memory limit of this process's cgroups (versions 1 and 2).

    Args:
        membership: the file that names the cgroups, like `/proc/self/cgroup`.
        mount: where the cgroup file systems are mounted.
    """
    rooms = []
    for line in _read(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            rooms += _rooms(mount, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            rooms += _rooms(mount / "memory", path, *names)
    return rooms


def _rooms(top: Path, path: str, limit: str, usage: str, cache: str) -> list[int]:
    # A limit of any ancestor counts. In a container the path may be one of the host's that is not
    # visible here; the limit is then that of the mount itself.
    group = top / path.lstrip("/")
    groups = [each for each in (group, *group.parents) if each == top or top in each.parents]
    rooms = []
    for each in groups:
        most, used = _read(each / limit).strip(), _read(each / usage).strip()
        if most.isdigit() and used.isdigit():
            rooms.append(int(most) - int(used) + _statistic(each / "memory.stat", cache))
    return rooms


def _statistic(file: Path, name: str) -> int:
    for line in _read(file).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
