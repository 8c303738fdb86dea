"""Finds the generators and numbers in the code of a dataset that make its items depend on earlier reads."""

import copy
import dis
import random
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from functools import cache, partial
from io import IOBase
from itertools import count, islice
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import keras
import numpy as np

from lockstep.keras.private.common import KERAS_HOLDERS, TRACKED_CONTAINERS
from lockstep.keras.randomness import global_generators, same_state
from lockstep.system.notes import RepeatedNotes
from lockstep.worker.program_sources import is_own

_OBJECTS = 20_000
"""The number of objects that are searched."""

_MEMBERS = 200
"""The number of members of a container that are searched."""

_LIBRARIES = frozenset(
    {
        *sys.stdlib_module_names,
        *(
            "absl",
            "aiobotocore",
            "botocore",
            "datasets",
            "fsspec",
            "grain",
            "jax",
            "jaxlib",
            "keras",
            "lockstep",
        ),
        *("ml_dtypes", "numpy", "pandas", "PIL", "pyarrow", "s3fs", "scipy", "tensorflow", "torch"),
        "torchvision",
    }
)
"""Packages whose functions and classes hold no generators except the global ones."""

_LEAVES = (str, bytes, bytearray, int, float, complex, type(None), np.ndarray, np.generic, ModuleType)

_SHOWN = 3
"""The numbers that a note names."""

_NUMERIC_BYTES = 16 * 2**20
"""The most bytes of an array that counts as numbers of its object; larger ones are data."""

_OBJECTS_BYTES = 64 * 2**20
"""The most bytes of numbers of all objects that an input holds; the numbers of further objects are data."""

_NUMERIC_ITEMS = 200_000
"""The most items of a list or tuple that counts as numbers of its object."""

_ASSIGNMENTS = frozenset({"STORE_ATTR", "STORE_DEREF", "STORE_GLOBAL", "STORE_SUBSCR", "DELETE_ATTR"})

_SIMPLE = ("builtins", "collections", TRACKED_CONTAINERS)

_PLAIN = frozenset({"__call__", "__getitem__", "__getitems__", "__len__", "__iter__"})


def held_generator(*roots: tuple[str, Any]) -> str | None:
    """Return the path of a random generator that one of the objects refers to, or None.

    This searches a limited number of objects: attributes, containers, closures and the globals of functions.
    It does not find the generators of the global random states, and reads no property.

    Args:
        roots: the names of the objects for the result, and the objects.
    """
    for path, held in _objects(roots):
        if _is_generator(held):
            return f"{path} is a {type(held).__module__}.{type(held).__qualname__}"
    return None


class ChangedNumbers:
    """The numbers in the attributes of some objects that have changed since they were first seen.

    Arrays, and lists and tuples of numbers, count up to a limit on their size. Text does not count, because
    it may be a path. If other attributes have changed too, numbers may describe them, such as the number of a
    table that was read. Then only numbers count whose values are the same in a different order.

    Args:
        objects: the objects, by path.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._parts: dict[str, tuple[dict[str, Any], _First]] = {}
        size = 0
        for path, held in objects.items():
            attributes = _dict_of(held)
            first = _first.get(held)
            first_size = _size(attributes) if first is None else first.size
            if size + first_size > _OBJECTS_BYTES:
                continue
            size += first_size
            if first is None:
                numbers = {name: copy.copy(v) for name, v in attributes.items() if _is_numeric(v)}
                first = _first[held] = _First(numbers, _marks(attributes), first_size)
            self._parts[path] = attributes, first

    @property
    def identities(self) -> dict[str, int]:
        """Values that identify the objects in this process, by path."""
        return {path: id(attributes) for path, (attributes, _) in self._parts.items()}

    def getstate(self) -> dict[str, dict[str, Any]]:
        """Return the values of the attributes that count, by path and name.

        The key `_LEFT_OUT` has the paths and names of the other attributes that have changed.
        """
        state, left_out = {}, dict[str, bool]()
        for (path, (attributes, _)), (names, others) in zip(
            self._parts.items(), self._changed(), strict=True
        ):
            if names:
                state[path] = {name: copy.copy(attributes[name]) for name in names}
            left_out |= {f"{path}.{name}": True for name in others}
        return state | {_LEFT_OUT: left_out} if left_out else state

    def setstate(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore a result of `getstate`, perhaps of another process that runs the same script.

        A note names the numbers that have changed and do not count.
        """
        for (path, (attributes, first)), (names, _) in zip(self._parts.items(), self._changed(), strict=True):
            before = {name: first.numbers[name] for name in names if name in first.numbers}
            for name, value in {**before, **state.get(path, {})}.items():
                _assign(attributes, name, value)
        if left_out := list(state.get(_LEFT_OUT, {})):
            shown = ", ".join(left_out[:_SHOWN]) + (", ..." if len(left_out) > _SHOWN else "")
            _note(
                f"{shown}: not restored, because these numbers have changed together with other data that "
                "the input keeps: if its items depend on them, load that data before fit, or compute each "
                "item from its index alone"
            )

    def _changed(self) -> list[tuple[list[str], list[str]]]:
        """Return the names of the changed attributes of each object: those that count, and the others."""
        parts = list(self._parts.values())
        only_orders = any(_marks(attributes) != first.others for attributes, first in parts)
        changed = []
        for attributes, first in parts:
            names = [name for name, value in dict(attributes).items() if _is_numeric(value)]
            names = [name for name in names if not _equal(attributes[name], first.numbers.get(name, _ABSENT))]
            left_out = [
                name
                for name in names
                if only_orders and not _is_order(attributes[name], first.numbers.get(name))
            ]
            changed.append(([name for name in names if name not in left_out], left_out))
        return changed


