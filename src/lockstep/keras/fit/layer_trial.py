"""Tries layers and operations of models: their additions to the loss, and whether they compare examples."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from types import FunctionType
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from lockstep.data.batch import Share
from lockstep.keras.backends.common import has_own
from lockstep.keras.backends.growth import MEAN, nearest_growth
from lockstep.keras.fit.layer_calls import LayerCalls, arrays_of, rows_are_equal
from lockstep.keras.fit.tried_model import NOTHING, TriedModel
from lockstep.keras.fit.tried_outputs import inputs_to_try
from lockstep.keras.fit.tried_rows import TriedRows
from lockstep.keras.nests import Nest
from lockstep.keras.private.common import layers_of, modules_of, run_eagerly
from lockstep.keras.python_values import is_of_keras

Array = npt.NDArray[Any]


class LayerTrial:
    """The trial of layers, in training and in predictions."""

    def __init__(self, tried: TriedModel) -> None:
        self._tried = tried
        self._model = tried.model
        self._backend = tried.backend

    def measure(self) -> dict[int, int]:
        """Return the growths of the layers' additions to the loss; name the parts that compare examples."""
        layers = [
            layer
            for layer in layers_of(self._model)
            if _may_compare_rows(layer) or layer.activity_regularizer is not None
        ]
        layers += _operations_of(self._model)
        if not layers:
            return {}
        attempts = self._tried.results([], lambda: self._attempts(layers))
        if not attempts:
            for layer in layers:
                if _may_add_losses(layer):
                    self._tried.name(self._addition(layer), tried=False)
            return {}
        measured: dict[int, int] = {}
        for layer in layers:
            records = [[call[id(layer)] for call in calls] for calls in attempts]
            if growth := self._growth_of_additions(layer, records):
                measured[id(layer)] = growth
        self._name_comparing(layers, attempts)
        return measured

    def _name_comparing(
        self, layers: Sequence[Any], attempts: Sequence[Sequence[dict[int, LayerCalls]]]
    ) -> None:
        """Name the innermost layers and operations whose outputs compare examples."""
        comparing: set[int] = set()
        # Inner layers, and then operations, come last: what contains one of them is not named again.
        for layer in reversed(layers):
            inner_ids = {id(inner) for inner in _within(layer)}
            compares = any(self._compares([call[id(layer)] for call in calls]) for calls in attempts)
            if compares and not inner_ids & comparing:
                if layer is self._model:
                    self._tried.name(f"the call of {type(layer).__name__}")
                else:
                    kind = "layer" if isinstance(layer, keras.Layer) else "operation"
                    self._tried.name(f"the {kind} {layer.name}")
            if compares:
                comparing.add(id(layer))

    def _attempts(self, layers: Sequence[Any], *, training: bool = True) -> list[list[dict[int, LayerCalls]]]:
        """Return, for some inputs, the results of layers for all rows, and for each part of them."""

        def calls(x: Nest, part: TriedRows) -> dict[int, LayerCalls]:
            records = {id(layer): LayerCalls() for layer in layers}
            with ExitStack() as stack:
                for layer in layers:
                    stack.enter_context(records[id(layer)].recording(layer))
                with keras.StatelessScope(collect_losses=True):
                    self._model(part.cut(x), training=training)
            return records

        inputs = inputs_to_try(self._tried.batch.whole)
        return [self._tried.each(partial(calls, x)) for x in inputs]

    def _growth_of_additions(self, layer: Any, attempts: Sequence[Sequence[LayerCalls]]) -> int:
        """Return the growth of the values that a layer adds to the loss. It is the same for all of them."""
        growths: set[Any] = set()
        half = self._tried.stays_half()
        for records in attempts:
            values = [record.added for record in records]
            if len({len(added) for added in values}) == 1:
                growths |= {self._tried.growth(list(added), half=half) for added in zip(*values, strict=True)}
            else:
                growths.add(None)
        growths.discard(NOTHING)
        if not growths:
            return MEAN
        if len(growths) == 1 and None not in growths:
            growth: int = growths.pop()
            return growth
        self._tried.name(self._addition(layer))
        whole, *parts = (np.array([np.sum(value) for value in record.added]) for record in attempts[0])
        if len({len(added) for added in (whole, *parts)}) > 1:
            return MEAN
        if _may_add_losses(layer):
            return nearest_growth(whole, parts, self._tried.weights)
        # Keras divides what the regularizer returns by the number of examples.
        of_parts = [value * part.count for value, part in zip(parts, self._tried.batch.parts, strict=True)]
        return nearest_growth(whole * self._tried.batch.whole.count, of_parts, self._tried.weights) - 1

    @staticmethod
    def _addition(layer: Any) -> str:
        if _may_add_losses(layer):
            return f"add_loss of {type(layer).__name__}"
        return f"the activity_regularizer of {layer.name}"

    def _compares(self, records: Sequence[LayerCalls]) -> bool:
        """Whether a row of a layer's outputs depends on other rows of its inputs."""
        whole, *parts = (record.calls for record in records)
        if not all(len(part) == len(whole) for part in parts):
            return False
        for i, (inputs, outputs) in enumerate(whole):
            of_parts = [part[i] for part in parts]
            inputs_of_parts, outputs_of_parts = zip(*of_parts, strict=True)
            if self._equal_rows(inputs, inputs_of_parts) and not self._equal_rows(outputs, outputs_of_parts):
                return True
        return False

    def _equal_rows(self, whole: Sequence[Array], parts: Sequence[Sequence[Array]]) -> bool:
        return rows_are_equal(
            [whole, *parts], [self._tried.batch.count, *(part.count for part in self._tried.batch.parts)]
        )

    def name_predictions(self) -> None:
        """Name the parts that compare examples in predictions: layers, operations and the `predict_step`."""
        layers = [layer for layer in layers_of(self._model) if _may_compare_rows(layer)]
        layers += _operations_of(self._model)
        if layers:
            attempts = self._tried.results([], lambda: self._attempts(layers, training=False))
            self._name_comparing(layers, attempts)
        if has_own(self._model, "predict_step") and not self._tried.names:
            name = f"predict_step of {type(self._model).__name__}"
            for whole, *parts in self._tried.results([name], self._predictions):
                if not self._equal_rows(whole, parts):
                    self._tried.name(name)

    def _predictions(self) -> list[list[list[Array]]]:
        """Return, for one attempt, the outputs for all rows, and for each part of them."""
        with run_eagerly(self._model):
            program = self._backend.program(self._model, "predict")
            state = program.present()

            def outputs(part: TriedRows) -> list[Array]:
                share = Share(0, part.count, part.weight, 0, lambda: part.batch)
                program.compute(state, share, ())
                ((_, nest),) = program.outputs()
                return arrays_of(nest)

            return [self._tried.each(outputs)]


