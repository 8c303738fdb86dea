"""The state that a program keeps in Python: attributes of its model, and of the objects that it reaches.

A graph of objects is a list of nodes, the objects that can change: holders of attributes, containers, arrays,
tensors and generators of random numbers. The contents of a node are shallow: the objects to which it refers,
but not their contents. So a comparison looks at each reference once, and restoring keeps every object's
identity. The baseline of a node is a copy of its contents, with which it is compared and to which it is
restored.

Comparing and restoring a graph around each replica takes a third of a millisecond a step for 20 layers.
"""

import itertools
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

import keras
import numpy as np
import xxhash

from lockstep.keras.private.common import KERAS_HOLDERS, MODEL_ATTRIBUTES, OWN_ATTRIBUTES
from lockstep.keras.python_values import (
    ABSENT,
    DEEPEST,
    LARGE,
    LEAVES,
    MANY_ELEMENTS,
    PLAIN_HOLDERS,
    Place,
    SavedValue,
    are_same,
    are_same_arrays,
    are_same_tensors,
    decoded,
    is_module,
    is_of_program,
    is_of_values,
    is_symbolic,
    is_variable,
    set_value,
    tensor_version,
    text_of,
    value_of,
    with_own,
    with_own_items,
)
from lockstep.keras.randomness import generator_state, set_generator_state

_GROWTH = 4
"""When a graph has so many times the nodes that could be reached at first, unreachable ones are removed."""
Contents = Any
Key = tuple[int, str]
"""A place: a node, by its position in the graph, and an attribute of it; "" for its whole contents."""


class _Changeable:
    """An object that can change.

    Attributes:
        path: its name in messages.
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
    creates them only once.

    Attributes:
        grown: whether it has new parts that have not been searched for nodes.
    """

    __slots__ = ("attributes", "built", "grown", "ignored", "is_model", "keys", "values")

    def __init__(self, path: str, value: Any) -> None:
        self.attributes: dict[str, Any] = vars(value)
        self.ignored = OWN_ATTRIBUTES if isinstance(value, KERAS_HOLDERS) or is_module(value) else frozenset()
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
        # This does not use `__setattr__`, which may track or convert the values.
        for name in [name for name in self.attributes if name not in contents and name not in self.ignored]:
            del self.attributes[name]
        for name, value in contents.items():
            if self.attributes.get(name, ABSENT) is not value:
                self.attributes[name] = value

    def differs(self) -> bool:
        # JAX does not compile again for the next `compile` while the functions of the last one exist.
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
            are_same(value, baseline[name]) for name, value in now.items()
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
                # An example is the bias of a layer without one, which is None.
                self.grown, baseline[name] = True, value
                continue
            if self.built is not was_built:
                part = before is None or not (type(before) in LEAVES and type(value) in LEAVES)
            else:
                part = _is_first(before, value)
            if part and value is not before:
                self.grown, baseline[name] = True, value

    def children(self) -> Iterator[tuple[str, Any]]:
        for name, value in self.baseline.items():
            yield f"{self.path}.{name}", value


