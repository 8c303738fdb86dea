"""The attributes that Lockstep replaces: within a block, or until the registry restores them.

A module of Lockstep that replaces an attribute of another library for longer than a block registers it here,
under the module's name. Those of Keras's models and callbacks are replaced by `lockstep.keras.patches`.
"""

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

from lockstep.errors import UnfitError

Part = tuple[Any, str]
"""An attribute of another library that is replaced: the class or module that has it, and its name."""

_ABSENT = object()
_PATCH = "lockstep_patch"
"""The attribute of a replacement in a class of the program, with its `Patch`, which lives as long."""


class Patch(NamedTuple):
    """One replaced attribute.

    Attributes:
        by: the module of Lockstep that replaces it.
        owner: the class or module that has it; `sys.modules` for a module.
        name: the name of the attribute.
        original: its previous value, if it had one.
        replacement: its new value.
    """

    by: str
    owner: Any
    name: str
    original: Any
    replacement: Any

    def undo(self) -> None:
        """Restore the original value."""
        if self.original is not _ABSENT:
            _set(self.owner, self.name, self.original)
        elif isinstance(self.owner, type):
            delattr(self.owner, self.name)
        else:
            del _namespace(self.owner)[self.name]


class PatchRegistry:
    """The replaced attributes of this process, in the order of replacement; thread-safe.

    Those of the program's classes come last. The registry does not keep these classes alive, which a program
    may define again and again. An attribute that the program itself sets afterwards is not Lockstep's.
    """

    def __init__(self) -> None:
        self._patches: list[Patch] = []
        self._of_program: list[tuple[weakref.ref[type], str]] = []
        self._modules: set[str] = set()
        self._lock = threading.RLock()

    def __iter__(self) -> Iterator[Patch]:
        with self._lock:
            self._of_program = [(owner, name) for owner, name in self._of_program if owner() is not None]
            of_program = (patch_of(owner(), name) for owner, name in self._of_program)
            return iter((*self._patches, *filter(None, of_program)))

    def has(self, by: str) -> bool:
        """Whether the module `by` has replaced anything."""
        return by in self._modules

    def replace(
        self, by: str, owner: Any, name: str, make: Callable[[Any], Any], *, of_program: bool = False
    ) -> None:
        """Replace an attribute with the result of `make` for its current value.

        Args:
            by: the module that replaces it.
            owner: the class or module that has it.
            name: its name.
            make: gets the value.
            of_program: whether the owner may be a class of the program.

        Raises:
            UnfitError: there is no such attribute.
        """
        try:
            original = getattr(owner, name)
        except AttributeError:
            raise UnfitError(
                f"{owner.__name__} has no {name}, which {by} replaces: this version of "
                f"{_library(owner)} is not supported"
            ) from None
        self._put(by, owner, name, make(original), of_program=of_program)

    def wrap(
        self, by: str, owner: Any, name: str, call: Callable[..., Any], *, of_program: bool = False
    ) -> None:
        """Replace a function with one that calls `call` with the original and the arguments.

        Args:
            by: the module that replaces it.
            owner: the class or module that has it.
            name: its name.
            call: the function that is called instead.
            of_program: whether the program may have defined it. Then AutoGraph converts it as it would
                without `call`.

        Raises:
            UnfitError: there is no such function.
        """

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def replacement(*args: Any, **kwargs: Any) -> Any:
                # AutoGraph converts it with `replacement`, and so also converts the program's function.
                def convertible(*args: Any, **kwargs: Any) -> Any:
                    return original(*args, **kwargs)

                return call(convertible if of_program else original, *args, **kwargs)

            if of_program or _library(owner) == "tensorflow":
                # AutoGraph would call the wrapped function instead.
                del vars(replacement)["__wrapped__"]
            if of_program:
                vars(replacement)["__signature__"] = inspect.signature(original)
            return replacement

        self.replace(by, owner, name, make, of_program=of_program)

    def put(self, by: str, owner: Any, name: str, value: Any) -> None:
        """Set an attribute to another value, whether or not it exists."""
        self._put(by, owner, name, value, of_program=False)

    def _put(self, by: str, owner: Any, name: str, value: Any, *, of_program: bool) -> None:
        with self._lock:
            original = _namespace(owner).get(name, _ABSENT)
            patch = Patch(by, owner, name, original, value)
            if of_program:
                vars(value)[_PATCH] = patch
                self._of_program.append((weakref.ref(owner), name))
            else:
                self._patches.append(patch)
            self._modules.add(by)
            _set(owner, name, value)

    def give_back(self, by: str) -> None:
        """Undo the replacements by the module `by`, or by modules in the package `by`, in reverse order."""

        def is_by(patch: Patch) -> bool:
            return f"{patch.by}.".startswith(f"{by}.")

        with self._lock:
            undone = [patch for patch in self if is_by(patch)]
            self._patches = [patch for patch in self._patches if not is_by(patch)]
            for patch in reversed(undone):
                patch.undo()
            self._modules = {patch.by for patch in self}


def patch_of(owner: type | None, name: str) -> Patch | None:
    """Return the patch with `of_program` of an attribute; None if the program has replaced it, too."""
    replacement = None if owner is None else vars(owner).get(name)
    patch: Patch | None = getattr(replacement, _PATCH, None)
    # A decorator may have copied the attribute.
    return patch if patch is not None and patch.replacement is replacement else None


def definer(cls: type, name: str) -> type:
    """Return the class that defines a method of `cls`; a replacement there affects all its subclasses.

    Raises:
        UnfitError: no class defines it.
    """
    for base in cls.__mro__:
        if name in vars(base):
            return base
    raise UnfitError(
        f"{cls.__name__} has no {name}, which Lockstep replaces: this version of {_library(cls)} is not "
        "supported"
    )


@contextmanager
def replaced(owner: Any, method: str, replacement: Any) -> Iterator[None]:
    """Replace `owner.method` within the block; the owner is an object, a module or a class."""
    if isinstance(owner, type):
        original = vars(owner)[method]
        setattr(owner, method, replacement)
        try:
            yield
        finally:
            setattr(owner, method, original)
        return
    # This does not use the owner's `__setattr__`, which tracks its values.
    attributes = vars(owner)
    before = {method: attributes[method]} if method in attributes else {}
    attributes[method] = replacement
    try:
        yield
    finally:
        del attributes[method]
        attributes.update(before)


def _namespace(owner: Any) -> Any:
    return owner if isinstance(owner, dict) else vars(owner)


def _set(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, type):
        setattr(owner, name, value)
    else:
        # This bypasses the `__setattr__` of some modules.
        _namespace(owner)[name] = value


def _library(owner: Any) -> str:
    name = owner.__name__ if isinstance(owner, ModuleType) else owner.__module__
    return str(name).partition(".")[0]


PATCHES = PatchRegistry()
"""The registry of this process."""
