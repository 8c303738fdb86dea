"""Python values: whether they belong to the program, whether two are the same, their texts and encodings."""

import argparse
import importlib.util
import itertools
import math
import site
import struct
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import keras
import numpy as np
import xxhash

MANY_ELEMENTS = 1000
"""The most elements of a container among which nodes are searched."""
LARGE = 1 << 20
"""Bytes of an array above which it is compared only if it has changed in the first steps."""
_LIBRARIES = tuple(
    {*site.getsitepackages(), *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))}
)
PLAIN_HOLDERS = (types.SimpleNamespace, argparse.Namespace)
LEAVES = (bool, int, float, complex, str, bytes)
CONTAINERS = (dict, list, tuple, deque, set, frozenset)
NESTED = 3
"""The depth of containers within containers up to which values are read."""
DEEPEST = 20
"""The depth of containers within containers up to which contents are shown."""
ABSENT: Any = object()
Place = types.CellType | dict[str, Any] | type | types.ModuleType
"""Where a variable is: one of an enclosing function, global variables, or a class or module."""


def value_of(place: Place, name: str) -> Any:
    """Return the present value of a variable; `ABSENT` without one."""
    if isinstance(place, types.CellType):
        try:
            return place.cell_contents
        except ValueError:
            return ABSENT
    return (place if isinstance(place, dict) else vars(place)).get(name, ABSENT)


def set_value(place: Place, name: str, value: Any) -> None:
    """Set a variable, or remove it if the value is `ABSENT`."""
    if isinstance(place, types.CellType):
        if value is ABSENT:
            del place.cell_contents
        else:
            place.cell_contents = value
    elif isinstance(place, dict):
        if value is ABSENT:
            place.pop(name, None)
        else:
            place[name] = value
    elif value is ABSENT:
        delattr(place, name)
    else:
        setattr(place, name, value)


def is_float(value: Any) -> bool:
    """Whether a value is a float of Python or NumPy, which cannot change, and not an array."""
    return type(value) is float or isinstance(value, np.floating)


SavedValue = Sequence[Any]
"""A value that a checkpoint holds: the path of a node, an attribute of it or "", and the `encoded` value."""


def saved_values(values: Mapping[tuple[str, str], Any]) -> list[SavedValue]:
    """Return those of `ObjectGraph.values_at` that are plain and small. Inner ones come first."""
    inner_first = sorted(values.items(), key=lambda item: -len(item[0][0]))
    return [[path, name, encoded(value)] for (path, name), value in inner_first if _is_exact(value)]


def _is_exact(value: Any, depth: int = 0) -> bool:
    """Whether a value is a number, text or small array, or a plain container of them."""
    if value is None or value is ABSENT or type(value) in LEAVES:
        return True
    if type(value) is np.ndarray:
        return value.dtype.kind in "biufc" and value.nbytes <= LARGE
    if type(value) not in (list, tuple, dict, set) or len(value) > MANY_ELEMENTS or depth > NESTED:
        return isinstance(value, np.number | np.bool_)
    items = [*value, *value.values()] if isinstance(value, dict) else value
    return all(_is_exact(item, depth + 1) for item in items)


def with_own(own: Any, new: Any) -> Any:
    """Return the object that a place already has, if it is an equal container; otherwise the new value."""
    is_equal = isinstance(own, CONTAINERS) and text_of(own) == text_of(new)
    return own if is_equal else with_own_items(own, new)


def with_own_items(own: Any, new: Any) -> Any:
    """Return a new value with the equal containers that a place already has inside."""
    if isinstance(own, dict) and isinstance(new, dict):
        return {key: with_own(own.get(key), item) for key, item in new.items()}
    if isinstance(own, list) and type(new) is list:
        return [with_own(mine, item) for mine, item in itertools.zip_longest(own[: len(new)], new)]
    return new


