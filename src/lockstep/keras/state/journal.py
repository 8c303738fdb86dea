"""The journal of a process's calls, with their results and errors, with which another process can resume.

A process that resumes runs the script from its beginning. Finished calls then return the same results, or
raise the same errors. The call in progress skips its steps up to the saved one without computing. A call that
answers the script several times, as scheduled functions do, has a log of its own in the journal.
"""

import sys
from array import array
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType, MappingProxyType
from typing import Any, Protocol

import numpy as np

from lockstep.checkpoint.values import packable
from lockstep.errors import CheckpointError
from lockstep.keras.randomness import random_states, same_states

Failure = Mapping[str, Any]
"""An error as plain values: the call that it ended, its class, arguments, attributes and text."""

_CallForm = tuple[str, tuple[str, ...], tuple[tuple[str, int], ...], int]
"""The form of a finished call: whether its figures are a list or a dict ("" for another result, "error" if it
raised), their names, and by how much it has advanced the calls of each method and the training steps."""


_LARGE = 256
"""The most numbers of an attribute that the journal keeps of every call."""


@dataclass(frozen=True)
class FinishedCall:
    """The result of one finished top-level call.

    Attributes:
        kept: its result; for `fit`, the states of its callbacks; for a loop, its position.
        methods: the number of calls of each method at its end.
        taken: the number of training steps at its end.
        error: the error that it raised, if any.
        states: the random states at its end; None if they are those of the beginning of the script.
        key: the key of its turn, if several threads make calls; see `lockstep.keras.call_turns`.
    """

    kept: Any
    methods: Mapping[str, int]
    taken: int
    error: BaseException | None = None
    states: Mapping[str, Any] | None = None
    key: str = ""

    @property
    def result(self) -> Any:
        """The result of the call. Raises the error of the call, if it raised one."""
        self.raise_error()
        return self.kept

    def raise_error(self) -> None:
        """Raise the error of the call, if any."""
        if self.error is not None:
            raise self.error


class CallLog(Protocol):
    """The outcomes of a call that answers the script several times."""

    def packed(self) -> dict[str, Any]:
        """Return the log as plain values and arrays."""


