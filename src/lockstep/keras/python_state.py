"""The state that a program keeps in Python: attributes of its model, and of the objects that it reaches.

A graph of objects is a list of nodes, the objects that can change: holders of attributes, containers, arrays,
tensors and generators of random numbers. The contents of a node are shallow: the objects to which it refers,
but not their contents. So a comparison looks at each reference once, and restoring keeps every object's
identity. The baseline of a node is a copy of its contents, with which it is compared and to which it is
restored.

Comparing and restoring a graph around each replica takes a third of a millisecond a step for 20 layers.
"""

import argparse
import functools
import importlib.util
import inspect
import itertools
import math
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
from typing import Any, NamedTuple

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
LARGE = 1 << 20
"""Bytes of an array above which it is compared only if it has changed in the first steps."""
_LIBRARIES = tuple(
    {*site.getsitepackages(), *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))}
)
_PLAIN_HOLDERS = (types.SimpleNamespace, argparse.Namespace)
_LEAVES = (bool, int, float, complex, str, bytes)
_GROWTH = 4
"""When a graph has so many times the nodes that could be reached at first, unreachable ones are removed."""
CONTAINERS = (dict, list, tuple, deque, set, frozenset)
NESTED = 3
"""The depth of containers within containers up to which values are read."""
_DEEP = 20
"""The depth of containers within containers up to which contents are shown."""
ABSENT: Any = object()

Contents = Any
Key = tuple[int, str]
"""A place: a node, by its position in the graph, and an attribute of it; "" for its whole contents."""


class _Changeable:
    """An object that can change.

    Attributes:
        path: names it in messages.
        baseline: a copy of its contents.
    """

    __slots__ = ("baseline", "path", "value")

    def __init__(self, path: str, value: Any) -> None:
        self.path = path
        self.value = value
        self.baseline = self.read()

    def read(self) -> Contents:
        """Return a copy of its contents."""
        raise NotImplementedError

    def write(self, contents: Contents) -> None:
        """Replace its contents."""
        raise NotImplementedError

    def differs(self) -> bool:
        """Whether its contents differ from its baseline."""
        raise NotImplementedError

    def children(self) -> Iterator[tuple[str, Any]]:
        """Yield the objects to which its baseline refers, by paths."""
        yield from ()


class _Holder(_Changeable):
    """An object with attributes. The attributes of Keras and its backend do not count.

    New parts, such as the variables that a layer creates when it is built, are not changes, because Keras
    creates them once.

    Attributes:
        grown: whether it has new parts that have not been searched for nodes.
    """

    __slots__ = ("attributes", "built", "grown", "ignored", "is_model", "keys", "values")

    def __init__(self, path: str, value: Any) -> None:
        self.attributes: dict[str, Any] = vars(value)
        self.ignored = (
            OWN_ATTRIBUTES if isinstance(value, KERAS_HOLDERS) or _is_module(value) else frozenset()
        )
        self.is_model = isinstance(value, keras.Model)
        if self.is_model:
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
        # JAX compiles nothing anew for the next `compile` while the functions of the last one live.
        attributes, baseline = self.read() if self.is_model else self.attributes, self.baseline
        if (
            len(attributes) == len(self.values)
            and all(map(is_, attributes.values(), self.values))
            and all(map(is_, attributes, self.keys))
        ):
            return False
        now = self.read()
        self._grow(now)
        if now.keys() != baseline.keys() or not all(
            _same(value, baseline[name]) for name, value in now.items()
        ):
            self.keys, self.values = [], []
            return True
        self.keys, self.values = list(attributes), list(attributes.values())
        return False

    def _grow(self, now: Mapping[str, Any]) -> None:
        """Add new parts of the object to its baseline."""
        baseline, was_built = self.baseline, self.built
        self.built = self.attributes.get("built")
        for name, value in now.items():
            before = baseline.get(name)
            if self.built is not was_built and name not in baseline:
                # Such as the bias of a layer without one, which is None.
                self.grown, baseline[name] = True, value
                continue
            if self.built is not was_built:
                part = before is None or not (type(before) in _LEAVES and type(value) in _LEAVES)
            else:
                part = before is None and isinstance(value, (keras.Variable, *KERAS_HOLDERS))
            if part and value is not before:
                self.grown, baseline[name] = True, value

    def children(self) -> Iterator[tuple[str, Any]]:
        for name, value in self.baseline.items():
            yield f"{self.path}.{name}", value


