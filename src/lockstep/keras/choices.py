"""The Python values that may decide which code of a program runs, such as `model.use_contrast`."""

import enum
import functools
import itertools
import re
import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import xxhash

from lockstep.keras.python_values import ABSENT, CONTAINERS, NESTED, value_of
from lockstep.keras.reached_objects import attribute_names, attribute_of, objects_in, parts_of, reached_by


class _Watched:
    """A place of `Choices`.

    Attributes:
        label: the place, equal in all processes of a job.
        read: returns the present value; `ABSENT` without one.
        value: the value at the last look.
        text: shows it.
    """

    __slots__ = ("label", "read", "text", "value")

    def __init__(self, label: str, read: Callable[[], Any], text_of: Callable[[Any], str]) -> None:
        self.label, self.read, self.value = label, read, read()
        self.text = text_of(self.value)


class Choices:
    """The values that may decide which code of a program runs, in the places that its functions name.

    These values are booleans, `None`, whether a number is zero, texts that its functions contain, functions,
    members of enumerations, and the classes of objects. The places are attributes of a model, its layers, its
    losses and the objects to which they refer, containers there, global variables, and variables of enclosing
    functions. Values that differ between processes from the beginning, such as whether a process writes
    files, do not count.

    Args:
        model: the model, just compiled.

    Attributes:
        key: "" while all values are the same as at the beginning; otherwise, a text with a line for each
            changed value.
        counts: the whole numbers that have changed, except from or to zero, by their places.
        moved: the texts at the beginning of values that had changed since the model was first compiled.
        traced: the keys with which this process has compiled its steps, by the kind of the step.
    """

    def __init__(self, model: Any, before: "Choices | None" = None) -> None:
        self.key = ""
        self.counts: set[str] = set()
        self.traced: dict[str, str] = {}
        self._find(model)
        self._first = {place.label: place.text for place in self._places}
        self.moved: dict[str, str] = {}
        if before is not None:
            earlier = before._first
            labels = {
                label
                for label in {**earlier, **self._first}
                if _decide(texts := (earlier.get(label, ""), self._first.get(label, "")))
                and texts[0] != texts[1]
            }
            self.moved = {label: self._first.get(label, "") for label in {*before.moved, *labels}}

    def adopt(self, moved: Mapping[str, str]) -> None:
        """Take over another process's `moved`, because this one has skipped the calls that changed values."""
        self.moved = {**self.moved, **moved}
        self._first = {**self._first, **moved}
        self._set_key()

    def differences(self, kind: str, key: str) -> list[tuple[str, str, str]]:
        """Compare the values with which this process compiles a step with those of another process's `key`.

        Returns:
            The places of values such as booleans, texts and functions, but not of numbers or tensors, each
            with its value in this process and in the other one. Callbacks often set numbers that no step
            reads.
        """
        own = self.traced[kind]
        if own == key:
            return []
        mine, others = _lines(own), _lines(key)
        differing = []
        for label in sorted({**mine, **others}):
            first = self._first.get(label, "")
            texts = mine.get(label, first), others.get(label, first)
            if texts[0] != texts[1] and _decide(texts) and not any(map(_NUMBER.search, texts)):
                differing.append((label.partition("#")[0], _shown(texts[0]), _shown(texts[1])))
        return differing

    def look(self, model: Any) -> str:
        """Read the present values, and return `key`. It takes some microseconds if none has changed."""
        if self._may_differ():
            self._find(model)
            self._set_key()
        return self.key

    def _set_key(self) -> None:
        texts = {place.label: place.text for place in self._places}
        lines = set()
        for label in {**self._first, **texts}:
            if (text := texts.get(label, "")) != self._first.get(label, ""):
                # The number of objects that the program adds does not count.
                shown = label if label in self._first else label.partition("#")[0]
                lines.add(f"{shown} = {text}")
        self.key = "\n".join(sorted(lines))

    def _may_differ(self) -> bool:
        differs = False
        for place in self._places:
            value, before = place.read(), place.value
            if value is before and not isinstance(value, CONTAINERS):
                continue
            if self._text(value) != place.text or (value is not before and _has_objects(value)):
                differs = True
                continue
            if (type(value) is int or isinstance(value, np.integer)) and value != before:
                self.counts.add(place.label)
            place.value = value
        return differs or any(len(attributes) != size for attributes, size in self._sizes)

    def _find(self, model: Any) -> None:
        """Find the places in the program as it is now."""
        objects, _, named, spaces, names, self._strings = reached_by(parts_of(model))
        self._places: list[_Watched] = []
        labels: Counter[str] = Counter()

        def add(label: str, read: Callable[[], Any]) -> None:
            labels[label] += 1
            self._places.append(_Watched(f"{label}#{labels[label]}", read, self._text))

        seen: set[tuple[int, str]] = set()
        for function, (name, value, place) in named:
            owner = function.__module__ if isinstance(place, dict) else function.__qualname__
            if isinstance(value, types.ModuleType | type):
                continue
            if (id(place), name) not in seen:
                seen.add((id(place), name))
                add(f"{name} in {owner}", functools.partial(value_of, place, name))
        self._sizes = [(vars(holder), len(vars(holder))) for holder in objects]
        for holder in objects:
            for name in sorted(names & attribute_names(holder)):
                add(f"{type(holder).__name__}.{name}", functools.partial(attribute_of, holder, name))
        for space in spaces:
            for name in sorted(names & vars(space).keys()):
                if not (name.startswith("__") or isinstance(vars(space)[name], types.ModuleType | type)):
                    add(f"{name} in {space.__name__}", functools.partial(attribute_of, space, name))

    def _text(self, value: Any, depth: int = 0) -> str:
        if value is None:
            return "None"
        if isinstance(value, str):
            return value.replace("\n", " ") if value in self._strings else "str"
        if isinstance(value, enum.Enum):
            return f"{type(value).__qualname__}.{value.name}"
        if isinstance(value, bool | np.bool_ | int | np.integer):
            return f"{type(value).__name__} {bool(value)}"
        if isinstance(value, types.MethodType | functools.partial):
            return self._text(getattr(value, "func", None) or value.__func__)  # type: ignore[union-attr]
        if isinstance(value, types.FunctionType):
            return f"{value.__module__}.{value.__qualname__}:{value.__code__.co_firstlineno}"
        kind = type(value).__qualname__
        if value is ABSENT:
            return ""
        if not isinstance(value, CONTAINERS) or depth > NESTED:
            return f"{_OBJECT}{kind}"
        if isinstance(value, set | frozenset) and len(value) > _FIRST_ITEMS:
            return f"{_OBJECT}{kind}"  # The order of its items differs between processes.
        first = list(itertools.islice(value.items() if isinstance(value, dict) else value, _FIRST_ITEMS))
        if isinstance(value, dict):
            items = [f"{self._text(k)}: {self._text(item, depth + 1)}" for k, item in first]
        else:
            items = [self._text(item, depth + 1) for item in first]
        # The length does not count, because a list of losses, for example, grows in each step.
        ordered = isinstance(value, tuple) or all(type(item) is bool for item in first)
        text = f"{kind}({', '.join(items if ordered else sorted(set(items)))})"
        return text if len(text) <= _LONGEST else f"{_OBJECT}{xxhash.xxh3_64_hexdigest(text.encode())}"


_FIRST_ITEMS = 60
"""The most items of a container that `Choices` reads."""
_LONGEST = 200
"""The length of the longest text of a container that `Choices` keeps as it is."""
_NUMBER = re.compile(r"int\d* (True|False)\b")
"""Finds numbers in the texts of `Choices`."""
_OBJECT = "~"
"""Marks the class of an object in the texts of `Choices`."""


def _decide(texts: Iterable[str]) -> bool:
    """Whether texts of `Choices` show values that decide by themselves, not the classes of objects."""
    return not any(_OBJECT in text for text in texts)


def _lines(key: str) -> dict[str, str]:
    """Return the texts in a key of `Choices` by their places."""
    parts = (line.partition(" = ") for line in key.split("\n") if line)
    return {label: text for label, _, text in parts}


def _shown(text: str) -> str:
    if text == "str":
        return "another text"
    return text.removeprefix("bool ") or "no value"


def _has_objects(value: Any) -> bool:
    """Whether a value is an object with attributes, or contains some."""
    return bool(objects_in([value]))
