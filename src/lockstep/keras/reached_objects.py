"""The objects that a program reaches from a model: its parts, the program's functions, and what they name.

A function names global variables, and variables of enclosing functions. The names in the code of functions
show which attributes and variables they may read.
"""

import functools
import inspect
import itertools
import math
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import keras
import numpy as np

from lockstep.keras.private.common import KERAS_HOLDERS, layers_of, modules_of
from lockstep.keras.python_state import (
    Kept,
    ObjectGraph,
    array_node,
    attributes_of,
    holds_attributes,
    is_generator,
    variables_node,
)
from lockstep.keras.python_values import (
    ABSENT,
    CONTAINERS,
    LEAVES,
    MANY_ELEMENTS,
    PLAIN_HOLDERS,
    Place,
    is_float,
    is_in_program,
    is_module,
    is_of_program,
    is_variable,
)
from lockstep.keras.variables import flat_metrics, optimizers_of


def graph_of(model: Any, *, named: bool = False) -> ObjectGraph:
    """Return the objects of a model whose attributes its steps may change.

    Args:
        model: the model, built.
        named: whether to include the variables that its functions name, and the objects in them.
    """
    variables = [(owner, variables_node(owner, each)) for owner, each in variables_of(model)] if named else []
    return ObjectGraph([*_roots_of(model), *variables])


def _roots_of(model: Any) -> list[tuple[str, Any]]:
    optimizers = optimizers_of(model)
    inner = [getattr(optimizer, "inner_optimizer", None) for optimizer in optimizers]
    loss = getattr(model, "loss", None)
    roots = [("the model", model)]
    # A layer has its path after it is built.
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
    parts = [(path, part) for path, part in _roots_of(model) if holds_attributes(part)]
    return [(path, part, list(attributes_of(part))) for path, part in parts]


def graph_of_function(function: Any) -> ObjectGraph:
    """Return the objects that a function names (see `named_objects`), with layers and metrics of models.

    A method also names its object. The variables that the function names count, too.
    """
    function, *owners = _parts_of_function(function)
    roots = [(type(owner).__name__, owner) for owner in owners]
    roots += named_objects([function, *owners])
    graph = ObjectGraph(roots)
    held = [node.value for node in graph.nodes.values() if isinstance(node.value, keras.layers.Layer)]
    layers = {id(layer): layer for outer in held for layer in layers_of(outer)}
    metrics = [metric for layer in layers.values() for metric in flat_metrics(getattr(layer, "metrics", ()))]
    roots += [(f"layer {layer.path or layer.name!r}", layer) for layer in layers.values()]
    roots += [(f"metric {metric.name!r}", metric) for metric in metrics]
    variables = _variables_reached_by([function, *owners])
    roots += [(owner, variables_node(owner, places)) for owner, places in variables]
    # `NamedArrays` looks at those that functions name.
    return ObjectGraph(roots, arrays_of_variables=False)


def _parts_of_function(function: Any) -> list[Any]:
    """Return a function, and the object of a method."""
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", None)
    return [function] if owner is None or not holds_attributes(owner) else [function, owner]


def places_named_by(function: Any) -> list[tuple[str, Place]]:
    """Return the names and places of the variables that a function names; see `named_objects`."""
    places: dict[tuple[str, int], tuple[str, Place]] = {}
    for name, _, place in _named(_parts_of_function(function)):
        places[name, id(place)] = name, place
    return list(places.values())


def named_objects(parts: Iterable[Any]) -> list[tuple[str, Any]]:
    """Return the objects with attributes, and generators of random numbers, that functions name, as roots.

    They are global variables, and variables of enclosing functions. Functions of the program that these
    functions name also count.

    Args:
        parts: functions, and objects whose methods count.
    """
    roots: dict[int, tuple[str, Any]] = {}
    for name, value, *_ in _named(parts):
        if is_generator(value) or holds_attributes(value):
            roots.setdefault(id(value), (f"the variable {name!r}", value))
    return list(roots.values())


class _Named(NamedTuple):
    """A global variable, or one of an enclosing function, that a function names.

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
            elif (is_generator(value) or holds_attributes(value)) and id(value) not in visited:
                visited.add(id(value))
                waiting += _functions_of(value)


class _Reached(NamedTuple):
    """The objects, functions and names that parts of a program reach.

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
    """Return the objects and names that functions, and objects whose methods count, reach."""
    objects, members = objects_in(parts), list[Any]()
    while True:
        reached = _reached_functions([*objects, *parts, *_callables_in(parts), *members])
        functions = [function for function in reached if is_in_program(function.__module__)]
        named = [(function, each) for function in functions for each in _named_by(function)]
        spaces = _spaces_in(each.value for _, each in named)
        names, texts = _words_of(functions)
        objects_now = objects_in([*parts, *(each.value for _, each in named)])
        inner = [vars(space)[name] for space in spaces for name in sorted(names & vars(space).keys())]
        inner = [member for member in inner if isinstance(member, types.FunctionType)]
        if len(objects_now) == len(objects) and len(inner) == len(members):
            return _Reached(objects, functions, named, spaces, names, texts)
        objects, members = objects_now, inner


def variables_of(model: Any, callbacks: Sequence[Any] = ()) -> list[tuple[str, dict[str, Place]]]:
    """Return what functions of a model and of callbacks name, and where it is; see `reached_by`.

    Their paths are equal in all processes of a job.
    """
    parts = [part for _, part in _roots_of(model) if part is not None]
    return _variables_reached_by([*parts, *keras.tree.flatten(getattr(model, "loss", None)), *callbacks])


