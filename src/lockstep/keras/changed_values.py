"""Python values outside of models that the callbacks and steps of a `fit` change.

They are in the variables that functions of the model and of its callbacks name (global variables, those of
enclosing functions, and those of classes), and in attributes of the program's objects there. A process that
skips steps also skips these changes, so it takes over the values that have changed since the call began. It
keeps values that the script itself sets, such as an edited constant.

Few kinds of values travel, because a value, and everything else that refers to it, must be the same in the
other process: numbers, texts, and plain containers and small arrays of them, but not objects of a class. A
container that existed at the beginning is changed in place. A new one travels if nothing else refers to it. A
note names every other change.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import keras
import numpy as np
import xxhash

from lockstep.checkpoint.values import pack
from lockstep.keras.python_state import is_array, is_generator
from lockstep.keras.python_values import ABSENT, LARGE, Place, own_variable, set_value, value_of
from lockstep.keras.randomness import generator_state
from lockstep.keras.reached_objects import model_objects, object_of_program, variables_of
from lockstep.keras.variables import all_variables
from lockstep.system.notes import note

Key = tuple[str, str]
"""A place: a path, which is the same in all processes, and the name of a variable or attribute there."""

_SCALARS = (bool, int, float, str)
_KINDS: Mapping[str, type] = {"list": list, "dict": dict, "set": set, "array": np.ndarray}
_MOST = 10_000
"""The most items of a value that are looked at."""


class ChangedValues:
    """The values that a `fit` has changed.

    Args:
        model: the model, built.
        callbacks: those of the call.
        compiled: whether steps are compiled, and use the Python values at the time of tracing.
        alone: whether there is only one replica, whose traces do not begin with another process's values.
    """

    def __init__(
        self, model: Any, callbacks: Sequence[Any], *, compiled: bool = False, alone: bool = False
    ) -> None:
        self._model, self._callbacks = model, list(callbacks)
        self._fixed = compiled and alone
        # JAX traces the values of variables that do not belong to the model.
        self._assigns = not (compiled and keras.backend.backend() == "jax")
        self._places: dict[Key, Place] = {}
        self._begun: list[_Look] = []
        self.note_beginning()

    def note_beginning(self) -> None:
        """Note the present values, before or after `on_train_begin`, as for attributes of callbacks."""
        self._begun.append(self._look())

    def _look(self) -> "_Look":
        self._places = {**_places_of(self._model, self._callbacks), **self._places}
        return _Look(self._places, self._of, self._model)

    def _changed(self) -> "tuple[_Look, list[Key]]":
        now = self._look()
        marks = [look.marks for look in self._begun]
        changed = [
            key for key, mark in now.marks.items() if all(each.get(key, _NOTHING) != mark for each in marks)
        ]
        # Keras adds attributes when it builds a layer.
        return now, [key for key in changed if key in marks[0] or not _is_models(key)]

    def places(self) -> list[Key]:
        """Return the places that have changed."""
        return self._changed()[1]

    def packed(self) -> dict[str, Any]:
        """Return the values for `set_values`, with the texts of the earlier ones, and the names of others."""
        now, changed = self._changed()
        values: list[list[Any]] = []
        others = []
        for key in changed:
            value = value_of(self._places[key], key[1])
            try:
                plain = self._encoded(key, value, now)
                pack(plain, "value")
            except Exception:
                if not _is_models(key):
                    others.append(_name(key))
                continue
            if self._fixed and self._of(key) and _kind(plain) != "variable":
                others.append(_name(key))
            else:
                before = [look.marks.get(key, _NOTHING) for look in self._begun]
                values.append([*key, plain, before if type(value) in _SCALARS else []])
        return {"values": values, "others": others}

    def _of(self, key: Key) -> bool:
        """Whether the model's own functions and attributes name a place."""
        return (id(self._places[key]), key[1]) in self._of_model

    @cached_property
    def _of_model(self) -> set[tuple[int, str]]:
        return {(id(place), name) for (_, name), place in _places_of(self._model, ()).items()}

    def _encoded(self, key: Key, value: Any, now: "_Look") -> Any:
        begun = [look.at.get((key, ""), 0) for look in self._begun]
        if (numbers := now.numbers(key, value)) is not None:
            if not self._assigns or id(value) not in begun:
                raise TypeError("a variable of a compiled step, or another variable than at the beginning")
            return {"kind": "variable", "same": True, "items": numbers}
        return self._plain(key, "", value, now)

    def _plain(self, key: Key, inner: str, value: Any, now: "_Look") -> Any:
        """Return a value as plain values, or raise `TypeError` if it cannot travel."""
        kind = type(value)
        if value is None or kind in _SCALARS or isinstance(value, np.number | np.bool_):
            return value
        items: Any
        if kind is tuple:
            items = [self._plain(key, f"{inner}[{i}]", item, now) for i, item in enumerate(value)]
            return {"kind": "tuple", "same": False, "items": items}
        same = any(look.at.get((key, inner)) == id(value) for look in self._begun)
        was_there = any(id(value) in look.references for look in self._begun)
        if not same and (was_there or now.references[id(value)] != 1):
            raise TypeError("something else refers to it")
        if kind is np.ndarray and value.dtype.kind in "biufc" and value.nbytes <= LARGE:
            if not same and value.base is not None:
                raise TypeError("a view of another array")
            return {"kind": "array", "same": same, "items": value.copy()}
        if kind not in (list, dict, set) or now.counts[key] > 2 * _MOST:
            raise TypeError(f"a {kind.__name__}")
        if kind is dict:
            items = [
                [self._plain(key, "key", name, now), self._plain(key, f"{inner}[{name!r}]", item, now)]
                for name, item in value.items()
            ]
        else:
            inner_values = sorted(value, key=repr) if kind is set else value
            items = [self._plain(key, f"{inner}[{i}]", item, now) for i, item in enumerate(inner_values)]
        return {"kind": kind.__name__, "same": same, "items": items}