class _Variables(_Holder):
    """Variables that functions name: those of a module, of enclosing functions, or of a class.

    As for attributes, a part of Keras that a function creates once, such as a metric, is not a change.

    Args:
        path: the path, as for every node.
        value: the place of each variable, by its name.
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
        for name, value in now.items():
            if _is_first(baseline.get(name), value):
                self.grown, baseline[name] = True, value
        return now.keys() != baseline.keys() or not all(
            are_same(value, baseline[name]) for name, value in now.items()
        )


def _is_first(before: Any, value: Any) -> bool:
    """Whether a value is the first part of Keras at a place."""
    return before is None and isinstance(value, (keras.Variable, *KERAS_HOLDERS))


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
            all(map(is_, value, baseline)) or all(map(are_same, value, baseline))
        )

    def children(self) -> Iterator[tuple[str, Any]]:
        if len(self.baseline) <= MANY_ELEMENTS:
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
            or not (
                all(map(is_, value.values(), baseline.values()))
                or all(map(are_same, value.values(), baseline.values()))
            )
            or list(value) != list(baseline)
        )

    def children(self) -> Iterator[tuple[str, Any]]:
        if len(self.baseline) <= MANY_ELEMENTS:
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
        return self.watched and not are_same_arrays(self.value, self.baseline)


class _Tensor(_Changeable):
    """A tensor of PyTorch that is not a variable."""

    __slots__ = ("version",)

    def read(self) -> Any:
        self.version = tensor_version(self.value)
        return self.value.detach().clone()

    def write(self, contents: Any) -> None:
        with sys.modules["torch"].no_grad():
            self.value.copy_(contents)
        self.version = tensor_version(self.value)

    def differs(self) -> bool:
        if tensor_version(self.value) == self.version:
            return False
        return not are_same_tensors(self.value, self.baseline)


class _Generator(_Changeable):
    """A generator of random numbers of Python, NumPy or PyTorch."""

    __slots__ = ()

    def differs(self) -> bool:
        return text_of(self.read()) != text_of(self.baseline)

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
        """The places with a different value: an array or tensor, a plain value, or a container of values."""
        return [
            (position, name)
            for position, name, new in self._attributes()
            if new is not ABSENT and is_of_values(new)
        ] + [
            (position, "")
            for position, new in self.contents.items()
            if not isinstance(self._graph.nodes[position], _Holder | _Generator) and is_of_values(new)
        ]

    def _attributes(self) -> Iterator[tuple[int, str, Any]]:
        for position, after in self.contents.items():
            if isinstance(self._graph.nodes[position], _Holder):
                before = self.before[position]
                for name in sorted({**before, **after}):
                    if not is_symbolic(after.get(name)) and not are_same(
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
            without: places to omit.
        """
        excluded, texts = frozenset(without), []
        for position, name, new in self._attributes():
            if (position, name) not in excluded:
                texts.append(f"{self._graph.nodes[position].path}.{name} = {text_of(new)}")
        for position, after in self.contents.items():
            node = self._graph.nodes[position]
            if not isinstance(node, _Holder) and (position, "") not in excluded:
                texts.append(f"{node.path} = {text_of(after)}")
        return sorted(texts)


