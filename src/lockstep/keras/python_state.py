"""The state that a program keeps in Python: attributes of its model, and of the objects that it reaches.

A graph of objects is a list of nodes, the objects that can change: holders of attributes, containers, arrays,
tensors and generators of random numbers. The contents of a node are shallow: what it refers to, not what that
contains. So comparing them takes a look at each reference, and restoring them keeps every object's identity.

Comparing and restoring it around each replica takes a third of a millisecond a step for 20 layers.
"""

import argparse
import functools
import importlib.util
import inspect
import itertools
import random
import site
import struct
import sys
import sysconfig
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from operator import is_
from typing import Any

import keras
import numpy as np
import xxhash

from lockstep.keras.private.common import (
    KERAS_HOLDERS,
    MODEL_ATTRIBUTES,
    OWN_ATTRIBUTES,
    layers_of,
    modules_of,
)
from lockstep.keras.randomness import generator_state, set_generator_state
from lockstep.keras.variables import flat_metrics, optimizers_of

_MANY = 1000
"""The most elements of a container among which nodes are searched."""
_LARGE = 1 << 20
"""Bytes of an array above which it is compared only if it has changed in the first steps."""
_LIBRARIES = tuple(
    {*site.getsitepackages(), *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))}
)
_PLAIN_HOLDERS = (types.SimpleNamespace, argparse.Namespace)
_LEAVES = (bool, int, float, complex, str, bytes)
_GROWTH = 4
"""A graph with so many times more nodes than could be reached is searched for those that cannot be."""
_DEEP = 20
"""Containers within containers whose contents are shown."""
ABSENT: Any = object()

Contents = Any
Key = tuple[int, str]
"""A node, by its position in the graph, and an attribute of it; "" for its whole contents."""


class _Changeable:
    """An object that can change.

    Attributes:
        path: names it in messages.
        known: its contents when it was last looked at.
    """

    __slots__ = ("known", "path", "value")

    def __init__(self, path: str, value: Any) -> None:
        self.path = path
        self.value = value
        self.known = self.read()

    def read(self) -> Contents:
        """Return a copy of its contents."""
        raise NotImplementedError

    def write(self, contents: Contents) -> None:
        """Replace its contents."""
        raise NotImplementedError

    def differs(self) -> bool:
        """Whether its contents are not the known ones."""
        raise NotImplementedError

    def children(self) -> Iterator[tuple[str, Any]]:
        """Yield what its known contents refer to, by paths."""
        yield from ()


class _Holder(_Changeable):
    """An object with attributes; those that Keras and its backend keep themselves do not count.

    Parts that it gets, such as the variables that a layer creates when it is built, are not changes: Keras
    creates them once.

    Attributes:
        grown: whether it has got parts among which nodes are still to be searched.
    """

    __slots__ = ("attributes", "built", "grown", "ignored", "keys", "values")

    def __init__(self, path: str, value: Any) -> None:
        self.attributes: dict[str, Any] = vars(value)
        self.ignored = (
            OWN_ATTRIBUTES if isinstance(value, KERAS_HOLDERS) or _is_module(value) else frozenset()
        )
        if isinstance(value, keras.Model):
            self.ignored |= MODEL_ATTRIBUTES
        self.keys: list[str] = []
        self.values: list[Any] = []
        self.built = self.attributes.get("built")
        self.grown = False
        super().__init__(path, value)

    def read(self) -> dict[str, Any]:
        ignored = self.ignored
        return {name: value for name, value in self.attributes.items() if name not in ignored}

    def write(self, contents: Mapping[str, Any]) -> None:
        # Not by `__setattr__`, which may track or convert the values.
        for name in [name for name in self.attributes if name not in contents and name not in self.ignored]:
            del self.attributes[name]
        for name, value in contents.items():
            if self.attributes.get(name, ABSENT) is not value:
                self.attributes[name] = value

    def differs(self) -> bool:
        attributes, known = self.attributes, self.known
        if (
            len(attributes) == len(self.values)
            and all(map(is_, attributes.values(), self.values))
            and all(map(is_, attributes, self.keys))
        ):
            return False
        now = self.read()
        self._grow(now)
        if now.keys() != known.keys() or not all(_same(value, known[name]) for name, value in now.items()):
            self.keys, self.values = [], []
            return True
        self.keys, self.values = list(attributes), list(attributes.values())
        return False

    def _grow(self, now: Mapping[str, Any]) -> None:
        """Take parts that the object has got into its known contents."""
        known, was_built = self.known, self.built
        self.built = self.attributes.get("built")
        for name, value in now.items():
            before = known.get(name)
            if self.built is not was_built and name not in known:
                # Such as the bias of a layer without one, which is None.
                self.grown, known[name] = True, value
                continue
            if self.built is not was_built:
                part = before is None or not (type(before) in _LEAVES and type(value) in _LEAVES)
            else:
                part = before is None and isinstance(value, (keras.Variable, *KERAS_HOLDERS))
            if part and value is not before:
                self.grown, known[name] = True, value

    def children(self) -> Iterator[tuple[str, Any]]:
        for name, value in self.known.items():
            yield f"{self.path}.{name}", value


