"""Observes which variables of Keras the script reads. Lockstep's own reads do not count."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import keras

from lockstep.keras.assignments import reads_observed_by
from lockstep.keras.parameter_server.function_run import entered_graphs


class ScriptReads:
    """Calls `act` before the script reads a variable.

    A function of TensorFlow reads the variables in its graph without Python. So when the script calls one, it
    counts as reading each variable that any graph has read before.

    Args:
        act: receives the variable.
        is_script: whether the main thread runs the script now.
    """

    def __init__(self, act: Callable[[Any], object], is_script: Callable[[], bool]) -> None:
        self._act, self._is_script = act, is_script
        self._in_graphs: dict[int, Any] = {}
        self._patches = ExitStack()
        self._pauses = 0

    def begin(self) -> None:
        """Begin to observe."""
        self._patches.enter_context(reads_observed_by(self._on_read))
        if keras.backend.backend() == "tensorflow":
            from lockstep.keras.parameter_server.tf_functions import calls_observed_by

            self._patches.enter_context(calls_observed_by(self._on_call))

    def end(self) -> None:
        """Stop observing."""
        self._patches.close()
        self._in_graphs.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within the block, reads do not count as reads of the script."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def _on_read(self, variable: Any) -> None:
        if entered_graphs():
            self._in_graphs[id(variable)] = variable
        if self._observes():
            self._act(variable)

    def _on_call(self) -> None:
        if self._observes():
            for variable in list(self._in_graphs.values()):
                self._act(variable)

    def _observes(self) -> bool:
        return (
            not self._pauses and threading.current_thread() is threading.main_thread() and self._is_script()
        )