class Journal:
    """The finished calls of a process, in order.

    A script may make millions of single-batch calls, which each return a few figures. So figures are stored
    in columns, as numbers.

    Attributes:
        logs: the logs of calls that have one, by the number of the call, from 1.
        packed_logs: the logs that another process has sent, as they were packed.
    """

    def __init__(self) -> None:
        self._forms: dict[_CallForm, int] = {}
        self._codes = array("I")
        self._figures = array("d")
        self._others: dict[int, Any] = {}
        self._states: dict[int, Mapping[str, Any]] = {}
        self._keys: dict[int, str] = {}
        self._latest: dict[int, tuple[int, str, str]] = {}
        self._values: dict[tuple[str, str], dict[int, list[Any]]] = {}
        self.logs: dict[int, CallLog] = {}
        self.packed_logs: Mapping[int, Mapping[str, Any]] = {}
        self._last_states: Mapping[str, Any] = {}
        self._end = _Totals()
        self._read = _Totals()

    def add(
        self,
        result: Any,
        methods: Mapping[str, int],
        taken: int,
        failure: Failure | None = None,
        *,
        key: str = "",
        held: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Record a call that has finished or ended with an error, and the random states at its end.

        Args:
            result: the part of its result to keep.
            methods: the number of calls of each method at its end.
            taken: the number of training steps at its end.
            failure: the error that ended it, if any.
            key: the key of its turn.
            held: the states in its inputs that reading changes.
        """
        number = len(self._codes)
        if key:
            self._keys[number] = key
        counts = tuple(
            (method, count - self._end.methods.get(method, 0))
            for method, count in methods.items()
            if count > self._end.methods.get(method, 0)
        )
        shape, names, figures = _form(result) if failure is None else ("error", (), [])
        form = (shape, names, counts, taken - self._end.taken)
        self._codes.append(self._forms.setdefault(form, len(self._forms)))
        self._figures.extend(figures)
        if shape in ("", "error"):
            self._others[number] = result if failure is None else (failure, result)
            self._release_values(number, result)
        self._end.advance(form)
        states = random_states(held)
        changed = not same_states(states, self._last_states)
        if changed:
            self._last_states = self._states[number] = states
        self._release(number if changed else None, held)

    def _release_values(self, number: int, result: Any) -> None:
        """Release large values of Python variables that both this call and earlier calls have.

        As in `_release`, small values stay, because the script may read them between the calls.
        """
        for entry in _values_of(result):
            earlier = self._values.get((entry[0], entry[1]), {})
            for before, value in list(earlier.items()):
                if value[2]["same"] or not (isinstance(entry[2], dict) and entry[2]["same"]):
                    kept = self._others[before]
                    values = _values_of(kept[1] if type(kept) is tuple else kept)
                    values[:] = [each for each in values if each is not value]
                    del earlier[before]
            if _size(entry[2]) > _LARGE and isinstance(entry[2], dict):
                self._values.setdefault((entry[0], entry[1]), {})[number] = entry

    def _release(self, number: int | None, held: Mapping[str, Any]) -> None:
        """Release large numbers that earlier calls have of this call's objects, which have newer numbers.

        A process that skips the calls restores small values after each call, because the script may read
        them. It restores large values, such as the order of all examples, after the last call that has them.

        Args:
            number: the number of the call, or None if its states are those of an earlier one.
            held: the states in its inputs that reading changes.
        """
        last = max(self._states, default=0)
        for name, numbers in held.items():
            for path, identity in getattr(numbers, "identities", {}).items():
                before = self._latest.get(identity)
                if number is not None:
                    self._latest[identity] = number, name, path
                    if before is not None:
                        attributes = self._states[before[0]]["held"][before[1]].get(before[2], {})
                        for attribute in [key for key, value in attributes.items() if _is_large(value)]:
                            del attributes[attribute]
                elif before != (last, name, path):
                    # These are also states of another object, so they stay.
                    self._latest = {key: latest for key, latest in self._latest.items() if latest[0] != last}

    @property
    def states(self) -> Mapping[str, Any]:
        """The random states at the end of the last call; the current ones before the first."""
        return self._last_states or random_states()

    def __len__(self) -> int:
        return len(self._codes)

    @property
    def has_keys(self) -> bool:
        """Whether threads have made some of the calls."""
        return bool(self._keys)

    def key(self, number: int) -> str:
        """Return the key of the turn of a finished call, or an empty string before the first thread."""
        return self._keys.get(number, "")

    def packed(self) -> dict[str, Any]:
        """Return the journal as plain values and arrays."""
        logs = {"logs": {number: log.packed() for number, log in self.logs.items()}} if self.logs else {}
        return {
            "kinds": list(self._forms),
            "codes": np.array(self._codes, "uint32"),
            "figures": np.array(self._figures, "float64"),
            "others": dict(self._others),
            "states": dict(self._states),
            "keys": dict(self._keys),
            **logs,
        }

    @classmethod
    def unpacked(cls, packed: Mapping[str, Any]) -> "Journal":
        """Restore the journal from the result of `packed`."""
        journal = cls()
        journal._forms = {form: code for code, form in enumerate(packed["kinds"])}
        journal._codes = array("I", packed["codes"].tolist())
        journal._figures = array("d", packed["figures"].tolist())
        journal._others, journal._states = dict(packed["others"]), dict(packed["states"])
        journal._keys, journal.packed_logs = dict(packed.get("keys", {})), packed.get("logs", {})
        for number, kept in journal._others.items():
            journal._release_values(number, kept[1] if type(kept) is tuple else kept)
        forms = list(journal._forms)
        for code in journal._codes:
            journal._end.advance(forms[code])
        if journal._states:
            journal._last_states = journal._states[max(journal._states)]
        return journal

    def finished(self, number: int) -> FinishedCall:
        """Return the finished call at `number`, from 0.

        Raises:
            CheckpointError: it raised an error that cannot be raised again.
        """
        if number < self._read.calls:
            self._read = _Totals()
        forms = list(self._forms)
        while self._read.calls < number:
            self._read.advance(forms[self._codes[self._read.calls]])
        form = forms[self._codes[number]]
        start = self._read.figures
        self._read.advance(form)
        changes = list(self._states)
        position = bisect_right(changes, number)
        states = self._states[changes[position - 1]] if position else None
        figures = self._figures[start : self._read.figures].tolist()
        result, failure = self._result(number, form, figures)
        error = None if failure is None else error_of(failure)
        methods, taken = dict(self._read.methods), self._read.taken
        return FinishedCall(result, methods, taken, error, states, self.key(number))

    def _result(self, number: int, form: _CallForm, figures: list[float]) -> tuple[Any, Failure | None]:
        shape, names, _, _ = form
        if shape == "error":
            failure, kept = self._others[number]
            return kept, failure
        if shape == "dict":
            return dict(zip(names, figures, strict=True)), None
        return (figures if shape == "list" else self._others[number]), None


def _values_of(result: Any) -> list[Any]:
    """Return the values in the kept part of a `fit`; see `lockstep.keras.changed_values`."""
    values = result.get("values") if type(result) is dict else None
    return values.get("values", []) if type(values) is dict else []


def _size(plain: Any) -> int:
    """Return the number of numbers in a value of `_values_of`."""
    items = plain["items"] if isinstance(plain, dict) else plain
    return sum(map(_size, items)) if isinstance(items, list) else int(np.size(items))


def _is_large(value: Any) -> bool:
    return isinstance(value, np.ndarray | list | tuple) and np.size(value) > _LARGE


class _Totals:
    """The totals over the calls before a certain one."""

    def __init__(self) -> None:
        self.calls = self.figures = self.taken = 0
        self.methods: dict[str, int] = {}

    def advance(self, form: _CallForm) -> None:
        _, names, counts, taken = form
        self.calls += 1
        self.figures += len(names)
        self.taken += taken
        for method, count in counts:
            self.methods[method] = self.methods.get(method, 0) + count


def _form(result: Any) -> tuple[str, tuple[str, ...], list[float]]:
    """Return the form of a result, the names of its figures, and the figures."""
    if type(result) is list and all(type(figure) is float for figure in result):
        return "list", ("",) * len(result), result
    if type(result) is dict and all(type(figure) is float for figure in result.values()):
        return "dict", tuple(result), list(result.values())
    return "", (), []


def failure_of(error: BaseException, call: str) -> Failure:
    """Return an error as plain values for `error_of`. Attributes that are not plain are omitted."""
    error_class = type(error)
    # A class without its own `__init__`, such as OSError, may need more than `args`.
    reduced = error.__reduce__() if not _initializes(error_class) else ()
    arguments = reduced[1] if reduced[:1] == (error_class,) else error.args
    return {
        "call": call,
        "module": error_class.__module__,
        "class": error_class.__qualname__,
        "args": arguments if packable(arguments) else (),
        "attributes": {name: value for name, value in vars(error).items() if packable(value)},
        "text": str(error),
    }


def error_of(failure: Failure) -> BaseException:
    """Return an error of the same class and text.

    The class must be in a module that the program has imported. No `__init__` of the program runs.

    Raises:
        CheckpointError: the class does not exist any more, or the text would differ.
    """
    error_class: Any = sys.modules.get(failure["module"])
    for name in failure["class"].split("."):
        error_class = getattr(error_class, name, None)
    if isinstance(error_class, type) and issubclass(error_class, BaseException):
        error = _made(error_class, failure)
        if error is not None:
            return error
    raise CheckpointError(
        f"{failure['call']} of the script had ended with {failure['module']}.{failure['class']}: "
        f"{failure['text']}, and this process cannot raise it again for the script to catch: define the "
        "class at the top of a module, with a message built from plain arguments and attributes, or "
        "start over in another folder"
    )


def _made(error_class: type[BaseException], failure: Failure) -> BaseException | None:
    """Return the error, or None if its text differs or the program's own methods raise."""
    try:
        arguments = failure["args"]
        if _initializes(error_class):
            error = error_class.__new__(error_class, *arguments)
        else:
            error = error_class(*arguments)
        vars(error).update(failure["attributes"])
        return error if str(error) == failure["text"] else None
    except Exception:
        return None


def _initializes(error_class: type[BaseException]) -> bool:
    return isinstance(error_class.__init__, FunctionType)