class ObjectGraph:
    """The nodes that are reachable from some objects.

    Args:
        roots: the objects, with their names for messages.
        arrays_of_variables: whether arrays and tensors in variables that functions name count.

    Attributes:
        nodes: the nodes by their positions, in the order in which they were found.
        variables: the variables of TensorFlow that are not Keras's, by their paths. They are not nodes: the
            backend combines what replicas assign to them, as for variables of Keras.
    """

    def __init__(self, roots: Iterable[tuple[str, Any]], *, arrays_of_variables: bool = True) -> None:
        self.nodes: dict[int, _Changeable] = {}
        self.variables: dict[str, Any] = {}
        self._roots = list(roots)
        self._arrays_of_variables = arrays_of_variables
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
        """Make undone changes again; the baseline does not change."""
        for position, contents in changes.contents.items():
            self.nodes[position].write(contents)

    def make_where_unchanged(self, changes: Changes) -> None:
        """Make undone changes again, where the present values are those of the baseline."""
        for position, contents in changes.contents.items():
            node, before = self.nodes[position], changes.before[position]
            present = node.read()
            if isinstance(node, _Holder):
                for name in {**before, **contents}:
                    if are_same(present.get(name, ABSENT), before.get(name, ABSENT)):
                        present[name] = contents.get(name, ABSENT)
                contents = {name: value for name, value in present.items() if value is not ABSENT}
            elif node.differs():
                continue
            node.write(contents)

    def adopt(self, changes: Changes) -> None:
        """Make undone changes again, and make the contents the baseline."""
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
        # Other objects may also refer to some of them.
        for node in list(self.nodes.values()):
            self._walk_from(node)

    def stop_watching(self) -> None:
        """Stop comparing large arrays that have not changed since they were found."""
        for node in self.nodes.values():
            if isinstance(node, _Array) and node.value.nbytes > LARGE:
                node.watched = node.watched and node.differs()
                if not node.watched:
                    # This is not a copy, which would take the same memory again.
                    node.baseline = node.value

    @contextmanager
    def with_value(self, key: Key, value: Any) -> Iterator[None]:
        """Within the block, a place has a value other than its baseline; `ABSENT` removes the attribute."""
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
        """Make saved values the baseline at their places. The present values do not change."""
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
        if depth > DEEPEST or not (isinstance(node, _List | _Dict | _Set | _Array | _Tensor)):
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
        """Work like `set_at`, with an `encoded` value. Containers that are already equal are kept."""
        node, new = self._node_at(path), decoded(value)
        if node is None:
            return False
        own = node.baseline.get(name) if name else node.baseline
        try:
            return self.set_at(path, name, with_own(own, new) if name else with_own_items(own, new))
        except ValueError:
            return False  # An edited script may have an array of another shape.

    def _node_at(self, path: str) -> _Changeable | None:
        return next((node for node in self.nodes.values() if node.path == path), None)

    def _forget_unreached(self) -> None:
        """Remove the nodes that cannot be reached any more, such as lists that steps have replaced."""
        graph = ObjectGraph(self._roots, arrays_of_variables=self._arrays_of_variables)
        reached = {id(node.value) for node in graph.nodes.values()}
        for position, node in list(self.nodes.items()):
            if id(node.value) not in reached:
                self._forget(position)
        self._reached = len(self.nodes)

    def _forget(self, position: int) -> None:
        self._seen.discard(id(self.nodes.pop(position).value))

    def _is_left_out(self, value: Any) -> bool:
        """Whether a value that a variable refers to is an array or tensor that does not count."""
        if _node_class(value) not in (_Array, _Tensor):
            return False
        # Constants, such as the examples, are often in variables that functions name.
        return not self._arrays_of_variables or value.nbytes > LARGE

    def _walk_from(self, node: _Changeable) -> None:
        if node.path not in self._ignored:
            self._walk(list(node.children()))

    def _walk(self, waiting: list[tuple[str, Any]]) -> None:
        """Add the nodes among objects, and the nodes to which they refer."""
        waiting.reverse()
        while waiting:
            path, value = waiting.pop()
            if type(value) in LEAVES or value is None or id(value) in self._seen or path in self._ignored:
                continue
            if isinstance(value, tuple):
                if len(value) <= MANY_ELEMENTS:
                    waiting.extend((f"{path}[{i}]", item) for i, item in enumerate(value))
                continue
            if is_variable(value):
                self._seen.add(id(value))
                self.variables[path] = value
                continue
            node: _Changeable | None = value if isinstance(value, _Variables) else None
            if path.startswith(self._named) and self._is_left_out(value):
                continue
            if node is None and (node_class := _node_class(value)) is not None:
                node = node_class(path, value)
            if node is not None:
                # The node keeps the object, so that its id remains unique.
                self._seen.update((id(value), id(node.value)))
                self.nodes[next(self._positions)] = node
                waiting.extend(reversed(list(node.children())))


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
            if not are_same_arrays(variable.numpy(), value):
                variable.assign(value)


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
    holds = isinstance(value, KERAS_HOLDERS + PLAIN_HOLDERS) or is_of_program(kind)
    return _Holder if holds else None


def is_array(value: Any) -> bool:
    """Whether a value is an array with numbers or texts that can change."""
    return _node_class(value) is _Array


def mark_of_array(value: Any) -> int | None:
    """Return a number that changes if an array or a tensor does; None for large arrays and other values."""
    node_class = _node_class(value) if type(value) not in LEAVES else None
    if node_class is _Tensor and not value.is_inference():
        return tensor_version(value)
    if node_class is _Array and value.nbytes <= LARGE:
        return xxhash.xxh3_64_intdigest(value.tobytes())
    return None


def is_generator(value: Any) -> bool:
    """Whether a value is a generator of random numbers of Python, NumPy or PyTorch."""
    return _node_class(value) is _Generator


def holds_attributes(value: Any) -> bool:
    """Whether a value is an object with attributes that a graph contains."""
    return _node_class(value) is _Holder


def attributes_of(holder: Any) -> dict[str, Any]:
    """Return the attributes of an object that are not those of Keras and its backend."""
    attributes: dict[str, Any] = _Holder("", holder).baseline
    return attributes


def array_node(value: Any) -> _Changeable | None:
    """Return the node of an array or a tensor that can change; None for other values."""
    node_class = _node_class(value)
    return node_class("", value) if node_class is not None and node_class in (_Array, _Tensor) else None


def variables_node(path: str, places: dict[str, Place]) -> _Changeable:
    """Return the node of variables, which may be a root of a graph."""
    return _Variables(path, places)
