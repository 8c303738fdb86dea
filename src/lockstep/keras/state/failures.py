"""Errors with which calls have ended, as plain values, so that another process can raise them again."""

import sys
from collections.abc import Mapping
from types import FunctionType
from typing import Any

from lockstep.checkpoint.values import pack
from lockstep.errors import CheckpointError

Failure = Mapping[str, Any]
"""Of an error: the call that it has ended, its class, arguments, attributes and text."""


def described(error: BaseException, call: str) -> Failure:
    """Return what `remade` needs; what an error holds besides plain values and arrays is left out."""
    kind = type(error)
    # What a class without an `__init__` of its own, such as OSError, needs may be more than `args`.
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

    The class is looked for in modules that the program has imported, and no `__init__` of the program's runs.

    Raises:
        CheckpointError: there is no such class any more, or its text would be another one.
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
    """Return the error, if it has the same text; the program's own methods may raise anything."""
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
