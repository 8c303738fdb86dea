"""What a call needs: names that its function uses, and which of it cannot be pickled. Pure."""

import dis
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any

Why = Callable[[Any], str]
"""Says why a value cannot be pickled; empty if it can."""


def name_culprit(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], why: Why) -> str:
    """Say what of a function or its arguments cannot be pickled, and why; empty if nothing is found."""
    given = [(f"args[{at}]", value) for at, value in enumerate(args)]
    given += [(f"kwargs[{name!r}]", value) for name, value in kwargs.items()]
    for name, value in given:
        if reason := why(value):
            return f"{name}, of type {type(value).__name__} ({reason}); pass what it is made from"
    if not why(function):
        return ""
    name = getattr(plain(function), "__name__", type(function).__name__)
    path, value = _follow(plain(function), why, [])
    if not path:
        return f"{name} ({why(function)})"
    what = f"{' -> '.join(path)}, which {name} uses, of type {type(value).__name__}"
    return f"{what} ({why(value)}); create it there"


def used_by_class_bodies(function: Any) -> dict[str, Any]:
    """Return the globals that the bodies of classes use which a function of a notebook or script defines.

    cloudpickle takes the globals along that functions use, and overlooks these.
    """
    found: dict[str, Any] = {}
    for each in _reached(plain(function), []):
        names = _loaded(each.__code__, "LOAD_NAME")
        found |= {name: each.__globals__[name] for name in names if name in each.__globals__}
    return {name: value for name, value in found.items() if not name.startswith("__")}


def plain(function: Any) -> Any:
    """Return what is below a bound method or a `functools.partial`."""
    return getattr(function, "__func__", getattr(function, "func", function))


def _reached(thing: Any, seen: list[Any]) -> Iterator[FunctionType]:
    """Yield the functions of `__main__` that a function or class can call."""
    if getattr(thing, "__module__", None) != "__main__" or any(thing is other for other in seen):
        return
    seen.append(thing)
    if isinstance(thing, FunctionType):
        yield thing
    for _, value in _used(thing):
        yield from _reached(value, seen)


def _follow(thing: Any, why: Why, seen: list[Any]) -> tuple[list[str], Any]:
    """Return the names that lead to the innermost thing that cannot be pickled, and that thing."""
    seen.append(thing)
    for name, value in _used(thing):
        if not any(value is other for other in seen) and why(value):
            deeper, last = _follow(plain(value), why, seen)
            return [name, *deeper], last
    return [], thing


def _used(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield names and values that a function uses, or that a class of `__main__` consists of."""
    if isinstance(thing, type) and thing.__module__ == "__main__":
        yield from vars(thing).items()
    if not isinstance(thing, FunctionType):
        return
    yield from inspect.getclosurevars(thing).nonlocals.items()
    for name in sorted(_loaded(thing.__code__, "LOAD_GLOBAL", "LOAD_NAME")):
        if name in thing.__globals__:
            yield name, thing.__globals__[name]
    for value in (*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values()):
        yield "a default", value


def _loaded(code: CodeType, *operations: str) -> set[str]:
    inner = [_loaded(constant, *operations) for constant in code.co_consts if isinstance(constant, CodeType)]
    own = {each.argval for each in dis.get_instructions(code) if each.opname in operations}
    return own.union(*inner)