class _Variables(_Holder):
    """Variables that functions name: global ones of a module, those of enclosing functions, or of a class.

    Args:
        path: as for every node.
        value: where each of them is, by its name.
    """

    __slots__ = ()

    def __init__(self, path: str, value: "dict[str, Place]") -> None:
        self.grown = False
        _Changeable.__init__(self, path, value)

    def read(self) -> dict[str, Any]:
        values = ((name, value_of(place, name)) for name, place in self.value.items())
        return {name: value for name, value in values if value is not ABSENT}

    def write(self, contents: Mapping[str, Any]) -> None:
        for name, place in self.value.items():
            if (new := contents.get(name, ABSENT)) is not value_of(place, name):
                set_value(place, name, new)

    def differs(self) -> bool:
        now, baseline = self.read(), self.baseline
        return now.keys() != baseline.keys() or not all(map(_same, now.values(), baseline.values()))


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
            # The method of Keras's lists would search the values for layers.
            list.__setitem__(value, slice(None), contents)
        else:
            value[:] = contents

    def differs(self) -> bool:
        value, baseline = self.value, self.baseline
        return len(value) != len(baseline) or not (
            all(map(is_, value, baseline)) or all(map(_same, value, baseline))
        )

    def children(self) -> Iterator[tuple[str, Any]]:
        if len(self.baseline) <= _MANY:
            for i, value in enumerate(self.baseline):
                yield f"{self.path}[{i}]", value


class _Dict(_Changeable):
    __slots__ = ()

    def read(self) -> dict[Any, Any]:
        return dict(self.value)

    def write(self, contents: Mapping[Any, Any]) -> None:
        value = self.value
        # A class of TensorFlow only behaves like a dict.
        base_class: Any = dict if issubclass(type(value), dict) else type(value)
        base_class = OrderedDict if isinstance(value, OrderedDict) else base_class
        base_class.clear(value)
        base_class.update(value, contents)

    def differs(self) -> bool:
        value, baseline = self.value, self.baseline
        return (
            len(value) != len(baseline)
            or not all(map(_same, value.values(), baseline.values()))
            or list(value) != list(baseline)
        )

    def children(self) -> Iterator[tuple[str, Any]]:
        if len(self.baseline) <= _MANY:
            for key, value in self.baseline.items():
                yield f"{self.path}[{key!r}]", value


class _Set(_Changeable):
    __slots__ = ()

    def read(self) -> set[Any]:
        return set(self.value)

    def write(self, contents: set[Any]) -> None:
        set.clear(self.value)
        set.update(self.value, contents)

    def differs(self) -> bool:
        return bool(self.value != self.baseline)


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
        return self.watched and not _same_array(self.value, self.baseline)


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
        return bool(_version(self.value) != self.version) and not _same_tensor(self.value, self.baseline)


class _Generator(_Changeable):
    """A generator of random numbers of Python, NumPy or PyTorch."""

    __slots__ = ()

    def differs(self) -> bool:
        return _text(self.read()) != _text(self.baseline)

    def read(self) -> Any:
        return generator_state(self.value)

    def write(self, contents: Any) -> None:
        set_generator_state(self.value, contents)


