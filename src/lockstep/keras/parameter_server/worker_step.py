"""A worker's computation of a step of `fit`: its gradients, given the weights and the layers' state."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy.typing as npt

from lockstep.data.batch import Batch
from lockstep.keras.backends.contract import DENSITY, GRADIENTS, PRESENT, ServedProgram
from lockstep.keras.parameter_server.dispatcher import as_arrays
from lockstep.keras.parameter_server.embedding_tables import LookedUpRows
from lockstep.keras.parameter_server.process import FitProcess
from lockstep.keras.parameter_server.servers import Gradients
from lockstep.keras.parameter_server.worker import DoneWork
from lockstep.keras.seeds import key_of_replica
from lockstep.protocol.parameter_server import AtCall, WorkDone

Array = npt.NDArray[Any]


ANY_STEP = AtCall(-1, -1)
"""A worker waits for any step, whatever the call."""


class WorkerStep:
    """Computes steps, within `rows`, one after another.

    Args:
        process: the process of the call.

    Attributes:
        rows: the looked-up rows, which replace the tables in the model.
        state: the state that Keras threads through its steps, or None.
    """

    def __init__(self, process: FitProcess) -> None:
        self.rows = LookedUpRows(process.served.tables, process.model)
        self.state: Any = None
        self._process = process
        self._program: ServedProgram | None = None
        self._seeds: dict[str, Array] = {}

    @property
    def traced(self) -> int:
        """The number of times that the backend has traced the step; see `Program`."""
        return 0 if self._program is None else self._program.traced

    def look_up(self, data: Batch) -> dict[int, Array]:
        """Return the distinct rows that a batch looks up; see `LookedUpRows.look_up`.

        The next calls of `make_room` and `compute` are for this batch.
        """
        return self.rows.look_up(lambda: _inputs(data))

    def make_room(self, step: int, data: Batch) -> bool:
        """Compile the step if it does not fit the batch, and return whether it was compiled."""
        if not self.rows.make_room() and self._program is not None:
            return False
        process = self._process
        self._program = program = process.program()
        self.state = self.rows.fitted(self.state)
        # This compiles the step, and shows the names of the layers' state.
        process.computed(program, self.state, step, data)
        self._seeds = seeds_in(as_arrays(program.layers(self.state), process.backend.to_numpy))
        return True

    def compute(
        self,
        step: int,
        data: Batch,
        rows: Mapping[int, Array],
        weights: Sequence[Array],
        layers: Mapping[str, Array],
    ) -> DoneWork:
        """Compute a step. The worker then waits for another one.

        Args:
            step: the number of the step in the call.
            data: its batch.
            rows: the distinct rows that it looks up.
            weights: the weights; of tables, the distinct rows that `look_up` has returned.
            layers: the layers' state. This step's states of random generators replace those in it.

        Raises:
            ModelError: parameter servers do not support the step.
        """
        assert self._program is not None
        layers_of_step = {
            **layers,
            **{name: key_of_replica(seed, step) for name, seed in self._seeds.items()},
        }
        self.state = self._program.put(self.state, self.rows.placed(weights), layers_of_step)
        results = dict(self._process.computed(self._program, self.state, step, data))
        results.pop(DENSITY, None)
        present = results.pop(PRESENT, None)
        gradients = {
            i: results.pop(f"{GRADIENTS}{i}")
            for i in range(len(self._process.model.trainable_variables))
            if f"{GRADIENTS}{i}" in results
        }
        if present is not None:
            gradients = {i: gradient for i, gradient in gradients.items() if present[i]}
        message = WorkDone(ANY_STEP, step, names=tuple(results), check=data.check())
        return DoneWork(message, list(results.values()), Gradients(self.rows.collected(gradients), rows))


def _inputs(data: Batch) -> Any:
    """Return the inputs of the model in a batch."""
    return keras.utils.unpack_x_y_sample_weight(data.share(0).data())[0]


def seeds_in(layers: Mapping[str, Array]) -> dict[str, Array]:
    """Return the states of Keras's random generators among the layers' state."""
    return {name: array for name, array in layers.items() if array.dtype.kind in "iu" and array.shape == (2,)}
