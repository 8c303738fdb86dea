"""Work on a disk, in a thread. The event loop continues, so other hosts detect that the process is alive."""

import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from lockstep.errors import CheckpointError
from lockstep.system.clock import Clock
from lockstep.system.event_loop import EventLoop

PATIENCE = 3600.0
"""Seconds after which a disk counts as unusable."""

Result = TypeVar("Result")


class DiskWork(Generic[Result]):
    """An action that has begun; the loop turns when it has ended.

    Args:
        act: carries out the action.
        action: a description of the action, for messages.
        loop: the event loop of the process.
        clock: measures the time limit.
    """

    def __init__(self, act: Callable[[], Result], action: str, loop: EventLoop, clock: Clock) -> None:
        self._act = act
        self._action = action
        self._loop = loop
        self._clock = clock
        self._begun = clock.now()
        self._results: list[Result] = []
        self._error: BaseException | None = None
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._is_closed = False
        self._lock = threading.Lock()
        loop.watch(self._wake, lambda: os.eventfd_read(self._wake))
        # A disk that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="lockstep disk", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether `result` returns or raises."""
        return self._has_ended or self._clock.now() - self._begun >= PATIENCE

    def result(self) -> Result:
        """Return the result of the action, which is over.

        Raises:
            BaseException: the error of the action.
            CheckpointError: the action takes too long.
        """
        self.close()
        if not self._has_ended:
            raise CheckpointError(f"{self._action} takes more than {PATIENCE:g} s")
        if self._error is not None:
            raise self._error
        return self._results[0]

    def close(self) -> None:
        """Abandon the action, which may continue. A second call does nothing."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._loop.unwatch(self._wake)
                os.close(self._wake)

    @property
    def _has_ended(self) -> bool:
        return bool(self._results) or self._error is not None

    def _run(self) -> None:
        try:
            self._results.append(self._act())
        except BaseException as error:
            self._error = error
        with self._lock:
            if not self._is_closed:
                os.eventfd_write(self._wake, 1)