class Changes:
    """Changes in a graph: the new contents of nodes, and the attributes of holders that differ.

    Attributes:
        contents: the new contents by the positions of the nodes.
        before: the contents before the changes.
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
        """The places with another value: an array or tensor, a plain value, or a container of values."""
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
        """Return the new value at a place; the baseline if it has not changed."""
        position, name = key
        contents = (
            self.contents[position] if position in self.contents else self._graph.nodes[position].baseline
        )
        return contents.get(name) if name else contents

    def value_before(self, key: Key) -> Any:
        """Return the value at a place before the changes; `ABSENT` if it did not exist."""
        position, name = key
        return self.before[position].get(name, ABSENT) if name else self.before[position]

    def places(self, without: Iterable[Key] = ()) -> list[tuple[str, str]]:
        """Return the path of each node that has changed, with each attribute of a holder, or with ""."""
        excluded, nodes = frozenset(without), self._graph.nodes
        places = [
            (nodes[position].path, name)
            for position, name, _ in self._attributes()
            if (position, name) not in excluded
        ]
        return places + [
            (nodes[position].path, "")
            for position in self.contents
            if not isinstance(nodes[position], _Holder) and (position, "") not in excluded
        ]

    def texts(self, without: Iterable[Key] = ()) -> list[str]:
        """Return one text for each change, equal for equal values in all processes, sorted.

        Args:
            without: places to leave out.
        """
        excluded, texts = frozenset(without), []
        for position, name, new in self._attributes():
            if (position, name) not in excluded:
                texts.append(f"{self._graph.nodes[position].path}.{name} = {_text(new)}")
        for position, after in self.contents.items():
            node = self._graph.nodes[position]
            if not isinstance(node, _Holder) and (position, "") not in excluded:
                texts.append(f"{node.path} = {_text(after)}")
        return sorted(texts)


class ObjectGraph:
    """The nodes that are reachable from some objects.

    Args:
        roots: the objects, with their names for messages.

    Attributes:
        nodes: the nodes by their positions, in the order in which they were found.
        variables: the variables of TensorFlow that are not Keras's, by their paths. They are not nodes: the
            backend combines what replicas assign to them, as for variables of Keras.
    """

    def __init__(self, roots: Iterable[tuple[str, Any]]) -> None:
        self.nodes: dict[int, _Changeable] = {}
        self.variables: dict[str, Any] = {}
        self._roots = list(roots)
        self._nodes_of: dict[int, _Changeable] = {}
        self._seen: set[int] = set()
        owners = [root.path for _, root in self._roots if isinstance(root, _Variables)]
        self._named = tuple(f"{owner}." for owner in owners)
        self._ignored: set[str] = set()
        self._positions = itertools.count()
        self._walk(list(self._roots))
        self._reached = len(self.nodes)

    def refresh(self) -> Changes:
        """Make the present contents the baseline, and return the changes."""
        changes = self.changes()
        for position, contents in changes.contents.items():
            self.nodes[position].baseline = contents
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
        """Return the changes from the baseline."""
        differing = [position for position, node in self.nodes.items() if node.differs()]
        after = {position: self.nodes[position].read() for position in differing}
        return Changes(self, after, {position: self.nodes[position].baseline for position in differing})

    def restore(self) -> Changes:
        """Restore the baseline, and return the changes."""
        changes = self.changes()
        for position in changes.contents:
            self.nodes[position].write(self.nodes[position].baseline)
        return changes

    def make(self, changes: Changes) -> None:
        """Make changes again that were undone; the baseline stays."""
        for position, contents in changes.contents.items():
            self.nodes[position].write(contents)

    def make_where_unchanged(self, changes: Changes) -> None:
        """Make changes again that were undone, where the present values are those of the baseline."""
        for position, contents in changes.contents.items():
            node, before = self.nodes[position], changes.before[position]
            present = node.read()
            if isinstance(node, _Holder):
                for name in {**before, **contents}:
                    if _same(present.get(name, ABSENT), before.get(name, ABSENT)):
                        present[name] = contents.get(name, ABSENT)
                contents = {name: value for name, value in present.items() if value is not ABSENT}
            elif node.differs():
                continue
            node.write(contents)

    def adopt(self, changes: Changes) -> None:
        """Make changes again that were undone, and make the contents the baseline."""
        for position, contents in changes.contents.items():
            node = self.nodes[position]
            node.write(contents)
            node.baseline = contents
        for position in changes.contents:
            self._walk_from(self.nodes[position])

    def ignore(self, key: Key) -> None:
        """Remove the objects to which the value at a place refers: steps replace it before they read it."""
        name = self.name_of(key)
        self._ignored.add(name)
        for position, node in list(self.nodes.items()):
            if node.path.startswith((f"{name}.", f"{name}[")) or (node.path == name and key[1]):
                self._forget(position)
        # Some of them may also be referred to from elsewhere.
        for node in list(self.nodes.values()):
            self._walk_from(node)

    def stop_watching(self) -> None:
        """Stop comparing large arrays that have not changed since they were found."""
        for node in self.nodes.values():
            if isinstance(node, _Array) and node.value.nbytes > LARGE:
                node.watched = node.watched and node.differs()
                if not node.watched:
                    # Not a copy, which would take the same memory again.
                    node.baseline = node.value

    @contextmanager
    def with_value(self, key: Key, value: Any) -> Iterator[None]:
        """Within the block, a place has another value than its baseline; `ABSENT` removes the attribute."""
        node, name = self.nodes[key[0]], key[1]
        if name:
            others = {attribute: content for attribute, content in node.baseline.items() if attribute != name}
            value = others if value is ABSENT else {**others, name: value}
        node.write(value)
        try:
            yield
        finally:
            node.write(node.baseline)

    def name_of(self, key: Key) -> str:
        """Name a place for messages."""
        path = self.nodes[key[0]].path
        return f"{path}.{key[1]}" if key[1] else path

    def baseline_value(self, key: Key) -> Any:
        """Return the baseline at a place, or None if it does not exist."""
        contents = self.nodes[key[0]].baseline
        return contents.get(key[1]) if key[1] else contents

    def begin_with(self, saved: Iterable["SavedValue"]) -> None:
        """Make saved values the baseline at their places. The present values stay."""
        present: dict[int, tuple[_Changeable, Contents]] = {}
        for path, name, value in saved:
            if (node := self._node_at(path)) is not None:
                present.setdefault(id(node), (node, node.read()))
                self.set_saved(path, name, value)
        for node, contents in present.values():
            node.write(contents)

    def values_at(self, places: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Any]:
        """Return the baselines at some of `Changes.places`, without those of objects that no longer exist.

        An attribute that does not exist is `ABSENT`.
        """
        nodes = {node.path: node for node in self.nodes.values()}
        self._nodes_of = {id(node.value): node for node in nodes.values()}
        values = {}
        for path, name in places:
            node = nodes.get(path)
            if node is not None and not (isinstance(node, _Variables) and name not in node.value):
                is_generator = isinstance(node, _Generator)
                own = node.baseline if is_generator else node.value
                value = node.baseline.get(name, ABSENT) if name else own
                values[path, name] = self._with_baselines(value)
        return values

    def _with_baselines(self, value: Any, depth: int = 0) -> Any:
        """Return a value with the baselines of the containers and arrays in it."""
        node = self._nodes_of.get(id(value))
        if depth > _DEEP or not (isinstance(node, _List | _Dict | _Set | _Array | _Tensor)):
            return value
        if isinstance(node, _Dict):
            return {key: self._with_baselines(item, depth + 1) for key, item in node.baseline.items()}
        if isinstance(node, _List):
            items = [self._with_baselines(item, depth + 1) for item in node.baseline]
            return deque(items) if isinstance(value, deque) else items
        return node.baseline

    def set_at(self, path: str, name: str, value: Any) -> bool:
        """Set a value of `values_at`, and return whether its node exists."""
        node = self._node_at(path)
        if node is None:
            return False
        if name:
            contents = {**node.baseline, name: value}
            value = {each: content for each, content in contents.items() if content is not ABSENT}
        node.write(value)
        self.refresh()
        return True

    def set_saved(self, path: str, name: str, value: Any) -> bool:
        """Work like `set_at`, with an `encoded` value. Containers that are equal already stay the same."""
        node, new = self._node_at(path), decoded(value)
        if node is None:
            return False
        own = node.baseline.get(name) if name else node.baseline
        try:
            return self.set_at(path, name, _with_own(own, new) if name else _with_own_items(own, new))
        except ValueError:
            return False  # An array of another shape, of an edited script.

    def _node_at(self, path: str) -> _Changeable | None:
        return next((node for node in self.nodes.values() if node.path == path), None)

    def _forget_unreached(self) -> None:
        """Remove the nodes that cannot be reached any more, such as lists that steps have replaced."""
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
        """Add the nodes among objects, and the nodes to which they refer."""
        waiting.reverse()
        while waiting:
            path, value = waiting.pop()
            if type(value) in _LEAVES or value is None or id(value) in self._seen or path in self._ignored:
                continue
            if isinstance(value, tuple):
                if len(value) <= _MANY:
                    waiting.extend((f"{path}[{i}]", item) for i, item in enumerate(value))
                continue
            if _is_variable(value):
                self._seen.add(id(value))
                self.variables[path] = value
                continue
            node: _Changeable | None = value if isinstance(value, _Variables) else None
            if path.startswith(self._named) and _is_large(value):
                # Constants, such as the examples, are often in variables that functions name.
                continue
            if node is None and (node_class := _node_class(value)) is not None:
                node = node_class(path, value)
            if node is not None:
                # The node keeps the object, so that its id remains unique.
                self._seen.update((id(value), id(node.value)))
                self.nodes[next(self._positions)] = node
                waiting.extend(reversed(list(node.children())))


def graph_of(model: Any, *, named: bool = False) -> ObjectGraph:
    """Return the objects of a model whose attributes its steps may change.

    Args:
        model: the model, built.
        named: whether to include the variables that its functions name, and the objects in them.
    """
    variables = [(owner, _Variables(owner, each)) for owner, each in variables_of(model)] if named else []
    return ObjectGraph([*_roots_of(model), *variables])


def _roots_of(model: Any) -> list[tuple[str, Any]]:
    optimizers = optimizers_of(model)
    inner = [getattr(optimizer, "inner_optimizer", None) for optimizer in optimizers]
    loss = getattr(model, "loss", None)
    roots = [("the model", model)]
    # A layer has its path once it is built.
    roots += [
        (f"layer {layer.path or layer.name!r}", layer) for layer in layers_of(model, include_self=False)
    ]
    roots += [(f"metric {metric.name!r}", metric) for metric in flat_metrics(model.metrics)]
    roots += [(f"optimizer {i}", optimizer) for i, optimizer in enumerate([*optimizers, *inner])]
    # Keras also wraps modules of PyTorch that are losses.
    modules = [
        module for part in [*layers_of(model), *keras.tree.flatten(loss)] for module in modules_of(part)
    ]
    roots += [(f"module {i} ({type(module).__name__})", module) for i, module in enumerate(modules)]
    return roots if isinstance(loss, str) else [*roots, ("the loss", loss)]


def model_objects(model: Any) -> list[tuple[str, Any, list[str]]]:
    """Return a model and its parts, each with its path and the names of its own attributes."""
    found = [(path, part) for path, part in _roots_of(model) if _node_class(part) is _Holder]
    return [(path, part, list(_Holder(path, part).baseline)) for path, part in found]


def graph_of_function(function: Any) -> ObjectGraph:
    """Return the objects that a function names (see `named_objects`), with layers and metrics of models.

    A method also names its object.
    """
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", None)
    roots = [] if owner is None or _node_class(owner) is not _Holder else [(type(owner).__name__, owner)]
    roots += named_objects([function, *(root for _, root in roots)])
    graph = ObjectGraph(roots)
    held = [node.value for node in graph.nodes.values() if isinstance(node.value, keras.layers.Layer)]
    layers = {id(layer): layer for outer in held for layer in layers_of(outer)}
    metrics = [metric for layer in layers.values() for metric in flat_metrics(getattr(layer, "metrics", ()))]
    roots += [(f"layer {layer.path or layer.name!r}", layer) for layer in layers.values()]
    roots += [(f"metric {metric.name!r}", metric) for metric in metrics]
    return ObjectGraph(roots)


def named_objects(parts: Iterable[Any]) -> list[tuple[str, Any]]:
    """Return the objects with attributes, and generators of random numbers, that functions name, as roots.

    They are global variables, and variables of enclosing functions. Functions of the program that these
    functions name also count.

    Args:
        parts: functions, and objects whose methods count.
    """
    roots: dict[int, tuple[str, Any]] = {}
    for name, value, *_ in _named(parts):
        if _node_class(value) in (_Generator, _Holder):
            roots.setdefault(id(value), (f"the variable {name!r}", value))
    return list(roots.values())


class _Named(NamedTuple):
    """What a function names.

    Attributes:
        name: the name.
        value: the object.
        place: the variable of an enclosing function, or the global variables of the function's module.
    """

    name: str
    value: Any
    place: types.CellType | dict[str, Any]


def _named(parts: Iterable[Any]) -> Iterator[_Named]:
    """Yield what functions name; see `named_objects`."""
    for function in _reached_functions(parts):
        yield from _named_by(function)


def _reached_functions(parts: Iterable[Any]) -> Iterator[types.FunctionType]:
    """Yield functions, and those of the program that they name; see `named_objects`."""
    waiting = [function for part in parts for function in _functions_of(part)]
    visited: set[int] = set()
    while waiting:
        function = waiting.pop()
        if id(function) in visited:
            continue
        visited.add(id(function))
        yield function
        for value in (named.value for named in _named_by(function)):
            if isinstance(value, types.FunctionType):
                waiting += [value] if is_in_program(value.__module__) else []
            elif _node_class(value) in (_Generator, _Holder) and id(value) not in visited:
                visited.add(id(value))
                waiting += _functions_of(value)


class _Reached(NamedTuple):
    """What parts of a program reach.

    Attributes:
        objects: the objects of the program with attributes.
        functions: the functions of the program.
        named: what the functions name, with the functions.
        spaces: the modules and classes of the program that the functions name.
        names: the words in the functions that may be names of attributes.
        texts: the texts in them.
    """

    objects: list[Any]
    functions: list[types.FunctionType]
    named: list[tuple[types.FunctionType, _Named]]
    spaces: list[Any]
    names: set[str]
    texts: set[str]


def reached_by(parts: Sequence[Any]) -> _Reached:
    """Return what functions, and objects whose methods count, reach."""
    objects, members = objects_in(parts), list[Any]()
    while True:
        reached = _reached_functions([*objects, *parts, *_callables_in(parts), *members])
        functions = [function for function in reached if is_in_program(function.__module__)]
        named = [(function, each) for function in functions for each in _named_by(function)]
        spaces = _spaces_in(each.value for _, each in named)
        names, texts = _words_of(functions)
        found = objects_in([*parts, *(each.value for _, each in named)])
        inner = [vars(space)[name] for space in spaces for name in sorted(names & vars(space).keys())]
        inner = [member for member in inner if isinstance(member, types.FunctionType)]
        if len(found) == len(objects) and len(inner) == len(members):
            return _Reached(objects, functions, named, spaces, names, texts)
        objects, members = found, inner


Place = types.CellType | dict[str, Any] | type | types.ModuleType
"""Where a variable is: one of an enclosing function, global variables, or a class or module."""


def variables_of(model: Any, callbacks: Sequence[Any] = ()) -> list[tuple[str, dict[str, Place]]]:
    """Return what functions of a model and of callbacks name, and where it is; see `reached_by`.

    The paths with them are equal in all processes of a job.
    """
    parts = [part for _, part in _roots_of(model) if part is not None]
    parts += [*keras.tree.flatten(getattr(model, "loss", None)), *callbacks]
    reached = reached_by(parts)
    places: dict[str, dict[str, Place]] = {}
    cells: dict[int, str] = {}
    for function, (name, value, place) in reached.named:
        if isinstance(value, types.ModuleType | type):
            continue
        if isinstance(place, dict):
            places.setdefault(function.__module__, {})[name] = place
        elif id(place) not in cells:
            owner = base = f"{function.__module__}.{function.__qualname__}"
            numbers = itertools.count(2)
            # Several functions may come from one definition.
            while name in places.get(owner, {}):
                owner = f"{base}#{next(numbers)}"
            cells[id(place)] = owner
            places.setdefault(owner, {})[name] = place
    classes = [each for part in (*parts, *reached.objects) for each in _spaces_in([type(part)])]
    for space in [*reached.spaces, *classes]:
        owner = f"{space.__module__}.{space.__qualname__}" if isinstance(space, type) else space.__name__
        for name in sorted(reached.names & vars(space).keys()):
            value = vars(space)[name]
            if not (name.startswith("__") or isinstance(value, types.ModuleType | type)):
                if isinstance(space, type) and hasattr(type(value), "__get__"):
                    continue  # Such as a method.
                places.setdefault(owner, {}).setdefault(name, space)
    return list(places.items())


class Number(NamedTuple):
    """A place with a number.

    Attributes:
        value: the number, or an array with one element.
        set: sets another number of the same type, or another array.
        reset: sets the value again.
    """

    value: Any
    set: Callable[[Any], object]
    reset: Callable[[], object]


def numbers_of(model: Any) -> list[Number]:
    """Return the numbers outside of Keras's variables that a model, its losses and their functions refer to.

    They are in attributes of the program's objects, in containers, and in global variables and variables of
    enclosing functions: floats of Python and NumPy, arrays and tensors of floats with one element, and
    variables of TensorFlow with one element. Attributes of metrics and optimizers do not count.
    """
    parts = parts_of(model)
    waiting: list[Number] = []
    for name, value, place in _named([*parts, *_callables_in(parts)]):
        if isinstance(place, types.CellType):
            setter = functools.partial(setattr, place, "cell_contents")
            waiting.append(Number(value, setter, functools.partial(setter, value)))
        else:
            waiting.append(_item(place, name, value))
    numbers: list[Number] = []
    seen: set[int] = set()
    containers = [*parts]
    while waiting or containers:
        if containers:
            waiting += _items(containers.pop())
            continue
        number = waiting.pop()
        value = number.value
        if is_float(value):
            numbers.append(number)
        elif id(value) not in seen:
            seen.add(id(value))
            containers.append(value)
            numbers += _array(value)
    return numbers


def parts_of(model: Any) -> list[Any]:
    """Return a model, its layers and losses, and the modules of PyTorch in them."""
    layers = layers_of(model)
    modules = [module for layer in layers for module in modules_of(layer)]
    return [*layers, *keras.tree.flatten(getattr(model, "loss", None)), *modules]


def _spaces_in(values: Iterable[Any]) -> list[Any]:
    """Return the modules and classes of the program among some values, and the classes' base classes."""
    spaces: dict[int, Any] = {}
    for value in values:
        if isinstance(value, type):
            spaces.update((id(each), each) for each in value.__mro__ if _is_of_program(each))
        elif isinstance(value, types.ModuleType) and is_in_program(value.__name__):
            spaces[id(value)] = value
    return list(spaces.values())