class _List(_Changeable):
    __slots__ = ()

    def read(self) -> list[Any]:
        return list(self.value)

    def write(self, contents: Sequence[Any]) -> None:
        value = self.value
        if isinstance(value, deque):
            value.clear()
            value.extend(contents)
        elif type(value).__setitem__ is list.__setitem__ or type(value).__module__.startswith("keras."):
            # Keras's lists would search the values for layers.
            list.__setitem__(value, slice(None), contents)
        else:
            value[:] = contents

    def differs(self) -> bool:
        value, known = self.value, self.known
        return len(value) != len(known) or not (all(map(is_, value, known)) or all(map(_same, value, known)))

    def children(self) -> Iterator[tuple[str, Any]]:
        if len(self.known) <= _MANY:
            for i, value in enumerate(self.known):
                yield f"{self.path}[{i}]", value


class _Dict(_Changeable):
    __slots__ = ()

    def read(self) -> dict[Any, Any]:
        return dict(self.value)

    def write(self, contents: Mapping[Any, Any]) -> None:
        value = self.value
        # A class of TensorFlow only behaves like a dict.
        own: Any = dict if issubclass(type(value), dict) else type(value)
        own = OrderedDict if isinstance(value, OrderedDict) else own
        own.clear(value)
        own.update(value, contents)

    def differs(self) -> bool:
        value, known = self.value, self.known
        return (
            len(value) != len(known)
            or not all(map(_same, value.values(), known.values()))
            or list(value) != list(known)
        )

    def children(self) -> Iterator[tuple[str, Any]]:
        if len(self.known) <= _MANY:
            for key, value in self.known.items():
                yield f"{self.path}[{key!r}]", value


class _Set(_Changeable):
    __slots__ = ()

    def read(self) -> set[Any]:
        return set(self.value)

    def write(self, contents: set[Any]) -> None:
        set.clear(self.value)
        set.update(self.value, contents)

    def differs(self) -> bool:
        return bool(self.value != self.known)


class _Array(_Changeable):
    """An array of NumPy. A large one is compared only while `watched`, which is cleared if it stays equal."""

    __slots__ = ("watched",)

    def __init__(self, path: str, value: Any) -> None:
        self.watched = True
        super().__init__(path, value)

    def read(self) -> Any:
        return self.value.copy()

    def write(self, contents: Any) -> None:
        self.value[...] = contents

    def differs(self) -> bool:
        return self.watched and not _same_array(self.value, self.known)


class _Tensor(_Changeable):
    """A tensor of PyTorch that is not a variable."""

    __slots__ = ("version",)

    def read(self) -> Any:
        self.version = _version(self.value)
        return self.value.detach().clone()

    def write(self, contents: Any) -> None:
        with sys.modules["torch"].no_grad():
            self.value.copy_(contents)
        self.version = _version(self.value)

    def differs(self) -> bool:
        return bool(_version(self.value) != self.version) and not _same_tensor(self.value, self.known)


class _Generator(_Changeable):
    """A generator of random numbers of Python, NumPy or PyTorch."""

    __slots__ = ()

    def differs(self) -> bool:
        return _text(self.read()) != _text(self.known)

    def read(self) -> Any:
        return generator_state(self.value)

    def write(self, contents: Any) -> None:
        set_generator_state(self.value, contents)


