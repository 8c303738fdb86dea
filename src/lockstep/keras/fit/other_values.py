"""Other values of the numbers that a program may change between steps, for trials.

A callback may raise the weight of a loss's term from 0, or a loss may follow a schedule by counting steps. In
the first batch, a term with the weight 0 has no effect, so a trial does not see that it compares examples. So
a trial is repeated with other values of

* the variables of Keras that it has read, if they have one element or are zero. The variables of Keras's own
  layers and of metrics do not count. Of an optimizer's variables, only the number of steps counts;
* variables of TensorFlow with one element to which functions and objects of the program refer;
* where Python runs in each step, the floats 0.0 and 1.0 of Python and NumPy to which they refer.

Whole numbers and truth values of Python and NumPy do not get other values: they decide which code runs, how
often, and how much memory it takes, so a program might write files, or never end. The same holds for truth
values in variables where Python runs in each step. Instead, a model is tried again once the program has
changed them (`lockstep.keras.fit.introductions`). Whole numbers in variables are counts, which training
reaches.

One repetition changes a value slightly, as weights may change; another changes it much, as counts may. A
program that uses a count as the number of iterations of a loop might never end with another value, so a
repetition ends after a number of lines of the program.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, TypeAlias

import keras
import numpy as np
import numpy.typing as npt

from lockstep.keras.private.common import layers_of, loss_tracker, stored_value, with_values
from lockstep.keras.python_values import is_float, is_in_program
from lockstep.keras.reached_objects import Number, numbers_of
from lockstep.keras.variables import flat_metrics, optimizers_of

_COUNT = 7_654_321
"""A count late in a training, not the first one of a period."""

_MOST_LINES = 50_000
"""The most lines that functions of the program run in a repetition."""

Array = npt.NDArray[Any]
Change: TypeAlias = tuple[Any, Array]
"""A variable of Keras or a `Number`, and its other value."""


def other_values(model: Any, read: Iterable[Any], *, runs_python: bool) -> list[list[Change]]:
    """Return, for some repetitions of a trial, other values of the numbers that a program may change.

    Args:
        model: the model, built and compiled.
        read: the variables of Keras that a trial has read.
        runs_python: whether Python runs in each step.
    """
    values = [(variable, _numpy(variable)) for variable in _changeable(model, read)]
    values += [
        (number, np.asarray(number.value))
        for number in numbers_of(model)
        if _may_change(number.value, runs_python)
    ]
    values = [(place, value) for place, value in values if not (runs_python and value.dtype.kind == "b")]
    repetitions = [
        [(place, other) for place, value in values if (other := change(value)) is not None]
        for change in (_moderately, _much)
    ]
    return [changes for changes in repetitions if changes]


class TooManyLinesError(Exception):
    """The program has run too many lines."""


@contextmanager
def bounded() -> Iterator[None]:
    """Within the block, functions of the program that begin raise an error after `_MOST_LINES` lines.

    It does not depend on a clock, so all workers do the same. Under a debugger, it does nothing.
    """
    lines = 0

    def in_program(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        if lines > _MOST_LINES:
            raise TooManyLinesError
        return in_program

    def called(frame: FrameType, *_: Any) -> Any:
        return in_program if is_in_program(frame.f_globals.get("__name__")) else None

    if sys.gettrace() is not None:
        yield
        return
    sys.settrace(called)
    try:
        yield
    finally:
        sys.settrace(None)


@contextmanager
def changed(changes: Sequence[Change]) -> Iterator[None]:
    """Within the block, variables of Keras and other numbers have other values."""
    with ExitStack() as stack:
        for place, value in changes:
            if not isinstance(place, Number):
                _change_variable(place, value, stack)
            else:
                stack.callback(place.reset)
                kind = type(place.value)
                place.set(kind(value) if is_float(place.value) else value.astype(place.value.dtype))
        yield


def _change_variable(variable: Any, value: Array, stack: ExitStack) -> None:
    """Give a variable another value until the end of `stack`. This does not count as an assignment."""
    stored, tensor = stored_value(variable), keras.ops.convert_to_tensor(value, variable.dtype)
    if keras.backend.backend() == "jax":
        stack.enter_context(with_values([variable], [tensor]))
        return
    # Functions of the program that were traced, and tapes, hold the variable of the backend.
    before = keras.ops.copy(stored.detach() if keras.backend.backend() == "torch" else stored)
    write = stored.assign if keras.backend.backend() == "tensorflow" else stored.data.copy_
    stack.callback(write, before)
    write(tensor)


def _may_change(value: Any, runs_python: bool) -> bool:
    """Whether steps may read other values in place of a number outside of Keras's variables."""
    if is_float(value):
        return runs_python and value in (0, 1)
    return runs_python or keras.backend.backend() == "tensorflow"


def _changeable(model: Any, read: Iterable[Any]) -> list[Any]:
    """Return the variables that a program may change between steps."""
    layers = layers_of(model)
    # The innermost layer comes last.
    owners = {id(variable): layer for layer in layers for variable in layer.variables}
    attributes = [value for layer in layers for value in vars(layer).values()]
    metrics = [
        *flat_metrics(model.metrics),
        *(value for value in attributes if isinstance(value, keras.Metric)),
        *([] if (tracker := loss_tracker(model)) is None else [tracker]),
    ]
    kept = {id(variable) for metric in metrics for variable in metric.variables}
    for optimizer in optimizers_of(model):
        kept |= {id(v) for v in optimizer.variables if v is not optimizer.iterations}

    def may_change(variable: Any) -> bool:
        owner = owners.get(id(variable))
        of_keras = type(owner).__module__.startswith("keras.") and not isinstance(owner, keras.Model)
        if id(variable) in kept or of_keras:
            return False
        if np.prod(variable.shape) == 1:
            return True
        is_weight = variable.trainable or not keras.backend.is_float_dtype(variable.dtype)
        return not is_weight and not np.any(_numpy(variable))

    return [variable for variable in read if may_change(variable)]


def _moderately(value: Array) -> Array | None:
    if value.dtype.kind != "f":
        return None
    of_zero = np.linspace(0.3, 0.5, value.size).reshape(value.shape)
    return np.where(value == 0, of_zero, 0.6 * value)


def _much(value: Array) -> Array | None:
    if value.dtype.kind == "b":
        return np.logical_not(value)
    if value.dtype.kind in "iu":
        return np.full_like(value, min(_COUNT, np.iinfo(value.dtype).max // 2))
    if value.dtype.kind == "f" and np.all(value == np.round(value)):
        return value + 7654.25
    return None


def _numpy(variable: Any) -> Array:
    value = variable.value
    if keras.backend.is_float_dtype(variable.dtype):
        value = keras.ops.cast(value, "float32")
    array: Array = keras.ops.convert_to_numpy(value)
    return array