def objects_in(values: Iterable[Any]) -> list[Any]:
    """Return the objects of the program with attributes among some values, and those to which they refer."""
    objects: dict[int, Any] = {}
    seen: set[int] = set()
    waiting = list(values)[::-1]
    while waiting:
        value = waiting.pop()
        if type(value) in _LEAVES or value is None or id(value) in seen:
            continue
        if isinstance(value, CONTAINERS):
            seen.add(id(value))
            items = value.values() if isinstance(value, dict) else value
            # The order of a set of objects differs between processes.
            visits = len(value) <= _MANY and not isinstance(value, set | frozenset)
            waiting += list(items)[::-1] if visits else []
        elif _may_choose(value):
            seen.add(id(value))
            objects[id(value)] = value
            waiting += [attribute_of(value, name) for name in sorted(attribute_names(value), reverse=True)]
    return list(objects.values())


def _may_choose(value: Any) -> bool:
    """Whether the attributes of an object are the program's: it is a model, or of a class of the program."""
    if _node_class(value) is not _Holder or isinstance(value, keras.Metric | keras.Optimizer):
        return False
    return isinstance(value, (keras.Model, *_PLAIN_HOLDERS)) or any(map(_is_of_program, type(value).__mro__))


def attribute_names(holder: Any) -> set[str]:
    """Return the names of an object's attributes and of those of its classes that are not functions."""
    names = set(_Holder("", holder).baseline)
    for each in filter(_is_of_program, type(holder).__mro__):
        names |= {
            name for name, value in vars(each).items() if not (callable(value) or hasattr(value, "fget"))
        }
    return {name for name in names if not name.startswith("__")}


