"""Errors that ended calls, as plain values, so that another process can raise them again."""

import sys
from collections.abc import Mapping
from types import FunctionType
from typing import Any

from lockstep.checkpoint.values import pack
from lockstep.errors import CheckpointError

Failure = Mapping[str, Any]
"""An error as plain values: the call that it ended, its class, arguments, attributes and text."""


def described(error: BaseException, call: str) -> Failure:
    """Return the input of `remade`; attributes other than plain values and arrays are omitted."""
    kind = type(error)
    # A class without its own `__init__`, such as OSError, may need more than `args`.
    made_by = error.__reduce__() if not _initializes(kind) else ()
    arguments = made_by[1] if made_by[:1] == (kind,) else error.args
    return {
        "call": call,
        "module": kind.__module__,
        "class": kind.__qualname__,
        "args": arguments if _is_plain(arguments) else (),
        "attributes": {name: value for name, value in vars(error).items() if _is_plain(value)},
        "text": str(error),
    }


def remade(failure: Failure) -> BaseException:
    """Return an error of the same class and text.

    The class must be in a module that the program has imported; no `__init__` of the program runs.

    Raises:
        CheckpointError: the class does not exist any more, or the text would differ.
    """
    kind: Any = sys.modules.get(failure["module"])
    for name in failure["class"].split("."):
        kind = getattr(kind, name, None)
    if isinstance(kind, type) and issubclass(kind, BaseException):
        error = _made(kind, failure)
        if error is not None:
            return error
    raise CheckpointError(
        f"{failure['call']} of the script had ended with {failure['module']}.{failure['class']}: "
        f"{failure['text']}, and this process cannot raise it again for the script to catch: define the "
        "class at the top of a module, with a message built from plain arguments and attributes, or "
        "start over in another folder"
    )


def _made(kind: type[BaseException], failure: Failure) -> BaseException | None:
    """Return the error, or None if its text differs or the program's own methods raise."""
    try:
        arguments = failure["args"]
        error = kind.__new__(kind, *arguments) if _initializes(kind) else kind(*arguments)
        vars(error).update(failure["attributes"])
        return error if str(error) == failure["text"] else None
    except Exception:
        return None


def _initializes(kind: type[BaseException]) -> bool:
    return isinstance(kind.__init__, FunctionType)


def _is_plain(value: Any) -> bool:
    try:
        pack(value, "error")
    except TypeError:
        return False
    return True