def encoded(value: Any) -> Any:
    """Return a value in a form that a checkpoint can hold, for `decoded`.

    Raises:
        TypeError: the value contains an object that a checkpoint cannot hold.
    """
    if value is None or type(value) in (*LEAVES, np.ndarray) or isinstance(value, np.generic):
        return value
    if value is ABSENT:
        return {"kind": "absent", "items": ()}
    if _is_tensor(value):
        return {"kind": "tensor", "items": keras.ops.convert_to_numpy(value)}
    if isinstance(value, dict):
        return {"kind": "dict", "items": [[encoded(key), encoded(item)] for key, item in value.items()]}
    for container in (tuple, set, deque, list):
        if isinstance(value, container):
            items = sorted(value, key=repr) if container is set else value
            return {"kind": container.__name__, "items": [encoded(item) for item in items]}
    raise TypeError(f"a {type(value).__name__} cannot be saved in a checkpoint")


def decoded(value: Any) -> Any:
    """Return a value of `encoded`, perhaps of another process."""
    if not isinstance(value, dict):
        return value
    kind, items = value["kind"], value["items"]
    if kind == "absent":
        return ABSENT
    if kind == "tensor":
        return keras.ops.convert_to_tensor(items)
    if kind == "dict":
        return {decoded(key): decoded(item) for key, item in items}
    containers: dict[str, Callable[[Iterable[Any]], Any]] = {"tuple": tuple, "set": set, "deque": deque}
    return containers.get(kind, list)(decoded(item) for item in items)


def is_value(value: Any) -> bool:
    """Whether a value is plain, an array or a tensor, so it does not have attributes that change."""
    return type(value) in LEAVES or isinstance(value, np.ndarray | np.generic) or _is_tensor(value)


def is_of_values(value: Any, depth: int = 0) -> bool:
    """Whether a value is plain, an array or a tensor, or consists of such values only."""
    if value is None or is_value(value):
        return True
    is_container = isinstance(value, dict | list | tuple | deque | set)
    if depth > DEEPEST or not is_container or len(value) > MANY_ELEMENTS:
        return False
    items = value.values() if isinstance(value, dict) else value
    return all(is_of_values(item, depth + 1) for item in items)