class Changes:
    """What has changed in a graph: new contents, and for holders the attributes that differ.

    Attributes:
        contents: by the positions of the nodes.
        before: the contents before.
    """

    def __init__(
        self, graph: "ObjectGraph", contents: dict[int, Contents], before: dict[int, Contents]
    ) -> None:
        self._graph = graph
        self.contents = contents
        self.before = before

    def __bool__(self) -> bool:
        return bool(self.contents)

    @property
    def values(self) -> list[Key]:
        """The places that have another value: an array or tensor, a plain value, or a container of values."""
        return [
            (position, name)
            for position, name, new in self._attributes()
            if new is not ABSENT and _is_of_values(new)
        ] + [
            (position, "")
            for position, new in self.contents.items()
            if not isinstance(self._graph.nodes[position], _Holder | _Generator) and _is_of_values(new)
        ]

    def _attributes(self) -> Iterator[tuple[int, str, Any]]:
        for position, after in self.contents.items():
            if isinstance(self._graph.nodes[position], _Holder):
                before = self.before[position]
                for name in sorted({**before, **after}):
                    if not _is_symbolic(after.get(name)) and not _same(
                        before.get(name, ABSENT), after.get(name, ABSENT)
                    ):
                        yield position, name, after.get(name, ABSENT)

    def value(self, key: Key) -> Any:
        """Return the new value at a place; the known one if it has not changed."""
        position, name = key
        contents = self.contents[position] if position in self.contents else self._graph.nodes[position].known
        return contents.get(name) if name else contents

    def value_before(self, key: Key) -> Any:
        """Return the value at a place before the changes; `ABSENT` if there was none."""
        position, name = key
        return self.before[position].get(name, ABSENT) if name else self.before[position]

    def places(self, without: Iterable[Key] = ()) -> list[tuple[str, str]]:
        """Return the path of each node that has changed, with each attribute of a holder, or with ""."""
        known, nodes = frozenset(without), self._graph.nodes
        found = [
            (nodes[position].path, name)
            for position, name, _ in self._attributes()
            if (position, name) not in known
        ]
        return found + [
            (nodes[position].path, "")
            for position in self.contents
            if not isinstance(nodes[position], _Holder) and (position, "") not in known
        ]

    def texts(self, without: Iterable[Key] = ()) -> list[str]:
        """Return one text for each change, equal for equal values in all processes, sorted.

        Args:
            without: places to leave out.
        """
        known, found = frozenset(without), []
        for position, name, new in self._attributes():
            if (position, name) not in known:
                found.append(f"{self._graph.nodes[position].path}.{name} = {_text(new)}")
        for position, after in self.contents.items():
            node = self._graph.nodes[position]
            if not isinstance(node, _Holder) and (position, "") not in known:
                found.append(f"{node.path} = {_text(after)}")
        return sorted(found)


