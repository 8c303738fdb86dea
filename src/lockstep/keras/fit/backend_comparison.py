"""Compares a step of plain Keras on one backend with the same step on another one.

The first job of a check keeps the step in a file. A later job, on another backend, repeats it from the same
weights and the same batch.
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy.typing as npt

from lockstep.keras.fit.compared_step import ComparedStep
from lockstep.keras.fit.deviations import deviation
from lockstep.keras.fit.kept_steps import KeptStep, LayerRows
from lockstep.keras.fit.step_comparison import ROUNDINGS, StepComparison
from lockstep.keras.variables import optimizers_of
from lockstep.observability.events import Difference
from lockstep.system.prose import count

Array = npt.NDArray[Any]


class BackendComparison:
    """The comparison of one step of plain Keras with that of another backend."""

    def __init__(self, step: ComparedStep, parts: StepComparison) -> None:
        self._step = step
        self._parts = parts

    def kept(self) -> KeptStep:
        """Return the step of plain Keras, for other backends to repeat."""
        layers: list[LayerRows] = []
        with contextlib.suppress(Exception), self._step.constant():
            layers = self._step.layer_rows()
        return KeptStep(
            backend=keras.backend.backend(),
            shapes=self._shapes(),
            batch=keras.tree.flatten(self._step.batch),
            before={name: array for name, array in self._step.before.items() if _is_float(array)},
            outcome=self._step.reference,
            layers=layers,
        )

    def unlike(self, kept: KeptStep) -> tuple[list[str], list[Difference]]:
        """Repeat another backend's step with plain Keras; return the equal parts, and the differing ones."""
        outcomes = self._step.reference, kept.outcome
        updates, theirs = (len({update for update, _ in outcome.gradients}) for outcome in outcomes)
        text = _misfit(kept, self._shapes(), self._step.batch)
        if not text and updates != theirs:
            text = f"the step makes {count(updates, 'update')} instead of {theirs}"
        if text:
            return [], [Difference("model and batch", text)]
        before, batch = self._step.before, self._step.batch
        values = self._kept_values(kept)
        self._step.before = {**before, **values}
        self._step.batch = keras.tree.pack_sequence_as(batch, list(kept.batch))
        try:
            with self._step.constant(), self._step.first_values():
                self._step.program.load(None, self._step.before)
                plain = self._step.plain()
                rounded = [self._step.rounded(number) for number in range(ROUNDINGS)]
                expected = self._step.expected_update(kept.outcome)
                after = {name: kept.outcome.state[name] for name in expected if name in values}
                sides = kept.backend, keras.backend.backend()
                deviations = {
                    **self._parts.figures(kept.outcome, plain, rounded, plain, sides),
                    **self._parts.gradients(kept.outcome, plain, rounded, plain),
                    **self._parts.updated_variables(after, expected),
                }
                equal = [part for part, difference in deviations.items() if difference is None]
                begins = self._first_unlike(kept.layers) if len(equal) < len(deviations) else ""
        finally:
            self._step.before, self._step.batch = {**self._step.state(None), **before}, batch
            self._step.program.load(None, self._step.before)
        return equal, [
            Difference(part, str(difference), begins)
            for part, difference in deviations.items()
            if difference is not None
        ]

    def _kept_values(self, kept: KeptStep) -> dict[str, Array]:
        """Return the values of this model's variables before a kept step; a learning rate keeps its value."""
        optimizers = optimizers_of(self._step.model)
        rates = {id(variable) for optimizer in optimizers for variable in optimizer.variables}
        return {
            name: kept.before[name].astype(self._step.before[name].dtype)
            for name, variable in self._step.variables().items()
            if name in kept.before
            and name in self._step.before
            and kept.before[name].shape == self._step.before[name].shape
            and not (id(variable) in rates and not kept.before[name].shape)
        }

    def _shapes(self) -> dict[str, list[int]]:
        return {variable.path: list(variable.shape) for variable in self._step.model.trainable_variables}

    def _first_unlike(self, layers: Sequence[LayerRows]) -> str:
        """Name the first layer that has the other backend's inputs, but different outputs."""
        try:
            computed = self._step.layer_rows()
        except Exception:
            return ""
        for theirs, rows in zip(layers, computed, strict=False):
            if self._are_alike(theirs.inputs, rows.inputs) and not self._are_alike(
                theirs.outputs, rows.outputs
            ):
                return f"layer {rows.name}"
        return ""

    def _are_alike(self, theirs: Sequence[Array], rows: Sequence[Array]) -> bool:
        return len(theirs) == len(rows) and not any(
            deviation(array, other, (), self._step.epsilon) for array, other in zip(theirs, rows, strict=True)
        )


def _is_float(array: Array) -> bool:
    return bool(keras.backend.is_float_dtype(keras.backend.standardize_dtype(array.dtype)))


def _misfit(kept: KeptStep, shapes: Mapping[str, Sequence[int]], batch: Any) -> str:
    """Return why a step of another backend cannot be repeated; empty if it can."""
    for path in dict.fromkeys([*kept.shapes, *shapes]):
        if kept.shapes.get(path) != shapes.get(path):
            ours, theirs = shapes.get(path), kept.shapes.get(path)
            if ours is None or theirs is None:
                return f"only one of them has the variable {path}"
            return f"the shape of {path} is {ours} instead of {theirs}"
    rows = [None if leaf is None else leaf.shape[1:] for leaf in keras.tree.flatten(batch)]
    theirs_of_rows = [None if leaf is None else leaf.shape[1:] for leaf in kept.batch]
    return f"rows have the shapes {rows} instead of {theirs_of_rows}" if rows != theirs_of_rows else ""