def attribute_of(holder: Any, name: str) -> Any:
    """Return the present value of an attribute of an object or a class; `ABSENT` without one."""
    if name in vars(holder):
        return vars(holder)[name]
    return next((vars(each)[name] for each in type(holder).__mro__ if name in vars(each)), ABSENT)


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


def _words_of(functions: Iterable[types.FunctionType]) -> tuple[set[str], set[str]]:
    """Return the words that may be names of attributes in some functions, and the texts in them."""
    names: set[str] = set()
    texts: set[str] = set()
    codes = [function.__code__ for function in functions]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        constants = list(code.co_consts)
        while constants:
            constant = constants.pop()
            if isinstance(constant, str):
                texts.add(constant)
            elif isinstance(constant, tuple | frozenset):
                constants += constant
            elif isinstance(constant, types.CodeType):
                codes.append(constant)
    return names | texts, texts


def is_float(value: Any) -> bool:
    """Whether a value is a float of Python or NumPy, which cannot change, and not an array."""
    return type(value) is float or isinstance(value, np.floating)


def _item(container: Any, key: Any, value: Any) -> Number:
    # Not the methods of Keras's containers, which may be locked.
    kinds = [kind for kind in (dict, list) if issubclass(type(container), kind)] or [type(container)]
    setter = functools.partial(kinds[0].__setitem__, container, key)
    return Number(value, setter, functools.partial(setter, value))