def states_held(*roots: tuple[str, Any]) -> dict[str, Any]:
    """Return the states that earlier reads of the objects change, by path, for `generator_state`.

    These are the generators of random numbers that the objects hold, and `ChangedNumbers`.
    """
    states: dict[str, Any] = {}
    for root in roots:
        objects: dict[str, Any] = {}
        for path, held in _objects((root,)):
            if _is_generator(held):
                states.setdefault(path, held)
            elif _is_of_program(held):
                objects.setdefault(path, held)
        if objects:
            states[f"numbers of {root[0]}"] = ChangedNumbers(objects)
    return states


def held_variable(*roots: tuple[str, Any]) -> str | None:
    """Return the path of a model or a variable that one of the objects holds, or None if none is found."""
    for path, held in _objects(roots):
        if isinstance(held, keras.Model | keras.Variable):
            kind = "model" if isinstance(held, keras.Model) else "variable"
            return f"{path} is the {kind} {held.name!r}"
    return None


def held_iterator(*roots: tuple[str, Any]) -> str | None:
    """Return the path of an iterator, such as a generator, that one of the objects holds, or None.

    Reading an item takes the iterator's next element. Files, which can be read at any offset, do not count,
    nor do counters within other objects, nor globals of installed packages. A proxy has all methods, and the
    class of its target.
    """
    for path, held in _objects(roots, only_program=True):
        counts = isinstance(held, count) and path.count(".") > 1
        iterates = isinstance(held, Iterator) and issubclass(held.__class__, Iterator)
        if iterates and not (counts or isinstance(held, IOBase)):
            return f"{path} is a {type(held).__qualname__}"
    return None


def refers_to(name: str, *roots: tuple[str, Any]) -> str | None:
    """Return the path of a function of the objects whose code refers to `name`, or None if none is found."""
    for path, held in _objects(roots):
        if isinstance(held, FunctionType) and name in _names(held.__code__):
            return path
    return None


def changed_path(*roots: tuple[str, Any]) -> str | None:
    """Return the path of a function of the objects that may assign to other objects, or None.

    A callable object may do so too.
    """
    for path, held in _objects(roots):
        if isinstance(held, FunctionType):
            steps = () if _library(_module(held)) else dis.get_instructions(held.__code__)
            if any(step.opname in _ASSIGNMENTS for step in steps):
                return path
        elif callable(held) and not isinstance(held, type | partial | BuiltinFunctionType):
            return path
    return None


class _First(NamedTuple):
    """The attributes of an object as they were when it was first seen.

    Attributes:
        numbers: copies of those that are numbers.
        others: marks of the others, by name.
        size: bytes of the numbers.
    """

    numbers: dict[str, Any]
    others: dict[str, Any]
    size: int


_first: "WeakKeyDictionary[Any, _First]" = WeakKeyDictionary()
_ABSENT = object()
_LEFT_OUT = "left out"
_note = RepeatedNotes()


