"""Observes the variables of Keras that this thread creates, assigns and reads.

This is the only file that patches the assignment and reading of Keras's variables.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import keras

from lockstep.keras.private.common import ASSIGN, INITIALIZE, stored_value
from lockstep.system.thread_value import ThreadValue
from lockstep.worker.patch_registry import PATCHES, definer, replaced


class VariableObserver(Protocol):
    """Receives a call before a variable is created or assigned."""

    def on_create(self, variable: Any) -> None:
        """Called before a variable gets its first value."""

    def on_assign(self, variable: Any) -> None:
        """Called before a variable gets another value."""


class _ProcessState:
    assignments = 0
    before_next: Callable[[], None] | None = None


_observer: ThreadValue[VariableObserver | None] = ThreadValue(None)
_assigning = ThreadValue(False)


def count() -> int:
    """Return the number of times that this process has created or assigned variables since `install`."""
    return _ProcessState.assignments


def before_next(act: Callable[[], None]) -> None:
    """Call `act` once, before this process next creates or assigns a variable; replaces an earlier `act`."""
    _ProcessState.before_next = act


def is_assigning() -> bool:
    """Whether this thread is creating or assigning a variable of Keras, for which it uses the backend."""
    return _assigning.value


def is_observed_by(observer: VariableObserver) -> bool:
    """Whether `observer` observes this thread now."""
    return _observer.value is observer


def observed_by(observer: VariableObserver | None) -> AbstractContextManager[None]:
    """Within the block, only `observer` observes this thread; None for no observer."""
    return _observer.within(observer)


@contextmanager
def reads_observed_by(act: Callable[[Any], None]) -> Iterator[None]:
    """Within the block, call `act` before any variable is read through its `value`.

    On TensorFlow, a tape identifies variables by their handles, which is not a read.
    """

    def value(original: property, variable: Any) -> Any:
        act(variable)
        return original.__get__(variable)

    def handle(original: property, variable: Any) -> Any:
        stored = stored_value(variable)
        return original.__get__(variable) if stored is None else stored.handle

    with ExitStack() as stack:
        stack.enter_context(_property_replaced("value", value))
        if keras.backend.backend() == "tensorflow":
            stack.enter_context(_property_replaced("handle", handle))
        yield


@contextmanager
def _property_replaced(name: str, get: Callable[[property, Any], Any]) -> Iterator[None]:
    """Within the block, `get` returns a property of Keras's variables, given the original."""
    owner = definer(keras.Variable, name)
    with replaced(owner, name, property(functools.partial(get, vars(owner)[name]))):
        yield


def install() -> None:
    """Patch Keras's variables, once per process."""
    if not PATCHES.has(__name__):
        for method, event in (("__init__", "on_create"), (INITIALIZE, "on_create"), (ASSIGN, "on_assign")):
            owner = definer(keras.Variable, method)
            PATCHES.replace(__name__, owner, method, functools.partial(_notifying, event))


def _notifying(event: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def notifying(self: Any, *args: Any, **kwargs: Any) -> Any:
        _ProcessState.assignments += 1
        if _ProcessState.before_next is not None:
            act, _ProcessState.before_next = _ProcessState.before_next, None
            act()
        if _observer.value is not None:
            getattr(_observer.value, event)(self)
        before, _assigning.value = _assigning.value, True
        try:
            return original(self, *args, **kwargs)
        finally:
            _assigning.value = before

    return notifying
