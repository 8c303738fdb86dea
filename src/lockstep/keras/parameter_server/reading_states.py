"""The random states from which the chief reads the input of a `fit`: the same as on the workers.

Workers do not run callbacks or validate. So the random numbers that these draw on the chief must not change
the batches that it reads. If they have drawn from a state, the input continues from its own copy of it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lockstep.keras.input.held_state import ChangedNumbers
from lockstep.keras.randomness import (
    current_states,
    generator_state,
    is_in_variable,
    restore_states,
    same_state,
    set_generator_state,
)

_DRAWN = ("python", "numpy", "torch")
"""The states from which inputs draw, by their names in `current_states`."""


class ReadingStates:
    """The states from which an input draws.

    Args:
        held: the objects that the input holds; see `states_held`. Only generators count, except those in
            variables, from which TensorFlow's pipelines draw in their own threads.
    """

    def __init__(self, held: Iterable[Any]) -> None:
        self._generators = [
            state for state in held if not (isinstance(state, ChangedNumbers) or is_in_variable(state))
        ]
        self._begun = self._of_input = self._now()

    def read(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Begin a pass, and yield its batches."""
        with self._drawn():
            batches = begin()
        return self._each(batches)

    def resume(self) -> None:
        """Let the program continue from the input's states, if the input has drawn from them."""
        states = self._of_input.items()
        self._set({key: state for key, state in states if not same_state(state, self._begun.get(key))})

    def _each(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            with self._drawn():
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    @contextmanager
    def _drawn(self) -> Iterator[None]:
        now = self._now()
        others = {key: state for key, state in now.items() if not same_state(state, self._of_input.get(key))}
        self._set({key: self._of_input[key] for key in others if key in self._of_input})
        try:
            yield
        finally:
            self._of_input = self._now()
            self._set(others)

    def _now(self) -> dict[Any, Any]:
        states = current_states()
        global_states = {name: states[name] for name in _DRAWN if name in states}
        return {**global_states, **dict(enumerate(map(generator_state, self._generators)))}

    def _set(self, states: Mapping[Any, Any]) -> None:
        if not states:
            return
        named = {name: states[name] for name in _DRAWN if name in states}
        if named:
            restore_states(current_states() | named)
        for i, generator in enumerate(self._generators):
            if i in states:
                set_generator_state(generator, states[i])
