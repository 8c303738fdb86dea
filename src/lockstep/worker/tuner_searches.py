"""Searches of KerasTuner: every worker has the tuner and writes its folder, which none reads meanwhile.

A new tuner reads the folder of an earlier search, or removes it. Each worker then makes the same trials,
whose models are trained together, and writes the same files. So the workers of a host make their tuners one
at a time, all have made theirs before the first trial is written, and the last trial is written before a
script continues.
"""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from lockstep.errors import PeerStuckError
from lockstep.system.files import FOLDER_MODE
from lockstep.system.locks import wait_for_lock
from lockstep.system.paths import RunPaths
from lockstep.worker import job
from lockstep.worker.import_hooks import when_imported
from lockstep.worker.patch_registry import PATCHES, definer

LIBRARY = "keras_tuner"

_PATIENCE_SECONDS = 600.0

_making: list[bool] = []
"""Not empty while this process makes a tuner, which may make another one."""


def share_searches() -> None:
    """Let the workers of this job search together, when the script imports KerasTuner."""
    when_imported({LIBRARY: _patch})


def _patch(module: ModuleType) -> None:
    for name, around in (("__init__", _turn_of_this_host), ("search", _together)):
        PATCHES.wrap(__name__, definer(module.Tuner, "search"), name, functools.partial(_call_within, around))


def _call_within(
    around: Callable[[], contextlib.AbstractContextManager[None]],
    original: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    with around():
        return original(*args, **kwargs)


@contextmanager
def _turn_of_this_host() -> Iterator[None]:
    """Let the workers of this host execute the block one at a time."""
    folder = job.current().context.folder
    if folder is None or _making:
        yield
        return
    lock = RunPaths(folder).tuner_lock
    lock.parent.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
    descriptor = wait_for_lock(lock, _PATIENCE_SECONDS)
    if descriptor is None:
        raise PeerStuckError(
            f"another worker has been making a tuner of {LIBRARY} for {_PATIENCE_SECONDS:.0f} s; check "
            "whether its disk responds"
        )
    _making.append(True)
    try:
        yield
    finally:
        _making.clear()
        os.close(descriptor)


@contextmanager
def _together() -> Iterator[None]:
    """Begin and end the block on all workers at the same time."""
    _meet("the beginning of a search")
    yield
    _meet("the end of a search")


def _meet(purpose: str) -> None:
    current = job.current()
    # A search in another thread takes turns with others in each of its calls.
    if threading.current_thread() is threading.main_thread():
        current.exchange(lambda _, exchange: exchange.barrier(what=purpose))