def _keep(*_: Any) -> None:
    """Do not set an item of a tuple, which cannot change."""


def _items(value: Any) -> list[Number]:
    """Return the items of a container, or the attributes of an object of the program."""
    if isinstance(value, dict | list | deque | tuple) and len(value) > _MANY:
        return []
    if isinstance(value, tuple):
        return [Number(item, _keep, _keep) for item in value if not (type(item) in _LEAVES or is_float(item))]
    if isinstance(value, dict):
        return [_item(value, key, item) for key, item in value.items()]
    if isinstance(value, list | deque):
        return [_item(value, i, item) for i, item in enumerate(value)]
    if _node_class(value) is not _Holder or isinstance(value, keras.Metric | keras.Optimizer):
        return []
    classes = [each for each in type(value).__mro__ if _is_of_program(each)]
    if not (classes or isinstance(value, (keras.Model, *_PLAIN_HOLDERS))):
        return []
    attributes = _Holder("", value).baseline
    items = [_item(vars(value), name, item) for name, item in attributes.items()]
    inherited = {name: item for each in reversed(classes) for name, item in vars(each).items()}
    for name, item in inherited.items():
        if name not in vars(value) and not name.startswith("__") and is_float(item):
            reset = functools.partial(vars(value).pop, name, None)
            items.append(Number(item, functools.partial(vars(value).__setitem__, name), reset))
    return items


