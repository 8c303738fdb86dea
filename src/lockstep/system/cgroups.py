"""The limits of this process's control groups (versions 1 and 2), ancestors included."""

from collections.abc import Iterable, Iterator
from pathlib import Path

_THROTTLED = {"throttled_usec": 1e-6, "throttled_time": 1e-9}
"""The names in `cpu.stat` of versions 2 and 1, and their units in seconds."""


def cpu_quota(membership: Path, mount: Path) -> float | None:
    """Return the CPU quota of this process in cores, or None if no group limits it.

    Args:
        membership: the file that names the groups, like `/proc/self/cgroup`.
        mount: the folder in which the cgroup file systems are mounted.
    """
    shares = []
    for group in groups(membership, mount, "cpu"):
        of_version_1 = [read(group / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
        numbers = (read(group / "cpu.max") or " ".join(of_version_1)).split()
        if len(numbers) == 2 and all(number.isdigit() for number in numbers):
            shares.append(int(numbers[0]) / int(numbers[1]))
    return min(shares, default=None)


def processes_left(membership: Path, mount: Path) -> int | None:
    """Return the number of processes and threads that may still be started, or None without a limit.

    Args:
        membership: the file that names the groups, like `/proc/self/cgroup`.
        mount: where the cgroup file systems are mounted.
    """
    left = []
    for group in groups(membership, mount, "pids"):
        most, now = read(group / "pids.max").strip(), read(group / "pids.current").strip()
        if most.isdigit() and now.isdigit():
            left.append(max(0, int(most) - int(now)))
    return min(left, default=None)


def throttled_seconds(statistics: Iterable[Path]) -> float:
    """Return the seconds for which a CPU quota has stopped processes, summed over cores.

    Args:
        statistics: the files `cpu.stat` of a group and its ancestors, of which the largest number counts.
    """
    seconds = [0.0]
    for file in statistics:
        for line in read(file).splitlines():
            name, _, value = line.partition(" ")
            if name in _THROTTLED and value.isdigit():
                seconds.append(int(value) * _THROTTLED[name])
    return max(seconds)


def read(file: Path) -> str:
    """Return the contents of a file, or an empty string if it cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""


def groups(membership: Path, mount: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's groups for a controller, ancestors included.

    Args:
        membership: the file that names the groups, like `/proc/self/cgroup`.
        mount: where the cgroup file systems are mounted.
        controller: the controller, such as "memory".
    """
    for line in read(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            tops = [mount]
        elif controller in controllers.split(","):
            # Controllers that share a mount usually have a link each, but not on all systems.
            tops = [mount / controller, mount / controllers]
        else:
            continue
        for top in tops:
            # In a container, the path may be a path of the host that is not visible here; the limit is then
            # that of the mount itself.
            group = top / path.lstrip("/")
            yield from (each for each in (group, *group.parents) if each == top or top in each.parents)
