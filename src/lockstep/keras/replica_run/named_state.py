"""The state of a loop of the user's own, by the names that the loop gives it."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from lockstep.errors import CheckpointError, InputError
from lockstep.keras.variables import named_arrays, refuse_misfits

Arrays = Mapping[str, npt.NDArray[Any]]


@runtime_checkable
class Positioned(Protocol):
    """What has a place in its data, such as the iterator of a distributed dataset."""

    @property
    def position(self) -> tuple[int, int]:
        """How many passes were begun, and how many elements of the last were taken."""

    def skip(self, elements: int) -> None:
        """Pass over elements."""


class NamedState:
    """What a loop reads and writes; a `lockstep.keras.backends.contract.Held`.

    Args:
        parts: by name: Keras models, layers, optimizers, metrics and variables, TensorFlow's variables,
            iterators of distributed datasets, NumPy arrays, and dicts and lists of plain values. What has
            variables may get them in the loop's first step.

    Raises:
        InputError: a part is of another kind.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        for name, part in parts.items():
            if not (_has_variables(part) or isinstance(part, Positioned | np.ndarray | dict | list)):
                raise InputError(
                    f"state[{name!r}] is a {type(part).__name__}; expected a Keras model, layer, optimizer, "
                    "metric or variable, an iterator of a distributed dataset, a NumPy array, or a dict or "
                    "list of plain values: anything that the loop changes and that can be changed in place"
                )
        self._parts = dict(parts)

    @property
    def parts(self) -> Mapping[str, Any]:
        """What the loop has given, by name."""
        return self._parts

    @property
    def incomplete(self) -> bool:
        """Whether some part gets its variables in the loop's first step only."""
        return not all(getattr(part, "built", True) for part in self._parts.values())

    @property
    def positions(self) -> dict[str, list[int]]:
        """Where the iterators are, by the names of the parts."""
        parts = self._parts.items()
        return {name: list(part.position) for name, part in parts if isinstance(part, Positioned)}

    def go_to(self, positions: Mapping[str, Sequence[int]]) -> None:
        """Let the iterators pass over what others have taken.

        Raises:
            CheckpointError: they are other iterators.
        """
        for name, position in positions.items():
            part = self._parts.get(name)
            if not isinstance(part, Positioned):
                raise CheckpointError(f"state[{name!r}] was an iterator, and is {type(part).__name__} now")
            _go_to(part, position, name)

    def published(self, state: Any) -> AbstractContextManager[None]:
        """Do nothing: the parts are the state."""
        return nullcontext()

    def named_state(self, state: Any) -> Mapping[str, Any]:
        """Return what the parts have now: values of the backend, or arrays."""
        found: dict[str, Any] = {}
        for name, part in self._parts.items():
            if _has_variables(part):
                found |= {f"{name}/{path}": one.value for path, one in _variables(part).items()}
            elif isinstance(part, Positioned):
                found[name] = np.array(part.position, "int64")
            elif isinstance(part, np.ndarray):
                found[name] = part.copy()
            else:
                found[name] = np.frombuffer(_encoded(name, part), "uint8")
        return found

    def load(self, state: Any, arrays: Arrays) -> None:
        """Give the parts what `named_state` has returned, perhaps in another process.

        Raises:
            CheckpointError: they are others; nothing has changed then.
        """
        own = self.named_state(None)
        fixed = {name for name, part in self._parts.items() if isinstance(part, dict | list)}
        refuse_misfits(
            {name: value for name, value in own.items() if name not in fixed},
            {name: array for name, array in arrays.items() if name not in fixed},
        )
        for name, part in self._parts.items():
            if _has_variables(part):
                for path, variable in _variables(part).items():
                    variable.assign(arrays[f"{name}/{path}"])
            elif isinstance(part, Positioned):
                _go_to(part, arrays[name].tolist(), name)
            elif isinstance(part, np.ndarray):
                part[...] = arrays[name]
            else:
                _fill(part, msgspec.json.decode(arrays[name].tobytes()))


def _go_to(part: Positioned, position: Sequence[int], name: str) -> None:
    passes, taken = (int(number) for number in position)
    if part.position[0] != passes or part.position[1] > taken:
        raise CheckpointError(
            f"state[{name!r}] is in pass {part.position[0]} over its dataset, at element {part.position[1]}, "
            f"and the training was in pass {passes}, at element {taken}: create iterators at the same places "
            "before the loop"
        )
    part.skip(taken - part.position[1])


def _has_variables(part: Any) -> bool:
    return hasattr(part, "variables") or hasattr(part, "assign")


def _variables(part: Any) -> Mapping[str, Any]:
    if not hasattr(part, "variables"):
        return {"value": _Plain(part) if not hasattr(part, "path") else part}
    variables = [*part.variables, *(getattr(part, "metrics_variables", None) or ())]
    unique = list({id(variable): variable for variable in variables}.values())
    return named_arrays(unique, unique)


class _Plain:
    """A variable of TensorFlow as if it were one of Keras."""

    def __init__(self, variable: Any) -> None:
        self._variable = variable

    @property
    def value(self) -> Any:
        return self._variable.read_value()

    def assign(self, value: Any) -> None:
        self._variable.assign(value)


def _encoded(name: str, part: Any) -> bytes:
    try:
        return msgspec.json.encode(part)
    except (TypeError, OverflowError) as error:
        raise InputError(f"state[{name!r}] holds more than plain values: {error}") from None


def _fill(part: Any, content: Any) -> None:
    part.clear()
    part.update(content) if isinstance(part, dict) else part.extend(content)
