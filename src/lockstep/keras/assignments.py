"""Who hears of it when this thread makes or assigns a variable of Keras.

The only file that touches how Keras's variables are assigned.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import keras

from lockstep.worker.patch_registry import PATCHES, definer


class Listener(Protocol):
    """Hears of variables."""

    def made(self, variable: Any) -> None:
        """Hear that a variable is about to get its first value."""

    def assigned(self, variable: Any) -> None:
        """Hear that a variable is about to get another value."""


class _Listening(threading.local):
    listener: Listener | None = None
    assigning: bool = False


class _Counted:
    assignments = 0
    before: Callable[[], None] | None = None


_listening = _Listening()


def count() -> int:
    """Return how often this process has assigned variables since `install`."""
    return _Counted.assignments


def before_next(act: Callable[[], None]) -> None:
    """Have `act` done before this process makes or assigns the next variable, in the place of one before."""
    _Counted.before = act


def is_assigning() -> bool:
    """Whether this thread makes or assigns a variable of Keras, by what the backend has for that."""
    return _listening.assigning


@contextmanager
def heard_by(listener: Listener | None) -> Iterator[None]:
    """Within the block `listener` hears of what this thread does, or nobody."""
    before, _listening.listener = _listening.listener, listener
    try:
        yield
    finally:
        _listening.listener = before


def install() -> None:
    """Let variables tell the listener of their thread."""
    if not PATCHES.has(__name__):
        for method, event in (("__init__", "made"), ("_direct_assign", "assigned")):
            owner = definer(keras.Variable, method)
            PATCHES.replace(__name__, owner, method, functools.partial(_telling, event))


def _telling(event: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def telling(self: Any, *args: Any, **kwargs: Any) -> Any:
        _Counted.assignments += 1
        if _Counted.before is not None:
            act, _Counted.before = _Counted.before, None
            act()
        if _listening.listener is not None:
            getattr(_listening.listener, event)(self)
        before, _listening.assigning = _listening.assigning, True
        try:
            return original(self, *args, **kwargs)
        finally:
            _listening.assigning = before

    return telling
