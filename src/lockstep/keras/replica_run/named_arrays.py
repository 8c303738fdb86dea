"""Arrays and tensors that a function of `strategy.run` names: replicas must not change them in place.

They are in global variables, in variables of enclosing functions, or in lists, tuples and dicts there. Each
worker would change them once for each of its replicas. Arrays of JAX and tensors of TensorFlow cannot change.
"""

from collections.abc import Iterator
from typing import Any

from lockstep.errors import ModelError
from lockstep.keras.python_state import mark_of_array
from lockstep.keras.python_values import MANY_ELEMENTS, value_of
from lockstep.keras.reached_objects import places_named_by


class NamedArrays:
    """The NumPy arrays and PyTorch tensors that a function names. Large arrays do not count."""

    def __init__(self, function: Any) -> None:
        self._places = places_named_by(function)
        self._marks: list[tuple[str, Any, int]] = []

    def begin(self) -> None:
        """Begin a run of the function."""
        self._marks = [
            (name, value, mark)
            for name, place in self._places
            for value in _with_items(value_of(place, name))
            if (mark := mark_of_array(value)) is not None
        ]

    def refuse_changes(self) -> None:
        """Raise ModelError if a replica has changed one of them in place."""
        for name, value, mark in self._marks:
            if mark_of_array(value) != mark:
                raise ModelError(
                    "the function passed to strategy.run changes an array or a tensor in place, in the "
                    f"variable {name!r} outside of the function; each worker would change it once for each "
                    "of its replicas. Return what replicas compute, or use a metric or a Keras variable"
                )

    def end(self) -> None:
        """End a run of the function."""
        self._marks.clear()


def _with_items(value: Any) -> Iterator[Any]:
    yield value
    if isinstance(value, dict | list | tuple) and len(value) <= MANY_ELEMENTS:
        yield from value.values() if isinstance(value, dict) else value
