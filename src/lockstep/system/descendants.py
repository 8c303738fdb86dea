"""The descendants of this process, direct or not."""

import contextlib
import os
import time
from collections.abc import Set
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import psutil

_LOOK_EVERY = 0.01
_PATIENCE = 5.0
"""Seconds of killing after which a process counts as one that does not end."""


class Descendants(Protocol):
    """Every process that this process or a descendant started."""

    def reap(self, owned: frozenset[int]) -> None:
        """Reap adopted processes that have ended, except `owned` ones, which their owners reap."""

    def end(self, grace: float) -> tuple[int, ...]:
        """Give all of them `grace` seconds to end, then kill them until none are left.

        Returns:
            Ids of processes that even SIGKILL did not end.
        """


class LinuxDescendants:
    """The descendants of a process that adopts orphans, so that none can escape.

    Args:
        spare: process ids of children to ignore, together with their descendants; their owner reaps them,
            and may change the set.
    """

    def __init__(self, spare: Set[int] = frozenset()) -> None:
        self._spare = spare

    def reap(self, owned: frozenset[int]) -> None:
        """Reap ended children up to the first one that has an owner, such as an ignored one."""
        with contextlib.suppress(ChildProcessError):
            while (child := _ended_child()) and child not in owned and child not in self._spare:
                os.waitpid(child, 0)

    def end(self, grace: float) -> tuple[int, ...]:
        """Wait, then kill, until this process has no child left."""
        start = time.monotonic()
        while left := self._living():
            waited = time.monotonic() - start
            if waited > grace + _PATIENCE:
                return tuple(sorted(process.pid for process in left if _lives(process)))
            if waited >= grace:
                _kill(left)
            time.sleep(_LOOK_EVERY)
        return ()

    def _living(self) -> "list[psutil.Process]":
        self.reap(frozenset())
        if not _has_children():
            return []
        # Imported only if a process is left, which is rare.
        import psutil

        spared = {process.pid for pid in self._spare for process in _family(pid)}
        below = psutil.Process().children(recursive=True)
        return [process for process in below if process.pid not in spared]


def children_now() -> frozenset[int]:
    """Return the process ids of this process's children."""
    if not _has_children():
        return frozenset()
    try:
        lists = [file.read_text() for file in Path("/proc/self/task").glob("*/children")]
    except OSError:
        lists = []
    if lists:
        return frozenset(int(pid) for pids in lists for pid in pids.split())
    # The kernel was built without these files. The import takes longer than reading them.
    import psutil

    return frozenset(child.pid for child in psutil.Process().children())


def kill_family(pid: int) -> None:
    """Kill a child of this process and its descendants, and wait for a limited time for their ends."""
    import psutil

    family = _family(pid)
    _kill(family)
    os.waitpid(pid, 0)
    psutil.wait_procs([process for process in family if process.pid != pid], _PATIENCE)


def _has_children() -> bool:
    try:
        _ended_child()
    except ChildProcessError:
        return False
    return True


def _ended_child() -> int | None:
    ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return ended.si_pid if ended else None


def _family(pid: int) -> "list[psutil.Process]":
    import psutil

    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _lives(process: "psutil.Process") -> bool:
    """Whether a process runs; a zombie, which its parent has not reaped, does not."""
    import psutil

    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _kill(processes: "list[psutil.Process]") -> None:
    import psutil

    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.kill()
