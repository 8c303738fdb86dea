"""The first steps of a check on one backend, which the check's jobs on other backends repeat.

`lockstep check --backend all` runs the script once on each backend, and asks whether plain Keras computes the
same. Initial weights and the order of examples depend on the backend. So the first job that takes a step
keeps the weights before it, its batch, and what plain Keras has computed. A later job takes its own step from
the same weights and batch.

Files are in the format of NumPy, without pickled objects: a header of JSON, and the arrays that it names, in
their order.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass
class StepOutcome:
    """The results of a step.

    Attributes:
        figures: the logs, or the outputs by path.
        gradients: the gradients by the number of the update and the position of the variable.
        state: the values of the variables after the step, by path.
    """

    figures: dict[str, Array]
    gradients: dict[tuple[int, int], Array]
    state: dict[str, Array]


@dataclass(frozen=True)
class LayerRows:
    """Some rows of the inputs and outputs of a layer, in its first call."""

    name: str
    inputs: Sequence[Array]
    outputs: Sequence[Array]


@dataclass(frozen=True)
class KeptStep:
    """A step of plain Keras on one backend.

    Attributes:
        backend: the name of the backend.
        shapes: the shapes of the model's trainable variables, by path.
        batch: the arrays of the batch; None for an absent one.
        before: the floating-point variables before the step, by path.
        outcome: what plain Keras has computed.
        layers: rows of the layers, in the order of their calls.
    """

    backend: str
    shapes: Mapping[str, Sequence[int]]
    batch: Sequence[Array | None]
    before: Mapping[str, Array]
    outcome: StepOutcome
    layers: Sequence[LayerRows]

    def save(self, path: Path) -> None:
        """Save the step, whole or not at all.

        Raises:
            ValueError: the batch has Python objects.
            OSError: the file cannot be written.
        """
        outcome, arrays = self.outcome, list[Array]()

        def added(values: Sequence[Array]) -> int:
            arrays.extend(map(_storable, values))
            return len(values)

        def names(values: Mapping[Any, Array]) -> list[Any]:
            added([*values.values()])
            return [*values]

        header = {
            "backend": self.backend,
            "shapes": self.shapes,
            "batch": [array is not None and added([array]) for array in self.batch],
            "before": names(self.before),
            "figures": names(outcome.figures),
            "gradients": names(outcome.gradients),
            "state": names(outcome.state),
            "layers": [[rows.name, added(rows.inputs), added(rows.outputs)] for rows in self.layers],
        }
        partial = path.with_suffix(".partial")
        try:
            with partial.open("wb") as file:
                np.savez(file, np.frombuffer(json.dumps(header).encode(), "uint8"), *arrays)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> "KeptStep":
        """Return the step in a file of a check."""
        with np.load(path, allow_pickle=False) as file:
            text, *others = (file[f"arr_{number}"] for number in range(len(file.files)))
        header, arrays = json.loads(text.tobytes()), iter(others)

        def taken(count: int) -> list[Array]:
            return [next(arrays) for _ in range(count)]

        batch = [next(arrays) if present else None for present in header["batch"]]
        before = dict(zip(header["before"], taken(len(header["before"])), strict=True))
        figures = dict(zip(header["figures"], taken(len(header["figures"])), strict=True))
        positions = [(update, position) for update, position in header["gradients"]]
        gradients = dict(zip(positions, taken(len(positions)), strict=True))
        state = dict(zip(header["state"], taken(len(header["state"])), strict=True))
        layers = [
            LayerRows(name, taken(inputs), taken(outputs)) for name, inputs, outputs in header["layers"]
        ]
        outcome = StepOutcome(figures, gradients, state)
        return cls(header["backend"], header["shapes"], batch, before, outcome, layers)


def _storable(array: Array) -> Array:
    if array.dtype.kind == "O":
        raise ValueError("the batch has Python objects")
    # NumPy does not know the names of types such as bfloat16.
    return array.astype("float32") if array.dtype.kind == "V" or array.dtype.num > 255 else array
