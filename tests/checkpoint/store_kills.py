"""Kills processes with SIGKILL before each request of an upload, and after the last; checks what they leave.

python store_kills.py FOLDER

Prints how many processes were killed. Each process imports the library itself: its threads survive no fork.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint_kills import fork

from lockstep.checkpoint.checkpoint_files import Contents
from lockstep.checkpoint.mirror import Mirror, fault_of, fetch, read_head
from lockstep.checkpoint.object_store import ObjectStore, StoreLease
from lockstep.checkpoint.store import Store

JOB = {"replicas": 2, "seed": 3, "threads": 1}


class Killing(ObjectStore):
    """A store whose process ends before one of its requests."""

    left = -1

    def _opened(self, act: Callable[..., Any], *args: Any) -> Any:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1
        return act(*args)

    def read(self, name: str) -> Any:
        return self._opened(super().read, name)

    def replace(self, name: str, data: bytes, tag: str | None) -> Any:
        return self._opened(super().replace, name, data, tag)

    def put(self, name: str, file: Path, size: int) -> None:
        self._opened(super().put, name, file, size)

    def delete(self, names: Any) -> None:
        for name in list(names):
            self._opened(super().delete, [name])

    def names(self) -> list[str]:
        result: list[str] = self._opened(super().names)
        return result


def upload(folder: Path, step: int, dies_at: int = -1) -> None:
    """Begin a job from the store, and upload a checkpoint, the older one leaving the store."""
    store = Killing(f"file://{folder / 'store'}", conditional=False)
    base = fetch(store, folder / "local", 1, lambda text: None)
    arrays = {"weights": np.full(1000, step, np.float32)}
    Store(folder / "local", 1).write(Contents(step, {"job": JOB}, arrays))
    failures: list[str] = []
    lease = StoreLease(store.url, f"job of step {step}", base, one_writer=True)
    store.left = dies_at
    mirror = Mirror(lease, Store(folder / "local", 1), lambda *done: None, failures.append, lambda _: store)
    mirror.upload(step)
    assert mirror.close(100)
    assert not failures, failures


def state(folder: Path) -> tuple[list[int], int]:
    """Return the steps in the store, which must be complete, and the number of its objects."""
    store = ObjectStore(f"file://{folder / 'store'}", conditional=False)
    head, _ = read_head(store)
    assert head is not None
    assert [fault_of(store, each) for each in head.checkpoints] == [None] * len(head.checkpoints)
    return [each.step for each in head.checkpoints], len(store.names())


def in_process(act: Callable[[], Any]) -> bool:
    """Run `act` in a process of its own; return whether it was killed."""
    status = os.waitstatus_to_exitcode(os.waitpid(fork(act), 0)[1])
    assert status in (0, -signal.SIGKILL), status
    return status != 0


def main(folder: Path) -> int:
    """Kill at each request; return how many processes were killed."""
    for number in range(100):
        place = folder / str(number)

        def check(*allowed: list[int], place: Path = place, objects: int | None = None) -> None:
            steps, there = state(place)
            assert steps in allowed, steps
            assert objects is None or there == objects

        in_process(lambda place=place: upload(place, 1))
        in_process(lambda: check([1], objects=3))
        killed = in_process(lambda place=place, number=number: upload(place, 2, number))
        assert not in_process(lambda: check([1], [2]))
        # The next one cleans up and uploads.
        assert not in_process(lambda place=place: upload(place, 3))
        assert not in_process(lambda: check([3], objects=3))
        if not killed:
            return number
    raise AssertionError("no upload was complete")


if __name__ == "__main__":
    print(main(Path(sys.argv[1])))