def _variables_reached_by(parts: Sequence[Any]) -> list[tuple[str, dict[str, Place]]]:
    """Return what functions, and objects whose methods count, name, and where it is; see `variables_of`."""
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
                    continue  # An example is a method.
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
            spaces.update((id(each), each) for each in value.__mro__ if is_of_program(each))
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
        if type(value) in LEAVES or value is None or id(value) in seen:
            continue
        if isinstance(value, CONTAINERS):
            seen.add(id(value))
            items = value.values() if isinstance(value, dict) else value
            # The order of a set of objects differs between processes.
            visits = len(value) <= MANY_ELEMENTS and not isinstance(value, set | frozenset)
            waiting += list(items)[::-1] if visits else []
        elif _may_choose(value):
            seen.add(id(value))
            objects[id(value)] = value
            waiting += [attribute_of(value, name) for name in sorted(attribute_names(value), reverse=True)]
    return list(objects.values())


def _may_choose(value: Any) -> bool:
    """Whether the attributes of an object are the program's: it is a model, or its class is the program's."""
    if not holds_attributes(value) or isinstance(value, keras.Metric | keras.Optimizer):
        return False
    return isinstance(value, (keras.Model, *PLAIN_HOLDERS)) or any(map(is_of_program, type(value).__mro__))


def attribute_names(holder: Any) -> set[str]:
    """Return the names of an object's attributes and of those of its classes that are not functions."""
    names = set(attributes_of(holder))
    for each in filter(is_of_program, type(holder).__mro__):
        names |= {
            name for name, value in vars(each).items() if not (callable(value) or hasattr(value, "fget"))
        }
    return {name for name in names if not name.startswith("__")}


def attribute_of(holder: Any, name: str) -> Any:
    """Return the present value of an attribute of an object or a class; `ABSENT` without one."""
    if name in vars(holder):
        return vars(holder)[name]
    return next((vars(each)[name] for each in type(holder).__mro__ if name in vars(each)), ABSENT)


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


def _item(container: Any, key: Any, value: Any) -> Number:
    # This does not use the methods of Keras's containers, which may be locked.
    kinds = [kind for kind in (dict, list) if issubclass(type(container), kind)] or [type(container)]
    setter = functools.partial(kinds[0].__setitem__, container, key)
    return Number(value, setter, functools.partial(setter, value))


def _keep(*_: Any) -> None:
    """Do not set an item of a tuple, which cannot change."""


def _items(value: Any) -> list[Number]:
    """Return the items of a container, or the attributes of an object of the program."""
    if isinstance(value, dict | list | deque | tuple) and len(value) > MANY_ELEMENTS:
        return []
    if isinstance(value, tuple):
        return [Number(item, _keep, _keep) for item in value if not (type(item) in LEAVES or is_float(item))]
    if isinstance(value, dict):
        return [_item(value, key, item) for key, item in value.items()]
    if isinstance(value, list | deque):
        return [_item(value, i, item) for i, item in enumerate(value)]
    if not holds_attributes(value) or isinstance(value, keras.Metric | keras.Optimizer):
        return []
    classes = [each for each in type(value).__mro__ if is_of_program(each)]
    if not (classes or isinstance(value, (keras.Model, *PLAIN_HOLDERS))):
        return []
    attributes = attributes_of(value)
    items = [_item(vars(value), name, item) for name, item in attributes.items()]
    inherited = {name: item for each in reversed(classes) for name, item in vars(each).items()}
    for name, item in inherited.items():
        if name not in vars(value) and not name.startswith("__") and is_float(item):
            reset = functools.partial(vars(value).pop, name, None)
            items.append(Number(item, functools.partial(vars(value).__setitem__, name), reset))
    return items


def _array(value: Any) -> list[Number]:
    """Return an array or tensor of floats, or a variable of TensorFlow, as a number if it has one element."""
    if is_variable(value):
        if value.shape.num_elements() != 1:
            return []
        before = np.asarray(value.numpy())
        return [Number(before, value.assign, functools.partial(value.assign, before))]
    node = array_node(value)
    if node is None or math.prod(value.shape) != 1:
        return []
    before = np.array(keras.ops.convert_to_numpy(node.baseline))
    if before.dtype.kind != "f":
        return []

    def write(array: Any) -> None:
        node.write(array if isinstance(value, np.ndarray) else sys.modules["torch"].as_tensor(array))

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
    members = [member for cls in type(part).__mro__ if is_of_program(cls) for member in vars(cls).values()]
    unwrapped = [getattr(member, "__func__", getattr(member, "fget", member)) for member in members]
    functions = [inspect.unwrap(member) if callable(member) else member for member in unwrapped]
    return [member for member in functions if isinstance(member, types.FunctionType)]


def _named_by(function: types.FunctionType) -> Iterator[_Named]:
    """Yield the global variables, and variables of enclosing functions, that a function names."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # The variable does not have a value yet.
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


def object_of_program(value: Any) -> bool:
    """Whether a value has attributes of the program's own, and is not a part of a model or a callback."""
    others = (*KERAS_HOLDERS, keras.callbacks.Callback)
    return not isinstance(value, others) and not is_module(value) and _may_choose(value)
