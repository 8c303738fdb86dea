"""Kills processes that write checkpoints, then checks what they leave.

    python checkpoint_kills.py FOLDER calls     SIGKILL before each system call of a write
    python checkpoint_kills.py FOLDER room      the same on a disk with space for two checkpoints
    python checkpoint_kills.py FOLDER bytes     SIGKILL after some bytes of the file of the arrays
    python checkpoint_kills.py FOLDER anywhere  SIGKILL from another process while a large one is written
    python checkpoint_kills.py FOLDER end       SIGKILL before each system call that marks a job as finished

Prints how many processes were killed. This program has no threads, so it can fork.
"""

import itertools
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoint_faults import Countdown, limit_space
from checkpoint_samples import is_sample, leftovers, sample, steps

import lockstep.checkpoint.checkpoint_files
from lockstep.checkpoint.checkpoint_files import Contents
from lockstep.checkpoint.store import Store

LARGE = 5_000_000
PATIENCE = 300.0


def fork(act: Callable[[], Any]) -> int:
    """Run `act` in a new process, and return its id."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            act()
            status = 0
        finally:
            os._exit(status)
    return child


def killed(child: int) -> bool:
    """Wait for the process; return whether it was killed."""
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), status
    return status != 0


def kill_me() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def check(folder: Path, step: int, *others: list[int]) -> None:
    """Check what a write of `step` to a folder with the steps 2 and 3 has left; `others` are allowed too."""
    assert steps(folder) in ([[2, 3], [2, 3, 4], [3, 4], *others] if step == 4 else [[2, 3]])
    found = Store(folder).newest(print)
    contents = found[1] if found else None
    assert contents is not None
    assert is_sample(contents)
    # The next writer cleans up and writes.
    Store(folder, keep=2).write(sample(9))
    assert steps(folder)[-1] == 9
    assert leftovers(folder) == []


def copies(folder: Path) -> "itertools.starmap[Path]":
    """Yield folders with checkpoints of the steps 2 and 3."""
    store = Store(folder / "first", keep=2)
    for step in (1, 2, 3):
        store.write(sample(step))
    numbers = ((number,) for number in itertools.count())
    return itertools.starmap(lambda n: shutil.copytree(folder / "first", folder / str(n)), numbers)


def at_calls(folder: Path) -> int:
    """Kill before the first system call, before the second, and so on, until a write completes."""
    count = 0
    fresh = copies(folder)
    for step in (4, 3):
        for number in itertools.count():
            where = next(fresh)

            def act(number: int = number, where: Path = where, step: int = step) -> None:
                Countdown(number, kill_me).install(setattr)
                Store(where, keep=2).write(sample(step, 24))

            done = not killed(fork(act))
            check(where, step)
            if done:
                break
            count += 1
    return count


def with_little_space(folder: Path) -> int:
    """Kill before each system call of a write that must first remove the oldest checkpoint."""
    for number, where in enumerate(copies(folder)):

        def act(number: int = number, where: Path = where) -> None:
            limit_space(2, where, setattr)
            Countdown(number, kill_me).install(setattr)
            Store(where, keep=2).write(sample(4, 24))

        done = not killed(fork(act))
        check(where, 4, [3])
        if done:
            return number
    raise AssertionError


def at_bytes(folder: Path) -> int:
    """Kill after none, some and all bytes of the file of the arrays."""
    count = 0
    original = lockstep.checkpoint.checkpoint_files.save_file
    for size, where in zip((0, 1, 7, 8, 100, 168, 169, 200, 10_000), copies(folder), strict=False):

        def partly(arrays: Any, path: Path, size: int = size) -> None:
            original(arrays, path)
            os.truncate(path, min(size, path.stat().st_size))
            kill_me()

        lockstep.checkpoint.checkpoint_files.save_file = partly
        count += killed(fork(lambda where=where: Store(where, keep=2).write(sample(4))))
        lockstep.checkpoint.checkpoint_files.save_file = original
        check(where, 4)
    return count


def anywhere(folder: Path) -> int:
    """Kill when the file of the arrays exists, at several sizes."""
    count = 0
    large = sample(4, LARGE)
    for blocks, where in zip((0, 1, 8_000), copies(folder), strict=False):
        child = fork(lambda where=where: write_forever(where, large))
        state = where / ".step-000000000004.writing"
        last = time.monotonic() + PATIENCE
        while not any(on_disk(file) >= blocks for file in files_in(state)):
            assert time.monotonic() < last
        os.kill(child, signal.SIGKILL)
        count += killed(child)
        check(where, 4)
    return count


def at_the_end(folder: Path) -> int:
    """Kill before each system call that marks a job as finished; it was already finished with fewer steps."""
    for number, where in enumerate(copies(folder)):
        store = Store(where)
        store.finish(2)

        def act(number: int = number, store: Store = store) -> None:
            Countdown(number, kill_me).install(setattr)
            store.finish(3)

        done = not killed(fork(act))
        assert store.finished() in ((3,) if done else (2, 3))
        store.finish(3)
        assert store.finished() == 3
        assert [file.name for file in where.glob(".finished*")] == []
        check(where, 3)
        if done:
            return number
    raise AssertionError


def write_forever(folder: Path, contents: Contents) -> None:
    """Write until killed."""
    while True:
        Store(folder, keep=2).write(contents)


def files_in(folder: Path) -> list[Path]:
    """Return the files of a folder; none if it no longer exists."""
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


def on_disk(file: Path) -> int:
    """Return the number of blocks of the file; -1 if it no longer exists."""
    try:
        return file.stat().st_blocks
    except FileNotFoundError:
        return -1


if __name__ == "__main__":
    # The kernel keeps what killed processes have written; fsync matters only for power failures.
    os.fsync = lambda descriptor: None
    kinds = {
        "calls": at_calls,
        "room": with_little_space,
        "bytes": at_bytes,
        "anywhere": anywhere,
        "end": at_the_end,
    }
    print(kinds[sys.argv[2]](Path(sys.argv[1])))