class ObjectGraph:
    """The nodes that are reachable from some objects.

    Args:
        roots: with their names for messages.

    Attributes:
        nodes: by their positions, in the order in which they were found.
        variables: the variables of TensorFlow that are not Keras's, by their paths. They are not nodes: the
            backend combines what replicas assign to them, as for variables of Keras.
    """

    def __init__(self, roots: Iterable[tuple[str, Any]]) -> None:
        self.nodes: dict[int, _Changeable] = {}
        self.variables: dict[str, Any] = {}
        self._roots = list(roots)
        self._seen: set[int] = set()
        self._ignored: set[str] = set()
        self._positions = itertools.count()
        self._walk(list(self._roots))
        self._reached = len(self.nodes)

    def refresh(self) -> Changes:
        """Take the present contents as the known ones; return what has differed."""
        changes = self.changes()
        for position, contents in changes.contents.items():
            self.nodes[position].known = contents
        for position, node in list(self.nodes.items()):
            if isinstance(node, _Holder) and node.grown:
                node.grown = False
                self._walk_from(node)
            elif position in changes.contents:
                self._walk_from(node)
        if len(self.nodes) > _GROWTH * self._reached:
            self._forget_unreached()
        return changes

    def changes(self) -> Changes:
        """Return what differs from the known contents."""
        found = [position for position, node in self.nodes.items() if node.differs()]
        after = {position: self.nodes[position].read() for position in found}
        return Changes(self, after, {position: self.nodes[position].known for position in found})

    def restore(self) -> Changes:
        """Restore the known contents; return what has differed."""
        changes = self.changes()
        for position in changes.contents:
            self.nodes[position].write(self.nodes[position].known)
        return changes

    def make(self, changes: Changes) -> None:
        """Make changes that were restored; the known contents stay."""
        for position, contents in changes.contents.items():
            self.nodes[position].write(contents)

    def adopt(self, changes: Changes) -> None:
        """Make changes that were restored, and take the contents as the known ones."""
        for position, contents in changes.contents.items():
            node = self.nodes[position]
            node.write(contents)
            node.known = contents
        for position in changes.contents:
            self._walk_from(self.nodes[position])

    def ignore(self, key: Key) -> None:
        """Leave out what the value at a place refers to: nothing reads it before it is replaced."""
        name = self.name_of(key)
        self._ignored.add(name)
        for position, node in list(self.nodes.items()):
            if node.path.startswith((f"{name}.", f"{name}[")) or (node.path == name and key[1]):
                self._forget(position)
        # It may also be elsewhere.
        for node in list(self.nodes.values()):
            self._walk_from(node)

    def stop_watching(self) -> None:
        """Compare large arrays, which have not changed since they were found, no longer."""
        for node in self.nodes.values():
            if isinstance(node, _Array) and node.value.nbytes > _LARGE:
                node.watched = node.watched and node.differs()
                if not node.watched:
                    # Not a copy, which would take the memory once more.
                    node.known = node.value

    @contextmanager
    def with_value(self, key: Key, value: Any) -> Iterator[None]:
        """Within the block, a place has another value than the known one, or, if it is `ABSENT`, none."""
        node, name = self.nodes[key[0]], key[1]
        if name:
            others = {one: content for one, content in node.known.items() if one != name}
            value = others if value is ABSENT else {**others, name: value}
        node.write(value)
        try:
            yield
        finally:
            node.write(node.known)

    def name_of(self, key: Key) -> str:
        """Name a place for messages."""
        path = self.nodes[key[0]].path
        return f"{path}.{key[1]}" if key[1] else path

    def known_value(self, key: Key) -> Any:
        """Return the known value at a place; None if it has none."""
        known = self.nodes[key[0]].known
        return known.get(key[1]) if key[1] else known

    def values_at(self, places: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Any]:
        """Return the known values at some of `Changes.places`, without those that do not exist any more."""
        nodes = {node.path: node for node in self.nodes.values()}
        found = {}
        for path, name in places:
            if path in nodes and (not name or name in nodes[path].known):
                found[path, name] = nodes[path].known[name] if name else nodes[path].known
        return found

    def set_at(self, path: str, name: str, value: Any) -> bool:
        """Set a value of `values_at`; return whether its node exists."""
        node = next((node for node in self.nodes.values() if node.path == path), None)
        if node is None:
            return False
        node.write({**node.known, name: value} if name else value)
        self.refresh()
        return True

    def _forget_unreached(self) -> None:
        """Leave out the nodes that can be reached no longer, such as lists that steps have replaced."""
        reached = {id(node.value) for node in ObjectGraph(self._roots).nodes.values()}
        for position, node in list(self.nodes.items()):
            if id(node.value) not in reached:
                self._forget(position)
        self._reached = len(self.nodes)

    def _forget(self, position: int) -> None:
        self._seen.discard(id(self.nodes.pop(position).value))

    def _walk_from(self, node: _Changeable) -> None:
        if node.path not in self._ignored:
            self._walk(list(node.children()))

    def _walk(self, waiting: list[tuple[str, Any]]) -> None:
        """Add the nodes among objects, and those that they refer to."""
        waiting.reverse()
        while waiting:
            path, value = waiting.pop()
            if type(value) in _LEAVES or value is None or id(value) in self._seen or path in self._ignored:
                continue
            if isinstance(value, tuple):
                if len(value) <= _MANY:
                    waiting.extend((f"{path}[{i}]", one) for i, one in enumerate(value))
                continue
            if _is_variable(value):
                self._seen.add(id(value))
                self.variables[path] = value
            elif (kind := _kind_of(value)) is not None:
                node = kind(path, value)
                # The node keeps the object, so that its id remains unique.
                self._seen.add(id(value))
                self.nodes[next(self._positions)] = node
                waiting.extend(reversed(list(node.children())))