def _is_own(layer: Any) -> bool:
    """Whether a method of a layer is not one of Keras's, or it wraps a module of PyTorch."""
    module = getattr(type(layer).call, "__module__", "")
    return not is_of_keras(module) or _may_add_losses(layer) or bool(modules_of(layer))


def _may_compare_rows(layer: Any) -> bool:
    """Whether a layer is the program's own, holds a function of the program, or works along the examples."""
    if _is_own(layer) or isinstance(layer, keras.layers.Lambda):
        return True
    axis = getattr(layer, "axis", None)
    return 0 in (axis if isinstance(axis, list | tuple) else (axis,)) or any(
        isinstance(value, FunctionType) and not value.__module__.startswith("keras.")
        for value in vars(layer).values()
    )


def _operations_of(model: Any) -> list[Any]:
    """Return the operations of functional models that are not layers."""
    functions = [layer for layer in layers_of(model) if isinstance(layer, keras.Function)]
    operations = [operation for function in functions for operation in function.operations]
    return [operation for operation in operations if not isinstance(operation, keras.Layer)]


def _within(layer: Any) -> list[Any]:
    """Return the layers and operations within a layer."""
    if not isinstance(layer, keras.Layer):
        return []
    return [*layers_of(layer, include_self=False), *_operations_of(layer)]


def _may_add_losses(layer: Any) -> bool:
    """Whether a method of a layer's own class calls `add_loss`."""
    classes = [each for each in type(layer).__mro__ if not each.__module__.startswith(("keras.", "builtins"))]
    codes = [getattr(member, "__code__", None) for each in classes for member in vars(each).values()]
    return any(code is not None and "add_loss" in code.co_names for code in codes)