_NOTHING = "nothing"


class _Look:
    """The values of places at one time.

    Attributes:
        marks: a text for each value, which changes if a quick look shows that the value has changed.
        at: the ids of containers, arrays and variables, by the place and the path in its value.
        references: how many of these paths refer to each of them.
        counts: the number of items that were inspected, by the place.
    """

    def __init__(self, places: Mapping[Key, Place], of_model: Callable[[Key], bool], model: Any) -> None:
        self.marks: dict[Key, str] = {}
        self.at: dict[tuple[Key, str], int] = {}
        self.references: Counter[int] = Counter()
        self.counts: Counter[Key] = Counter()
        self._own = {id(variable) for variable in (*all_variables(model), *model.metrics_variables)}
        self._own |= {
            id(variable.value) for variable in model.variables if keras.backend.backend() == "torch"
        }
        # Ids stay unique while these objects exist.
        self._held: list[Any] = []
        for key, place in places.items():
            value = value_of(place, key[1])
            if is_generator(value):
                # Each process draws the numbers of a trace itself.
                drawn = "" if of_model(key) else repr(generator_state(value))
                self.marks[key] = _digest(drawn.encode())
                continue
            try:
                self.marks[key] = self._mark(key, "", value)
            except Exception:
                self.marks[key] = _identity(value)

    def numbers(self, key: Key, value: Any) -> Any:
        """Return a copy of the numbers of a variable that is not the model's; None for other values."""
        if _is_models(key) or id(value) in self._own or (variable := own_variable(value)) is None:
            return None
        return variable.read()

    def _mark(self, key: Key, inner: str, value: Any) -> str:
        kind = type(value)
        self.counts[key] += 1
        if value is ABSENT:
            return _NOTHING
        if value is None or kind in _SCALARS:
            return _shown(value)
        if isinstance(value, np.number | np.bool_):
            return f"{kind.__name__} {value.tobytes().hex()}"
        if isinstance(value, list | tuple | dict | set | deque):
            if kind in (list, dict, set):
                self._refer(key, inner, value)
            self.counts[key] += len(value)
            if self.counts[key] > 2 * _MOST:
                return f"{_identity(value)} {len(value)}"
            identity = "" if kind is tuple else _identity(value)
            return f"{identity}({', '.join(self._marks_in(key, inner, value))})"
        if is_array(value) and value.nbytes <= LARGE:
            self._refer(key, inner, value)
            return f"{_identity(value)} {value.dtype}{value.shape} #{_digest(value.tobytes())}"
        if (numbers := self.numbers(key, value)) is not None:
            self._refer(key, inner, value)
            return f"{_identity(value)} #{_digest(numbers.tobytes())}"
        return _identity(value)

    def _marks_in(self, key: Key, inner: str, value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            for name, item in value.items():
                yield f"{name!r}: {self._mark(key, f'{inner}[{name!r}]', item)}"
        else:
            items = sorted(value, key=repr) if isinstance(value, set) else value
            for i, item in enumerate(items):
                yield self._mark(key, f"{inner}[{i}]", item)

    def _refer(self, key: Key, inner: str, value: Any) -> None:
        self.at[key, inner] = id(value)
        self.references[id(value)] += 1
        if _is_small(value):
            self._held.append(value)


_LONGEST = 60
_PARTS = ("the model", "layer '", "metric '", "optimizer ", "module ", "the loss")
"""The beginnings of the paths of a model's parts."""


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... #{_digest(text.encode())}"


def _is_small(value: Any) -> bool:
    """Whether keeping a value takes little memory."""
    items: Any = value.values() if isinstance(value, dict) else value
    return not isinstance(value, dict | list | set) or (
        len(value) <= _MOST and all(item is None or type(item) in _SCALARS for item in items)
    )


def _identity(value: Any) -> str:
    return f"{type(value).__name__}@{id(value)}"


def _digest(data: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def _places_of(model: Any, callbacks: Sequence[Any]) -> dict[Key, Place]:
    """Return where the variables that functions name are, and attributes of parts of a model and objects."""
    places: dict[Key, Place] = {
        (path, name): vars(part) for path, part, names in model_objects(model) for name in names
    }
    for owner, variables in variables_of(model, callbacks):
        places.update({(owner, name): place for name, place in variables.items()})
    seen = set(map(id, callbacks))
    waiting = deque(places.items())
    while waiting:
        (path, name), place = waiting.popleft()
        value = value_of(place, name)
        if object_of_program(value) and id(value) not in seen:
            seen.add(id(value))
            # The empty name stands for an object without attributes, which may get some.
            names = ("", *vars(value))
            attributes: dict[Key, Place] = {(f"{path}.{name}", inner): vars(value) for inner in names}
            places.update(attributes)
            waiting.extend(attributes.items())
    return places


def set_values(model: Any, callbacks: Sequence[Any], packed: Mapping[str, Any]) -> None:
    """Take over `ChangedValues.packed` of another process.

    A number or text that the script of this process has set to a different value, for example because the
    script was edited or has other arguments, does not change, and a note names it.

    Args:
        model: the model of the call.
        callbacks: those of the call.
        packed: the values.
    """
    if not packed:
        return
    places = _places_of(model, list(callbacks))
    # A callback may have created a global variable or an attribute.
    spaces = {path: place for (path, _), place in places.items() if isinstance(place, dict)}
    others = list(packed["others"])
    for path, name, value, before in packed["values"]:
        place = places.get((path, name), spaces.get(path))
        own = ABSENT if place is None else value_of(place, name)
        writes: list[Callable[[], object]] = []
        try:
            new = _decoded(value, own, writes)
        except TypeError:
            place = None
        if place is None:
            others.append(_name((path, name)))
            continue
        if before and type(own) in _SCALARS and _shown(own) not in before:
            note(
                f"{_name((path, name))} is {_shown(own)} in the script, and was {before[0]} when it was "
                f"changed to {_shown(value)} during training: the value of the script is used"
            )
            continue
        for write in writes:
            write()
        if new is not own:
            set_value(place, name, new)
    for name in others:
        note(
            f"{name} changed during training and is not handed over: it starts with the value of the script; "
            "keep it in an attribute of the callback, or in numbers, texts, or lists and dicts of them"
        )


def _decoded(value: Any, own: Any, writes: list[Callable[[], object]]) -> Any:
    """Return a packed value, or the object that is already there, which `writes` change.

    Raises:
        TypeError: the existing value has another form.
    """
    if not isinstance(value, dict):
        return value
    kind, same, items = value["kind"], value["same"], value["items"]
    if kind == "variable":
        variable = own_variable(own)
        if variable is None or (there := variable.read()) is None:
            raise TypeError("no variable")
        if there.shape != items.shape or there.dtype != items.dtype:
            raise TypeError("another form")
        writes.append(partial(variable.assign, items))
        return own
    if kind == "tuple":
        others = own if type(own) is tuple and len(own) == len(items) else [ABSENT] * len(items)
        return tuple(_decoded(item, other, writes) for item, other in zip(items, others, strict=True))
    if same and type(own) is not _KINDS[kind]:
        raise TypeError("no such container")
    if kind == "array":
        if not same:
            return np.array(items)
        if own.shape != items.shape or own.dtype != items.dtype or not own.flags.writeable:
            raise TypeError("another form")
        writes.append(partial(np.copyto, own, items))
        return own
    new: Any
    if kind == "dict":
        names = [_decoded(name, ABSENT, writes) for name, _ in items]
        there = own if same else {}
        new = {
            name: _decoded(item, there.get(name, ABSENT), writes)
            for name, (_, item) in zip(names, items, strict=True)
        }
    elif kind == "list":
        there = [*own, *([ABSENT] * len(items))] if same else [ABSENT] * len(items)
        new = [_decoded(item, other, writes) for item, other in zip(items, there, strict=False)]
    else:
        new = {_decoded(item, ABSENT, writes) for item in items}
    if not same:
        return new
    writes.append(partial(_replace, own, new))
    return own


def _replace(container: Any, new: Any) -> None:
    """Replace the contents of a list, dict or set."""
    if isinstance(container, list):
        container[:] = new
    else:
        container.clear()
        container.update(new)


def _kind(plain: Any) -> str:
    return str(plain["kind"]) if isinstance(plain, dict) else ""


def _is_models(key: Key) -> bool:
    """Whether a place belongs to a part of a model, whose state also travels separately."""
    return key[0].startswith(_PARTS)


def _name(place: Key) -> str:
    return ".".join(place)