def _array(value: Any) -> list[Number]:
    """Return an array or tensor of floats, or a variable of TensorFlow, as a number if it has one element."""
    if _is_variable(value):
        if value.shape.num_elements() != 1:
            return []
        before = np.asarray(value.numpy())
        return [Number(before, value.assign, functools.partial(value.assign, before))]
    node_class = _node_class(value)
    if node_class not in (_Array, _Tensor) or math.prod(value.shape) != 1:
        return []
    assert node_class is not None
    node = node_class("", value)
    before = np.array(keras.ops.convert_to_numpy(node.baseline))
    if before.dtype.kind != "f":
        return []

    def write(array: Any) -> None:
        node.write(array if node_class is _Array else sys.modules["torch"].as_tensor(array))

    return [Number(before, write, functools.partial(node.write, node.baseline))]


def _callables_in(parts: Iterable[Any]) -> list[Any]:
    """Return the attributes of objects that can be called, such as the function of a loss of Keras."""
    members = [member for part in parts for member in getattr(part, "__dict__", {}).values()]
    return [member for member in members if callable(member)]


def _functions_of(part: Any) -> list[types.FunctionType]:
    """Return a function, or the methods of the program's own classes of an object."""
    part = inspect.unwrap(part) if callable(part) else part
    if isinstance(part, types.MethodType):
        part = part.__func__
    if isinstance(part, types.FunctionType):
        return [part]
    members = [member for cls in type(part).__mro__ if _is_of_program(cls) for member in vars(cls).values()]
    unwrapped = [getattr(member, "__func__", getattr(member, "fget", member)) for member in members]
    functions = [inspect.unwrap(member) if callable(member) else member for member in unwrapped]
    return [member for member in functions if isinstance(member, types.FunctionType)]


def _named_by(function: types.FunctionType) -> Iterator[_Named]:
    """Yield the global variables, and variables of enclosing functions, that a function names."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # It has no value yet.
            yield _Named(name, cell.cell_contents, cell)
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        for name in code.co_names:
            if name in function.__globals__:
                yield _Named(name, function.__globals__[name], function.__globals__)


def unchanged(model: Any) -> "Kept":
    """Within a block, changes of a model's Python attributes are undone at its end.

    So are assignments of variables of TensorFlow in them.
    """
    return Kept(graph_of(model))


class Kept:
    """A context at whose end all changes of a graph are undone."""

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


SavedValue = Sequence[Any]
"""A value that a checkpoint holds: the path of a node, an attribute of it or "", and the `encoded` value."""


def saved_values(values: Mapping[tuple[str, str], Any]) -> list[SavedValue]:
    """Return those of `ObjectGraph.values_at` that are plain and small. Inner ones come first."""
    found = sorted(values.items(), key=lambda item: -len(item[0][0]))
    return [[path, name, encoded(value)] for (path, name), value in found if _is_exact(value)]


def _is_exact(value: Any, depth: int = 0) -> bool:
    """Whether a value is a number, text or small array, or a plain container of them."""
    if value is None or value is ABSENT or type(value) in _LEAVES:
        return True
    if type(value) is np.ndarray:
        return value.dtype.kind in "biufc" and value.nbytes <= LARGE
    if type(value) not in (list, tuple, dict, set) or len(value) > _MANY or depth > NESTED:
        return isinstance(value, np.number | np.bool_)
    items = [*value, *value.values()] if isinstance(value, dict) else value
    return all(_is_exact(item, depth + 1) for item in items)


def _with_own(own: Any, new: Any) -> Any:
    """Return the object that a place has already, if it is an equal container; otherwise the new value."""
    is_equal = isinstance(own, CONTAINERS) and _text(own) == _text(new)
    return own if is_equal else _with_own_items(own, new)


def _with_own_items(own: Any, new: Any) -> Any:
    if isinstance(own, dict) and isinstance(new, dict):
        return {key: _with_own(own.get(key), item) for key, item in new.items()}
    if isinstance(own, list) and type(new) is list:
        return [_with_own(mine, item) for mine, item in itertools.zip_longest(own[: len(new)], new)]
    return new


def encoded(value: Any) -> Any:
    """Return a value in a form that a checkpoint can hold, for `decoded`.

    Raises:
        TypeError: it contains an object that a checkpoint cannot hold.
    """
    if value is None or type(value) in (*_LEAVES, np.ndarray) or isinstance(value, np.generic):
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


def text_of(value: Any) -> str:
    """Return a text that shows a value, and is equal only for equal values as far as it can tell."""
    return _text(value)


def is_value(value: Any) -> bool:
    """Whether a value is plain, an array or a tensor, so it does not have attributes that change."""
    return type(value) in _LEAVES or isinstance(value, np.ndarray | np.generic) or _is_tensor(value)


def _is_of_values(value: Any, depth: int = 0) -> bool:
    """Whether a value is plain, an array or a tensor, or consists of such values only."""
    if value is None or is_value(value):
        return True
    if depth > _DEEP or not isinstance(value, dict | list | tuple | deque | set) or len(value) > _MANY:
        return False
    items = value.values() if isinstance(value, dict) else value
    return all(_is_of_values(item, depth + 1) for item in items)


def disturbed(value: Any) -> Any:
    """Return another value of the same type, dtype and shape, or None if this is not possible.

    In a container, all values that can be changed are changed.
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