def _is_of_program(held: Any) -> bool:
    """Whether an object has attributes, is of a class of the program, and its state is not kept elsewhere."""
    kind: Any = type(held)
    if isinstance(held, type | FunctionType) or not kind.__dictoffset__ or _library(_module(kind)):
        return False
    torch = sys.modules.get("torch")
    kept = (*KERAS_HOLDERS, keras.callbacks.Callback, *(() if torch is None else (torch.nn.Module,)))
    # Two objects that are equal would count as one.
    by_identity = kind.__hash__ is object.__hash__ and kind.__weakrefoffset__ > 0
    return by_identity and not isinstance(held, kept)


def _dict_of(held: Any) -> dict[str, Any]:
    """Return the attributes of an object without those that its class computes."""
    try:
        attributes: dict[str, Any] = object.__getattribute__(held, "__dict__")
    except AttributeError:
        return {}
    return attributes if isinstance(attributes, dict) else {}


def _size(attributes: Mapping[str, Any]) -> int:
    """Return the bytes of the numbers in arrays, lists and tuples among attributes."""
    numbers = [value for value in dict(attributes).values() if _is_numeric(value)]
    return sum(v.nbytes if hasattr(v, "nbytes") else 8 * len(v) for v in numbers if hasattr(v, "__len__"))


def _marks(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mark for each attribute that is not a number; a changed attribute has another mark."""
    return {name: _mark(value) for name, value in dict(attributes).items() if not _is_numeric(value)}


def _mark(value: Any) -> Any:
    if type(value) is str:
        return value
    if type(value) in (list, tuple, dict, set, deque):
        members = list(value.values() if type(value) is dict else value)
        return id(value), len(members), tuple(map(id, members[:_MEMBERS]))
    if type(value) is np.ndarray and value.dtype != object:
        return id(value), value.flat[:: value.size // _MEMBERS + 1].tobytes()
    return id(value)


def _equal(value: Any, first: Any) -> bool:
    """Whether an attribute has its first value, of the same type."""
    if isinstance(value, np.ndarray) and isinstance(first, np.ndarray) and value.dtype != first.dtype:
        return False
    return type(value) is type(first) and same_state(value, first)


def _is_order(value: Any, first: Any) -> bool:
    """Whether an attribute has its first numbers in a different order."""
    if type(value) is np.ndarray and type(first) is np.ndarray:
        same_form = (value.shape, value.dtype) == (first.shape, first.dtype)
        return same_form and np.array_equal(np.sort(value, None), np.sort(first, None))
    return type(value) in (list, tuple) and type(value) is type(first) and sorted(value) == sorted(first)


def _is_numeric(value: Any) -> bool:
    if isinstance(value, np.generic) or type(value) is np.ndarray:
        return value.dtype.kind in "biuf" and value.itemsize <= 8 and value.nbytes <= _NUMERIC_BYTES
    if type(value) in (list, tuple):
        return len(value) <= _NUMERIC_ITEMS and all(type(number) in (int, float, bool) for number in value)
    return value is None or type(value) in (int, float, bool)


def _assign(attributes: dict[str, Any], name: str, value: Any) -> None:
    """Set an attribute to a number or to numbers, in the same array or list if possible."""
    before: Any = attributes.get(name)
    is_array = type(before) is np.ndarray and isinstance(value, np.ndarray) and before.flags.writeable
    if is_array and (before.shape, before.dtype) == (value.shape, value.dtype):
        before[...] = value
    elif isinstance(value, list) and type(before) is list:
        before[:] = value
    else:
        attributes[name] = copy.copy(value)


def _objects(roots: tuple[tuple[str, Any], ...], *, only_program: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield objects and their paths, the nearest first; with `only_program`, without globals of packages."""
    waiting = deque(roots)
    seen: dict[int, Any] = {}
    while waiting and len(seen) < _OBJECTS:
        path, held = waiting.popleft()
        if isinstance(held, _LEAVES) or id(held) in seen:
            continue
        seen[id(held)] = held  # Holds the object, so that no other object gets its id.
        yield path, held
        waiting.extend(_members(path, held, only_program))


def _members(path: str, held: Any, only_program: bool) -> Iterator[tuple[str, Any]]:
    """Yield the members of an object, with their paths."""
    if isinstance(held, Mapping) and type(held).__module__ in ("builtins", "collections"):
        items = islice(held.items(), _MEMBERS)
        yield from ((f"{path}[{key!r}]" if type(key) in (str, int) else path, value) for key, value in items)
    elif isinstance(held, set | frozenset) and _iterates_as_a_builtin(held):
        yield from ((path, value) for value in islice(held, _MEMBERS))
    elif isinstance(held, list | tuple | deque) and _iterates_as_a_builtin(held):
        yield from ((f"{path}[{index}]", value) for index, value in enumerate(islice(held, _MEMBERS)))
    if isinstance(held, FunctionType):
        yield from _of_function(path, held, only_program)
    elif isinstance(held, MethodType | BuiltinFunctionType):
        yield f"{path}.__self__", held.__self__
        yield f"{path}.__func__", getattr(held, "__func__", None)
    elif isinstance(held, partial):
        yield from ((f"{path}.func", held.func), (f"{path}.args", held.args))
        yield f"{path}.keywords", held.keywords
    elif isinstance(held, type):
        yield from _of_class(held)
    else:
        yield from _attributes(path, held)
        yield type(held).__qualname__, type(held)


def _iterates_as_a_builtin(container: Any) -> bool:
    """Whether a container's class does not define its own iteration, which may do anything."""
    return not any(
        "__iter__" in vars(base) for base in type(container).__mro__ if base.__module__ not in _SIMPLE
    )


def _of_function(path: str, function: FunctionType, only_program: bool) -> Iterator[tuple[str, Any]]:
    if _library(_module(function)):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f"{name} of {function.__qualname__}", cell.cell_contents
        except ValueError:
            continue  # The closure's variable is not assigned yet.
    yield f"{path}.__defaults__", function.__defaults__
    yield f"{path}.__kwdefaults__", function.__kwdefaults__
    if only_program and not is_own(function.__code__.co_filename):
        return
    names = sorted(_names(function.__code__))
    for name in sorted(_globals(function.__code__)):
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType) and not _library(value.__name__):
            members = vars(value)
            yield from ((f"{value.__name__}.{inner}", members[inner]) for inner in names if inner in members)
        yield f"{function.__module__}.{name}", value


