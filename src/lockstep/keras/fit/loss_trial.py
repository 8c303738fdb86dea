"""Tries a model's compiled losses, which may not be what they declare."""

from functools import partial
from typing import Any

import keras
import numpy.typing as npt

from lockstep.keras.backends.growth import MEAN, declared_growths, observed_losses
from lockstep.keras.backends.whole_batch import may_compare_examples
from lockstep.keras.fit.exactness import different_denominators
from lockstep.keras.fit.tried_model import NOTHING, TriedModel
from lockstep.keras.fit.tried_outputs import outputs_to_try
from lockstep.keras.fit.tried_rows import TriedRows
from lockstep.keras.nests import Nest
from lockstep.keras.private.common import compiled_loss, flat_losses

Array = npt.NDArray[Any]


class LossTrial:
    """The trial of the compiled losses."""

    def __init__(self, tried: TriedModel) -> None:
        self._tried = tried
        self._model = tried.model
        self._assigning: set[int] = set()

    def measure(self) -> dict[int, int]:
        """Return the growths of losses that are not means, by position; name losses that compare examples."""
        for name in different_denominators(self._model, self._tried.batch) if self._tried.tries else ():
            self._tried.name(name)
        declared = dict(declared_growths(self._model).losses)
        losses = flat_losses(self._model)
        doubtful = [i for i, loss in enumerate(losses) if may_compare_examples(loss)]
        if doubtful:
            names = {i: f"the loss {getattr(losses[i], 'name', None) or losses[i]}" for i in doubtful}
            attempts = self._tried.results(list(names.values()), self._loss_values)
            for i in doubtful if attempts else ():
                measured = {growths.get(i) for growths in attempts} - {NOTHING}
                if i in self._assigning:
                    measured.add(None)
                if len(measured) == 1 and None not in measured:
                    declared[i] = measured.pop()
                elif measured:
                    declared[i] = MEAN
                    self._tried.name(names[i])
                else:
                    self._tried.name(names[i], tried=False)
        return declared

    def _loss_values(self) -> list[dict[int, Any]]:
        """Return, for some attempts, the growth of each compiled loss, `NOTHING` where all values are 0."""
        growths = []
        for outputs, weights in outputs_to_try(self._model, self._tried.batch.whole):
            losses = self._tried.each(partial(self._losses_of, outputs, weights))
            growths.append({i: self._tried.growth([values[i] for values in losses]) for i in losses[0]})
        return growths

    def _losses_of(self, outputs: Nest, weights: Nest, part: TriedRows) -> dict[int, Array]:
        values: dict[int, Array] = {}

        def note(position: int, value: Any) -> None:
            values[position] = keras.ops.convert_to_numpy(value)
            if scope.assigned - metrics:
                self._assigning.add(position)
                scope.assigned.clear()

        metrics = {id(variable) for variable in self._model.metrics_variables}
        with _Assignments() as scope, observed_losses(self._model, note):
            compiled_loss(self._model)(part.data[1], part.cut(outputs), part.cut(weights))
        return values


class _Assignments(keras.StatelessScope):  # type: ignore[misc]
    """Records the ids of floating-point variables that are assigned, such as a queue of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.assigned: set[int] = set()

    def add_update(self, update: Any) -> None:
        """Note a new value of a variable."""
        if keras.backend.is_float_dtype(update[0].dtype):
            self.assigned.add(id(update[0]))
        super().add_update(update)