def _node_class(value: Any) -> Callable[[str, Any], _Changeable] | None:
    """Return the class of the node for an object, or None for objects that are compared as a whole."""
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
    return is_in_program(cls.__module__)


@cache
def is_in_program(name: str | None) -> bool:
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


def is_array(value: Any) -> bool:
    """Whether a value is an array with numbers or texts that can change."""
    return _node_class(value) is _Array


def is_generator(value: Any) -> bool:
    """Whether a value is a generator of random numbers of Python, NumPy or PyTorch."""
    return _node_class(value) is _Generator


def object_of_program(value: Any) -> bool:
    """Whether a value has attributes of the program's own, and is not a part of a model or a callback."""
    others = (*KERAS_HOLDERS, keras.callbacks.Callback)
    return not isinstance(value, others) and not _is_module(value) and _may_choose(value)


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
    if not (isinstance(value, keras.Variable) or _is_variable(value)) or math.prod(value.shape) * 8 > LARGE:
        return None
    return OwnVariable(lambda: np.array(keras.ops.convert_to_numpy(value)), value.assign)


def _is_large(value: Any) -> bool:
    """Whether a value is an array or tensor of so many bytes that it is not copied to be compared."""
    return _node_class(value) in (_Array, _Tensor) and value.nbytes > LARGE


def _is_variable(value: Any) -> bool:
    """Whether a value is a variable of TensorFlow with numbers that does not belong to one of Keras."""
    kind: Any = getattr(sys.modules.get("tensorflow"), "Variable", None)
    if kind is None or not isinstance(value, kind):
        return False
    return bool(value.dtype.is_floating or value.dtype.is_integer or value.dtype.is_bool)


def _is_module(value: Any) -> bool:
    """Whether a value is a module of PyTorch. Its state is in attributes that layers also have."""
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
    """Whether a value belongs to a function that JAX traces. It cannot be used after the trace."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.core.Tracer)


def _same(left: Any, right: Any) -> bool:
    """Whether two references are to the same object, or to equal values that cannot change."""
    if left is right:
        return True
    left_class = type(left)
    if left_class is not type(right):
        return False
    if left_class is float:
        return struct.pack("d", left) == struct.pack("d", right)
    if left_class in _LEAVES:
        return repr(left) == repr(right) if left_class is complex else bool(left == right)
    if left_class is tuple:
        return len(left) == len(right) and all(map(_same, left, right))
    return isinstance(left, np.generic) and left.tobytes() == right.tobytes()


def _same_array(left: Any, right: Any) -> bool:
    return bool(left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes())


def _version(tensor: Any) -> int:
    from lockstep.keras.private.torch import versions

    return versions([tensor])[0]


def _same_tensor(left: Any, right: Any) -> bool:
    equal = left.shape == right.shape and left.dtype == right.dtype
    return equal and _same_array(
        *(np.asarray(keras.ops.convert_to_numpy(tensor)) for tensor in (left, right))
    )


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
    # The names do not include the classes with which Keras and TensorFlow replace containers.
    if isinstance(value, Mapping):
        name = "dict"
        parts = [f"{_text(key, depth + 1)}: {_text(item, depth + 1)}" for key, item in value.items()]
    elif isinstance(value, set | frozenset):
        name = "set"
        parts = sorted(_text(item, depth + 1) for item in value)
    elif isinstance(value, list | tuple | deque):
        name = next(name.__name__ for name in (list, tuple, deque) if isinstance(value, name))
        parts = [_text(item, depth + 1) for item in value]
    else:
        return type(value).__name__
    text = f"{name}({', '.join(parts)})"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... #{_hash(text.encode())}"


def _hash(data: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data)