def _names(code: CodeType) -> set[str]:
    """Return the names of globals and attributes to which code refers, with the functions defined in it."""
    inner = (_names(const) for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*inner)


def _globals(code: CodeType) -> set[str]:
    """Return the names of globals to which code refers, with the functions defined in it."""
    names = {
        step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    return names.union(*(_globals(const) for const in code.co_consts if isinstance(const, CodeType)))


def _of_class(kind: type) -> Iterator[tuple[str, Any]]:
    for base in kind.__mro__:
        if not _library(_module(base)):
            for name, value in vars(base).items():
                value = getattr(value, "__func__", value)  # The function of a static or a class method.
                value = value.fget if isinstance(value, property) else value
                if not name.startswith("__") or name in _PLAIN:
                    yield f"{base.__qualname__}.{name}", value


def _attributes(path: str, held: Any) -> Iterator[tuple[str, Any]]:
    members = _dict_of(held)
    grain = _module(type(held)).startswith("grain.")
    for name, value in list(members.items()):
        # Grain's own parts draw from generators that they seed for each element.
        if not grain or hasattr(value, "__getitem__") or not _module(type(value)).startswith("grain."):
            yield f"{path}.{name}", value
    for base in type(held).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name.startswith("__"):
                continue
            try:
                # This does not call the class's own `__getattr__`, which may return or raise anything.
                yield f"{path}.{name}", object.__getattribute__(held, name)
            except AttributeError:
                continue


def _module(held: Any) -> str:
    """Return the name of the module of a class or a function. Those of some extensions have none: empty."""
    module = getattr(held, "__module__", None)
    return module if isinstance(module, str) else ""


def _library(module: str) -> bool:
    package = module.partition(".")[0]
    return not module or (package in _LIBRARIES and module != "__main__" and not _is_shadowed(package))


def _is_shadowed(package: str) -> bool:
    """Whether the program has a package or module of the name of a library, such as `datasets`."""
    module = sys.modules.get(package)
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    return package != "lockstep" and file is not None and _is_own(file)


_is_own = cache(is_own)


def _is_generator(held: Any) -> bool:
    kinds: list[type] = [random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator]
    kinds.append(keras.random.SeedGenerator)
    defaults = global_generators()
    if (torch := sys.modules.get("torch")) is not None:
        kinds.append(torch.Generator)
        defaults.append(torch.default_generator)
    if (tensorflow := sys.modules.get("tensorflow")) is not None:
        kinds.append(tensorflow.random.Generator)
    return isinstance(held, tuple(kinds)) and not any(held is default for default in defaults)