def graph_of(model: Any, *, named: bool = False) -> ObjectGraph:
    """Return the objects of a model whose attributes its steps may change.

    Args:
        model: built.
        named: whether the objects count that its methods and functions name; see `named_objects`.
    """
    optimizers = optimizers_of(model)
    inner = [getattr(one, "inner_optimizer", None) for one in optimizers]
    loss = getattr(model, "loss", None)
    roots = [("the model", model)]
    # A layer has its path once it is built.
    roots += [
        (f"layer {layer.path or layer.name!r}", layer) for layer in layers_of(model, include_self=False)
    ]
    roots += [(f"metric {metric.name!r}", metric) for metric in flat_metrics(model.metrics)]
    roots += [(f"optimizer {i}", one) for i, one in enumerate([*optimizers, *inner])]
    # Keras also wraps modules of PyTorch that are losses.
    modules = [module for one in [*layers_of(model), *keras.tree.flatten(loss)] for module in modules_of(one)]
    roots += [(f"module {i} ({type(module).__name__})", module) for i, module in enumerate(modules)]
    roots += [] if isinstance(loss, str) else [("the loss", loss)]
    if named:
        parts = [part for _, part in roots if part is not None]
        inner = [one for part in parts for one in getattr(part, "__dict__", {}).values() if callable(one)]
        roots += named_objects([*parts, *inner, *keras.tree.flatten(loss)])
    return ObjectGraph(roots)


def graph_of_function(function: Any) -> ObjectGraph:
    """Return the objects that a function names (see `named_objects`), also the layers and metrics of models.

    A method also names its object.
    """
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", None)
    roots = [] if owner is None or _kind_of(owner) is not _Holder else [(type(owner).__name__, owner)]
    roots += named_objects([function, *(one for _, one in roots)])
    known = ObjectGraph(roots)
    held = [node.value for node in known.nodes.values() if isinstance(node.value, keras.layers.Layer)]
    layers = {id(layer): layer for one in held for layer in layers_of(one)}
    metrics = [metric for layer in layers.values() for metric in flat_metrics(getattr(layer, "metrics", ()))]
    roots += [(f"layer {layer.path or layer.name!r}", layer) for layer in layers.values()]
    roots += [(f"metric {metric.name!r}", metric) for metric in metrics]
    return ObjectGraph(roots)


def named_objects(parts: Iterable[Any]) -> list[tuple[str, Any]]:
    """Return the objects with attributes, and generators of random numbers, that functions name, as roots.

    They are global variables, and variables of enclosing functions. Functions of the program that these
    functions name also count.

    Args:
        parts: functions, and objects, of which the methods count.
    """
    found: dict[int, tuple[str, Any]] = {}
    waiting = [function for part in parts for function in _functions_of(part)]
    known: set[int] = set()
    while waiting:
        function = waiting.pop()
        if id(function) in known:
            continue
        known.add(id(function))
        for name, value in _named_by(function):
            if isinstance(value, types.FunctionType):
                waiting += [value] if _is_in_program(value.__module__) else []
            elif _kind_of(value) in (_Generator, _Holder) and id(value) not in found:
                found[id(value)] = f"the variable {name!r}", value
                waiting += _functions_of(value)
    return list(found.values())


def _functions_of(part: Any) -> list[types.FunctionType]:
    """Return a function, or the methods of the program's own classes of an object."""
    part = inspect.unwrap(part) if callable(part) else part
    if isinstance(part, types.MethodType):
        part = part.__func__
    if isinstance(part, types.FunctionType):
        return [part]
    members = [member for cls in type(part).__mro__ if _is_of_program(cls) for member in vars(cls).values()]
    unwrapped = [getattr(member, "__func__", getattr(member, "fget", member)) for member in members]
    functions = [inspect.unwrap(one) if callable(one) else one for one in unwrapped]
    return [one for one in functions if isinstance(one, types.FunctionType)]


