"""The threads that a script leaves after its last line. They belong to the script: Python waits for them."""

import functools
import threading
from typing import Any

from lockstep.errors import LockstepError
from lockstep.system.notes import note
from lockstep.worker.program_sources import is_program

_MOMENT = 10.0
"""Seconds after which a note says for which thread the end of the script waits."""


class ScriptThreads:
    """Notes errors of Lockstep that end a thread. The script misses them, and would seem to succeed."""

    def __init__(self) -> None:
        self._error: LockstepError | None = None
        threading.excepthook = functools.partial(self._ended_with, threading.excepthook)

    def wait(self) -> None:
        """Wait for the threads of the script that Python would wait for.

        Raises:
            LockstepError: a thread has ended with this error.
        """
        for thread in threading.enumerate():
            if thread.daemon or thread is threading.current_thread() or not _is_of_program(thread):
                continue
            thread.join(_MOMENT)
            if thread.is_alive():
                note(f"the last line of the script has run; waits for its thread {thread.name!r}")
                thread.join()
        if self._error is not None:
            raise self._error

    def _ended_with(self, show: Any, ended: Any) -> None:
        if isinstance(ended.exc_value, LockstepError) and self._error is None:
            self._error = ended.exc_value
        show(ended)


def _is_of_program(thread: threading.Thread) -> bool:
    """Whether a thread runs code of the program, or a method of Keras that it has passed."""
    target = getattr(thread, "_target", None) or type(thread).run
    while isinstance(target, functools.partial):
        target = target.func
    target = getattr(target, "__func__", target)
    code = getattr(target, "__code__", None)
    return (code is not None and is_program(code.co_filename)) or str(
        getattr(target, "__module__", "")
    ).startswith("keras.")