def disturbed(value: Any) -> Any:
    """Return another value of the same type, dtype and shape, or None if this is not possible.

    In a container, all changeable values are changed.
    """
    if isinstance(value, dict):
        others = disturbed(list(value.values()))
        return None if others is None else dict(zip(value, others, strict=True))
    if isinstance(value, list | tuple | deque | set):
        pairs = [(item, disturbed(item)) for item in value]
        if all(other is None for _, other in pairs):
            return None
        container = next(container for container in (list, tuple, deque, set) if isinstance(value, container))
        return container(item if other is None else other for item, other in pairs)
    if type(value) is bool:
        return not value
    if type(value) in (int, float, complex):
        return value + 1
    if type(value) is str:
        return f"{value}?"
    if type(value) is bytes:
        return value + b"?"
    if (isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc") or _is_tensor(value):
        try:
            return ~value if "bool" in str(value.dtype) else value + 1
        except Exception:
            return None
    return None


def is_of_program(cls: Any) -> bool:
    """Whether a class is the program's own, not a library's."""
    return is_in_program(cls.__module__)


def is_of_keras(module: str) -> bool:
    """Whether a module, given its name, belongs to Keras or Lockstep."""
    return module.startswith(("keras.", "lockstep."))


@cache
def is_in_program(name: str | None) -> bool:
    """Whether a module is the program's own, not a library's."""
    if name is None or name in ("builtins", "lockstep") or name.startswith("lockstep."):
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:
        try:
            return name == "__main__" or importlib.util.find_spec(name) is None
        except (ImportError, ValueError):
            return True
    return not file.startswith(_LIBRARIES)


class OwnVariable(NamedTuple):
    """A variable of Keras or TensorFlow, or a tensor of PyTorch, with few numbers.

    Attributes:
        read: returns a copy of its numbers.
        assign: sets other numbers.
    """

    read: Callable[[], Any]
    assign: Callable[[Any], object]


def own_variable(value: Any) -> OwnVariable | None:
    """Return what reads and assigns a variable; None if it is none, is large, or has no plain numbers."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.is_meta or value.nbytes > LARGE or value.layout != torch.strided:
            return None

        def assign(numbers: Any) -> None:
            with torch.no_grad():
                value.copy_(torch.as_tensor(numbers))

        return OwnVariable(lambda: value.detach().cpu().numpy().copy(), assign)
    if not (isinstance(value, keras.Variable) or is_variable(value)) or math.prod(value.shape) * 8 > LARGE:
        return None
    return OwnVariable(lambda: np.array(keras.ops.convert_to_numpy(value)), value.assign)


def is_variable(value: Any) -> bool:
    """Whether a value is a variable of TensorFlow with numbers that does not belong to one of Keras."""
    kind: Any = getattr(sys.modules.get("tensorflow"), "Variable", None)
    if kind is None or not isinstance(value, kind):
        return False
    return bool(value.dtype.is_floating or value.dtype.is_integer or value.dtype.is_bool)


def is_module(value: Any) -> bool:
    """Whether a value is a module of PyTorch. Its state is in attributes that layers also have."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def _is_tensor(value: Any) -> bool:
    """Whether a value is a tensor with numbers that is not a variable."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        # Keras calls models with meta tensors to find shapes.
        return not isinstance(value, torch.nn.Parameter) and not value.is_meta
    if isinstance(value, keras.Variable | keras.KerasTensor) or is_symbolic(value):
        return False
    return bool(keras.ops.is_tensor(value))


def is_symbolic(value: Any) -> bool:
    """Whether a value belongs to a function that JAX traces. It cannot be used after the trace."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.core.Tracer)


def are_same(left: Any, right: Any) -> bool:
    """Whether two references are to the same object, or to equal values that cannot change."""
    if left is right:
        return True
    left_class = type(left)
    if left_class is not type(right):
        return False
    if left_class is float:
        return struct.pack("d", left) == struct.pack("d", right)
    if left_class in LEAVES:
        return repr(left) == repr(right) if left_class is complex else bool(left == right)
    if left_class is tuple:
        return len(left) == len(right) and all(map(are_same, left, right))
    return isinstance(left, np.generic) and left.tobytes() == right.tobytes()


def are_same_arrays(left: Any, right: Any) -> bool:
    """Whether two arrays have the same dtype, shape and bytes."""
    return bool(left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes())


def tensor_version(tensor: Any) -> int:
    """Return the number of changes of a tensor."""
    from lockstep.keras.private.torch import versions

    return versions([tensor])[0]


def are_same_tensors(left: Any, right: Any) -> bool:
    """Whether two tensors of PyTorch have the same dtype, shape and bytes."""
    equal = left.shape == right.shape and left.dtype == right.dtype
    return equal and are_same_arrays(
        *(np.asarray(keras.ops.convert_to_numpy(tensor)) for tensor in (left, right))
    )


_SHOWN = 60


def text_of(value: Any, depth: int = 0) -> str:
    """Return a text that shows a value. If possible, only equal values have equal texts."""
    if value is ABSENT:
        return "nothing"
    if value is None or type(value) in LEAVES:
        text = repr(value)
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... #{_hash(text.encode())}"
    if isinstance(value, np.ndarray | np.generic) or _is_tensor(value):
        array = keras.ops.convert_to_numpy(value)
        if array.ndim == 0:
            return f"{array.dtype} {array.item()!r}"
        return f"{array.dtype}{list(array.shape)} #{_hash(np.ascontiguousarray(array).tobytes())}"
    if depth > DEEPEST:
        return type(value).__name__
    # The names do not include the classes with which Keras and TensorFlow replace containers.
    if isinstance(value, Mapping):
        name = "dict"
        parts = [f"{text_of(key, depth + 1)}: {text_of(item, depth + 1)}" for key, item in value.items()]
    elif isinstance(value, set | frozenset):
        name = "set"
        parts = sorted(text_of(item, depth + 1) for item in value)
    elif isinstance(value, list | tuple | deque):
        name = next(name.__name__ for name in (list, tuple, deque) if isinstance(value, name))
        parts = [text_of(item, depth + 1) for item in value]
    else:
        return type(value).__name__
    text = f"{name}({', '.join(parts)})"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... #{_hash(text.encode())}"


def _hash(data: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data)