def _named_by(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the global variables, and variables of enclosing functions, that a function names."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # It has no value yet.
            yield name, cell.cell_contents
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [one for one in code.co_consts if isinstance(one, types.CodeType)]
        for name in code.co_names:
            if name in function.__globals__:
                yield name, function.__globals__[name]


def unchanged(model: Any) -> "Kept":
    """Within a block, what the program changes in Python attributes of a model is undone.

    So is what it assigns to variables of TensorFlow in them.
    """
    return Kept(graph_of(model))


class Kept:
    """A context in which nothing lasts that changes a graph."""

    def __init__(self, graph: ObjectGraph) -> None:
        self._graph = graph
        self._values: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        self._graph.refresh()
        self._values = [(variable, variable.numpy()) for variable in self._graph.variables.values()]

    def __exit__(self, *error: Sequence[Any]) -> None:
        self._graph.restore()
        for variable, value in self._values:
            if not _same_array(variable.numpy(), value):
                variable.assign(value)


def encoded(value: Any) -> Any:
    """Return a value in a form that a checkpoint can hold, for `decoded`.

    Raises:
        TypeError: it contains an object that a checkpoint cannot hold.
    """
    if value is None or type(value) in (*_LEAVES, np.ndarray) or isinstance(value, np.generic):
        return value
    if _is_tensor(value):
        return {"kind": "tensor", "items": keras.ops.convert_to_numpy(value)}
    if isinstance(value, dict):
        return {"kind": "dict", "items": [[encoded(key), encoded(one)] for key, one in value.items()]}
    for kind in (tuple, set, deque, list):
        if isinstance(value, kind):
            items = sorted(value, key=repr) if kind is set else value
            return {"kind": kind.__name__, "items": [encoded(one) for one in items]}
    raise TypeError(f"a {type(value).__name__} cannot be saved in a checkpoint")


def decoded(value: Any) -> Any:
    """Return a value of `encoded`, perhaps of another process."""
    if not isinstance(value, dict):
        return value
    kind, items = value["kind"], value["items"]
    if kind == "tensor":
        return keras.ops.convert_to_tensor(items)
    if kind == "dict":
        return {decoded(key): decoded(one) for key, one in items}
    kinds: dict[str, Callable[[Iterable[Any]], Any]] = {"tuple": tuple, "set": set, "deque": deque}
    return kinds.get(kind, list)(decoded(one) for one in items)


def text_of(value: Any) -> str:
    """Return a text that shows a value, and is equal only for equal values as far as it can tell."""
    return _text(value)


def is_value(value: Any) -> bool:
    """Whether a value is plain, an array or a tensor: it has no attributes of its own that change."""
    return type(value) in _LEAVES or isinstance(value, np.ndarray | np.generic) or _is_tensor(value)


def _is_of_values(value: Any, depth: int = 0) -> bool:
    """Whether a value is plain, an array or a tensor, or consists of such values only."""
    if value is None or is_value(value):
        return True
    if depth > _DEEP or not isinstance(value, dict | list | tuple | deque | set) or len(value) > _MANY:
        return False
    items = value.values() if isinstance(value, dict) else value
    return all(_is_of_values(one, depth + 1) for one in items)


def disturbed(value: Any) -> Any:
    """Return another value of the same type, dtype and shape; None if there is none.

    In a container, all values are others that can be.
    """
    if isinstance(value, dict):
        others = disturbed(list(value.values()))
        return None if others is None else dict(zip(value, others, strict=True))
    if isinstance(value, list | tuple | deque | set):
        pairs = [(one, disturbed(one)) for one in value]
        if all(other is None for _, other in pairs):
            return None
        kind = next(kind for kind in (list, tuple, deque, set) if isinstance(value, kind))
        return kind(one if other is None else other for one, other in pairs)
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


def _kind_of(value: Any) -> Callable[[str, Any], _Changeable] | None:
    """Return the class of the node for an object; None for objects that are looked at as a whole."""
    if isinstance(value, type | types.ModuleType | types.FunctionType | types.MethodType | keras.Variable):
        return None
    if isinstance(value, dict):
        return _Dict
    if isinstance(value, list | deque):
        return _List
    if isinstance(value, set):
        return _Set
    if isinstance(value, np.ndarray):
        return _Array if value.dtype.kind in "biufcSUV" and value.flags.writeable else None
    if isinstance(value, random.Random | np.random.Generator | np.random.RandomState):
        return _Generator
    torch = sys.modules.get("torch")
    if torch is not None:
        if isinstance(value, torch.nn.Parameter):
            return None
        if isinstance(value, torch.Tensor):
            return _Tensor if value.layout == torch.strided and not value.is_meta else None
        if isinstance(value, torch.Generator):
            return _Generator
    if not hasattr(value, "__dict__"):
        return None
    kind: Any = type(value)
    holds = isinstance(value, KERAS_HOLDERS + _PLAIN_HOLDERS) or _is_of_program(kind)
    return _Holder if holds else None


@cache
def _is_of_program(cls: Any) -> bool:
    """Whether a class is the program's own, and not of a library."""
    return _is_in_program(cls.__module__)


@cache
def _is_in_program(name: str | None) -> bool:
    """Whether a module is the program's own, and not of a library."""
    if name is None or name in ("builtins", "lockstep") or name.startswith("lockstep."):
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:
        try:
            return name == "__main__" or importlib.util.find_spec(name) is None
        except (ImportError, ValueError):
            return True
    return not file.startswith(_LIBRARIES)


def _is_variable(value: Any) -> bool:
    """Whether a value is a variable of TensorFlow with numbers, which belongs to no variable of Keras."""
    kind: Any = getattr(sys.modules.get("tensorflow"), "Variable", None)
    if kind is None or not isinstance(value, kind):
        return False
    return bool(value.dtype.is_floating or value.dtype.is_integer or value.dtype.is_bool)


def _is_module(value: Any) -> bool:
    """Whether a value is a module of PyTorch, which keeps its state in attributes that layers have, too."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def _is_tensor(value: Any) -> bool:
    """Whether a value is a tensor with numbers that is not a variable."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        # Keras calls models with meta tensors to find shapes.
        return not isinstance(value, torch.nn.Parameter) and not value.is_meta
    if isinstance(value, keras.Variable | keras.KerasTensor) or _is_symbolic(value):
        return False
    return bool(keras.ops.is_tensor(value))


def _is_symbolic(value: Any) -> bool:
    """Whether a value belongs to a function that JAX traces: nothing can use it after the trace."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.core.Tracer)


def _same(one: Any, other: Any) -> bool:
    """Whether two references are to the same object, or to equal values that cannot change."""
    if one is other:
        return True
    kind = type(one)
    if kind is not type(other):
        return False
    if kind is float:
        return struct.pack("d", one) == struct.pack("d", other)
    if kind in _LEAVES:
        return repr(one) == repr(other) if kind is complex else bool(one == other)
    if kind is tuple:
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, np.generic) and one.tobytes() == other.tobytes()


def _same_array(one: Any, other: Any) -> bool:
    return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())


def _version(tensor: Any) -> int:
    from lockstep.keras.private.torch import versions

    return versions([tensor])[0]


def _same_tensor(one: Any, other: Any) -> bool:
    equal = one.shape == other.shape and one.dtype == other.dtype
    return equal and _same_array(*(np.asarray(keras.ops.convert_to_numpy(each)) for each in (one, other)))


_SHOWN = 60


def _text(value: Any, depth: int = 0) -> str:
    """Return a text that shows a value, and is equal only for equal values as far as it can tell."""
    if value is ABSENT:
        return "nothing"
    if value is None or type(value) in _LEAVES:
        text = repr(value)
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... #{_hash(text.encode())}"
    if isinstance(value, np.ndarray | np.generic) or _is_tensor(value):
        array = keras.ops.convert_to_numpy(value)
        if array.ndim == 0:
            return f"{array.dtype} {array.item()!r}"
        return f"{array.dtype}{list(array.shape)} #{_hash(np.ascontiguousarray(array).tobytes())}"
    if depth > _DEEP:
        return type(value).__name__
    # Not the names of the classes by which Keras and TensorFlow replace containers.
    if isinstance(value, Mapping):
        kind = "dict"
        parts = [f"{_text(key, depth + 1)}: {_text(one, depth + 1)}" for key, one in value.items()]
    elif isinstance(value, set | frozenset):
        kind = "set"
        parts = sorted(_text(one, depth + 1) for one in value)
    elif isinstance(value, list | tuple | deque):
        kind = next(kind.__name__ for kind in (list, tuple, deque) if isinstance(value, kind))
        parts = [_text(one, depth + 1) for one in value]
    else:
        return type(value).__name__
    text = f"{kind}({', '.join(parts)})"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... #{_hash(text.encode())}"


def _hash(data: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data)
