"""Reads and assigns many variables. With a small model, this takes most of a step's time."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.keras.assignments import observed_by
from lockstep.keras.backends.contract import Backend
from lockstep.keras.backends.eager_contract import EagerBackend

Array = npt.NDArray[Any]


class Transfers:
    """Reads and assigns variables of Keras, on any backend."""

    def __init__(self, backend: Backend | EagerBackend) -> None:
        self._backend = backend

    def read(self, variables: Sequence[Any]) -> list[Array]:
        """Return copies of the values of variables."""
        return [np.array(self._backend.to_numpy(variable.value)) for variable in variables]

    def assign(self, variables: Sequence[Any], arrays: Sequence[Array]) -> None:
        """Assign values to variables."""
        with observed_by(None):
            for variable, array in zip(variables, arrays, strict=True):
                variable.assign(array)
