"""Embedding tables from which workers read only the rows that a batch looks up.

A worker computes a step with the looked-up rows in place of the table, in the order of the lookups. So the
compiled step neither has the table nor searches in it, and its gradients are those of the rows. The ids are
computed before the step, by the part of the model that leads from its inputs to its `Embedding` layers.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, NoReturn

import keras
import numpy as np
import numpy.typing as npt

from lockstep.errors import ModelError
from lockstep.keras.backends.common import has_own
from lockstep.keras.parameter_server.served_optimizers import lazy_hindrance
from lockstep.keras.parameter_server.server_tables import server_table
from lockstep.keras.parameter_server.table_rows import positions_of, summed_by_row
from lockstep.keras.private.common import (
    embedding_table,
    graph_kept,
    layers_of,
    nodes_of,
    own_trainable_variables,
    stored_value,
    symbolic_inputs,
    takes_training,
    with_values,
)
from lockstep.keras.randomness import random_states, same_states, set_random_states
from lockstep.worker.patch_registry import replaced

Array = npt.NDArray[Any]

_ADVICE = (
    "to let workers read the whole table, use a subclass of keras.layers.Embedding, or give the layer an "
    "embeddings_constraint"
)

_STYLE = re.compile("\x1b\\[[0-9;]*m")
"""The codes with which Keras highlights parts of messages."""


class EmbeddingTables:
    """The tables of a model whose rows workers read as needed, and the rows that a batch looks up.

    Args:
        layers: the layer that looks up rows of each table, by the table's position among the trainable
            variables, in the order of the layers.
        model: the model that they belong to; None if there are no tables.
        to_numpy: reads a tensor.
    """

    def __init__(self, layers: Mapping[int, Any], model: Any, to_numpy: Callable[[Any], Array]) -> None:
        self.layers, self._model, self._to_numpy = layers, model, to_numpy
        self._traces: dict[Any, _Trace] = {}

    @property
    def variables(self) -> frozenset[int]:
        """The positions of the tables among the trainable variables."""
        return frozenset(self.layers)

    def lookups(self, x: Any) -> list[list[Array]]:
        """Return, for each table, the positions of the rows that each call of its layer looks up.

        The model is traced once for each shape of its inputs, as backends do.

        Raises:
            DataError: an id is outside of its table.
            ModelError: with inputs of this shape, the ids do not follow from the inputs.
        """
        x = _arranged(self._model, x)
        shapes = tuple(tuple(leaf.shape[1:]) for leaf in keras.tree.flatten(x))
        if shapes not in self._traces:
            layers = [*self.layers.values()]
            try:
                with graph_kept(self._model):
                    trace = _traced(self._model, layers, x)
                    hindrance = trace.hindrance(layers)
            except (_TableRead, Exception) as error:
                hindrance = _line_of(error) or type(error).__name__
            if hindrance:
                raise ModelError(
                    f"with inputs of the shapes {shapes}, workers cannot know the rows that model "
                    f"{self._model.name!r} looks up: {hindrance}; {_ADVICE}"
                )
            self._traces[shapes] = trace
        ids_by_layer = self._traces[shapes].ids(x, self._to_numpy)
        return [
            [positions_of(layer.path, layer.input_dim, ids) for ids in ids_by_layer[layer.path]]
            for layer in self.layers.values()
        ]


class LookedUpRows:
    """The rows that a batch looks up, in place of the tables of a worker's model.

    Within the block, the tables are not in the model. A variable has the rows in the order of the lookups. It
    is replaced by a larger one when a batch looks up more rows. The block may be entered again.

    Args:
        tables: the tables of the model.
        model: the model, built.
    """

    def __init__(self, tables: EmbeddingTables, model: Any) -> None:
        self._tables, self._model = tables, model
        self._layers = tuple(tables.layers.values())
        self._rows: list[Any] = []
        self._ids: list[list[Array]] = []
        self._distinct: list[tuple[Array, Array]] = []
        self._calls: list[list[tuple[Any, ...]]] = []
        self._stack = ExitStack()

    def __enter__(self) -> "LookedUpRows":
        for number, layer in enumerate(self._layers):
            variable = embedding_table(layer)
            self._stack.enter_context(unreadable(layer, partial(_read_in_step, layer.path)))
            self._stack.enter_context(replaced(layer, "call", partial(self._look_up, number)))
            if number == len(self._rows):
                self._rows.append(_room(layer, 1))
            _put_variable(layer, variable, self._rows[number])
            self._stack.callback(self._put_back, number, variable)
        if self._layers:
            call = partial(self._call_model, self._model.call)
            self._stack.enter_context(replaced(self._model, "call", call))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def look_up(self, x: Callable[[], Any]) -> dict[int, Array]:
        """Return the distinct rows that a batch looks up, in order, by the positions of their tables.

        Args:
            x: returns the inputs of the batch. It is not called without tables.

        Raises:
            DataError: an id is outside of its table.
        """
        self._ids = self._tables.lookups(x()) if self._layers else []
        self._distinct = [
            np.unique(np.concatenate([ids.ravel() for ids in calls]), return_inverse=True)
            for calls in self._ids
        ]
        return {
            position: rows for position, (rows, _) in zip(self._tables.layers, self._distinct, strict=True)
        }

    def make_room(self) -> bool:
        """Make room for the rows of the batch, and return whether that has changed variables of the model."""
        changed = False
        for number, (layer, (_, inverse)) in enumerate(zip(self._layers, self._distinct, strict=True)):
            old, needed = self._rows[number], len(inverse)
            if needed <= old.shape[0]:
                continue
            size = needed if old.shape[0] == 1 else 1 << (needed - 1).bit_length()
            self._replace(number, _room(layer, size))
            changed = True
        return changed

    def fitted(self, state: Any) -> Any:
        """Return a state that Keras threads through its steps, resized for the rows of the batch."""
        if state is None:
            return None
        rows = {position: room.value for position, room in zip(self._tables.layers, self._rows, strict=True)}
        return [rows.get(i, value) for i, value in enumerate(state[0])], *state[1:]

    def placed(self, weights: Sequence[Array]) -> list[Array]:
        """Return weights in which the rows of all lookups replace the distinct rows of the tables."""
        placed = list(weights)
        for room, position, (_, inverse) in zip(self._rows, self._tables.layers, self._distinct, strict=True):
            rows = placed[position]
            placed[position] = np.zeros(room.shape, rows.dtype)
            np.take(rows, inverse, axis=0, out=placed[position][: len(inverse)])
        return placed

    def collected(self, gradients: Mapping[int, Array]) -> dict[int, Array]:
        """Return gradients with a sum over all lookups of each distinct row."""
        collected = dict(gradients)
        for position, (rows, inverse) in zip(self._tables.layers, self._distinct, strict=True):
            gradient = collected.get(position)
            if gradient is not None:
                collected[position] = summed_by_row(gradient[: len(inverse)], inverse, len(rows))
        return collected

    def _replace(self, number: int, variable: Any) -> None:
        """Replace the variable in which a layer has its rows."""
        _put_variable(self._layers[number], self._rows[number], variable)
        self._rows[number] = variable

    def _put_back(self, number: int, variable: Any) -> None:
        """Replace the variable in which a layer has its rows with the layer's table."""
        _put_variable(self._layers[number], self._rows[number], variable)

    def _call_model(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._calls = [[] for _ in self._rows]
        outputs = call(*args, **kwargs)
        for layer, calls, ids in zip(self._layers, self._calls, self._ids, strict=True):
            if len(calls) != len(ids):
                raise ModelError(
                    f"a step calls layer {layer.path!r} {len(calls)} times, and not {len(ids)} times "
                    f"as when the ids were computed; {_ADVICE}"
                )
        return outputs

    def _look_up(self, number: int, ids: Any) -> Any:
        """Look up rows in place of an `Embedding`'s `call`."""
        layer, calls = self._layers[number], self._calls[number]
        shape = tuple(keras.ops.shape(ids))
        expected_ids = self._ids[number]
        expected_shape = expected_ids[len(calls)].shape if len(calls) < len(expected_ids) else None
        if expected_shape is None or (
            all(isinstance(size, int) for size in shape) and shape != expected_shape
        ):
            raise ModelError(
                f"a step looks up ids of the shape {shape} in layer {layer.path!r}, which do not "
                f"follow from the model's inputs; {_ADVICE}"
            )
        first = sum(prod(earlier) for earlier in calls)
        calls.append(shape)
        rows = keras.ops.convert_to_tensor(self._rows[number])[first : first + prod(shape)]
        rows = keras.ops.reshape(rows, (*shape, layer.output_dim))
        return keras.ops.cast(rows, layer.compute_dtype)


def _put_variable(layer: Any, old: Any, new: Any) -> None:
    """Replace a variable of a layer."""
    variables = own_trainable_variables(layer)
    variables[next(i for i, variable in enumerate(variables) if variable is old)] = new


def _read_in_step(path: str) -> Exception:
    return ModelError(
        f"a step reads the table of layer {path!r} other than by lookups, such as in a loss; {_ADVICE}"
    )


def _room(layer: Any, size: int) -> Any:
    """Return a variable for a number of rows of a table."""
    table = embedding_table(layer)
    rows = np.zeros((size, layer.output_dim), np.float32)
    return keras.Variable(rows, dtype=table.dtype, trainable=True, name=table.name)


def find_tables(
    model: Any, x: Callable[[], Any], to_numpy: Callable[[Any], Array]
) -> tuple[EmbeddingTables, dict[str, str]]:
    """Return the tables of a model, and why workers read other `Embedding` layers' tables as a whole.

    The keys of the reasons are the layers' paths.

    Args:
        model: the model, built.
        x: returns inputs of a batch, or anything with their shapes and dtypes. It is called only
            if the model does not know the form of its inputs.
        to_numpy: reads a tensor.
    """
    positions = {id(variable): i for i, variable in enumerate(model.trainable_variables)}
    layers = [
        layer
        for layer in layers_of(model)
        if isinstance(layer, keras.layers.Embedding) and id(embedding_table(layer)) in positions
    ]
    unfit = layers and lazy_hindrance(model.optimizer, model.trainable_variables)
    reasons = {layer.path: reason for layer in layers if (reason := unfit or _hindrance(model, layer))}
    layers = [layer for layer in layers if layer.path not in reasons]
    while layers:
        try:
            with graph_kept(model):
                struct = symbolic_inputs(model)
                trace = _traced(model, layers, x() if struct is None else struct)
                hindrances = {layer.path: trace.hindrance([layer]) for layer in layers}
        except _TableRead as error:
            reasons[error.layer.path] = str(error)
            layers = [layer for layer in layers if layer is not error.layer]
            continue
        except Exception as error:
            cause = f"its ids cannot be computed before the step ({type(error).__name__}: {_line_of(error)})"
            hindrances = {layer.path: cause for layer in layers}
        reasons |= {path: hindrance for path, hindrance in hindrances.items() if hindrance}
        # No table belongs to several layers.
        read = {
            positions[id(embedding_table(layer))]: layer
            for layer in layers
            if layer.path not in reasons and trace.calls[layer.path]
        }
        return EmbeddingTables(read, model, to_numpy), reasons
    return EmbeddingTables({}, model, to_numpy), reasons


def _line_of(error: BaseException) -> str:
    """Return the line of an error's message that says what is wrong."""
    lines = [line.strip() for line in _STYLE.sub("", str(error)).splitlines() if line.strip()]
    telling = [line for line in lines if not line.startswith("Exception encountered when calling")]
    return next(iter(telling or lines), "")


def _hindrance(model: Any, layer: Any) -> str:
    """Return why the rows of a layer's table cannot be read as needed, or an empty string if they may be."""
    if type(layer) is not keras.layers.Embedding and server_table(embedding_table(layer)) is None:
        return f"{type(layer).__name__} is a subclass of Embedding"
    if has_own(model, "train_step") or has_own(model, "compute_loss"):
        return "the model has its own train_step or compute_loss"
    if layer.quantization_mode or layer.lora_enabled:
        return "it is quantized, or has LoRA"
    if layer.embeddings_regularizer is not None or layer.embeddings_constraint is not None:
        return "it has a regularizer or a constraint, which are for all rows"
    if layer.activity_regularizer is not None:
        return "it has an activity_regularizer"
    table = embedding_table(layer)
    owners = [other for other in layers_of(model) if any(v is table for v in own_trainable_variables(other))]
    return "several layers have it" if len(owners) > 1 else ""


class _TableRead(BaseException):
    """A model reads a table other than by lookups of ids that depend on its inputs.

    It is not an Exception, because Keras replaces those.
    """

    def __init__(self, layer: Any, reason: str = "the model reads it in other ways than by lookups") -> None:
        super().__init__(reason)
        self.layer = layer


class _Unreadable:
    """The value of a table that is on the servers: each use of it raises an error."""

    def __init__(self, error: Callable[[], BaseException]) -> None:
        self.__dict__["_error"] = error

    def __getattr__(self, name: str) -> NoReturn:
        raise self._error()

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise self._error()

    def __jax_array__(self) -> NoReturn:
        raise self._error()


@dataclass(frozen=True)
class _Trace:
    """A call of a model with symbolic inputs.

    Attributes:
        inputs: the symbolic inputs, flat.
        calls: the symbolic ids of each call of each layer, by the layer's path.
    """

    inputs: list[Any]
    calls: dict[str, list[Any]]
    _functions: dict[str, Any] = field(default_factory=dict)

    def hindrance(self, layers: Sequence[Any]) -> str:
        """Prepare to compute the ids of layers; return why they might be wrong, or an empty string.

        Callers are in the block of `graph_kept` in which the model was called.
        """
        inputs = {id(symbolic) for symbolic in self.inputs}
        for layer in layers:
            computed = [ids for ids in self.calls[layer.path] if id(ids) not in inputs]
            if computed:
                self._functions[layer.path] = function = keras.Function(self.inputs, computed)
                if hindrance := _dependence(function):
                    return f"its ids depend on {hindrance}"
        return ""

    def ids(self, x: Any, to_numpy: Callable[[Any], Array]) -> dict[str, list[Array]]:
        """Return the ids of each call of each layer for which `hindrance` was called, by the layer's path."""
        leaves = {
            id(symbolic): leaf for symbolic, leaf in zip(self.inputs, keras.tree.flatten(x), strict=True)
        }
        ids_by_layer = {}
        for path, calls in self.calls.items():
            results = iter(())
            if path in self._functions:
                arguments = [_as_called(leaves[id(symbolic)], symbolic) for symbolic in self.inputs]
                results = iter(keras.tree.flatten(self._functions[path](arguments)))
            ids_by_layer[path] = [
                to_numpy(_as_called(leaves[id(ids)], ids) if id(ids) in leaves else next(results))
                for ids in calls
            ]
        return ids_by_layer


def _dependence(function: Any) -> str:
    """Return what a function depends on besides its inputs, operations and layers without state."""
    for node in nodes_of(function):
        operation = node.operation
        if operation is None or node.is_input:
            continue
        if isinstance(operation, keras.layers.Layer):
            for layer in layers_of(operation):
                if layer.variables or isinstance(layer, keras.layers.Lambda):
                    return f"the layer {layer.path!r}, which has variables or is a Lambda"
                if not type(layer).__module__.startswith("keras."):
                    return f"the layer {layer.path!r}, which is not one of Keras"
        for argument in keras.tree.flatten((node.arguments.args, node.arguments.kwargs)):
            if isinstance(argument, keras.Variable):
                return f"the variable {argument.path!r}"
            if keras.ops.is_tensor(argument) and not isinstance(argument, keras.KerasTensor):
                return "a tensor of the model, which may be the value of a variable"
    return ""


def _traced(model: Any, layers: Sequence[Any], x: Any) -> _Trace:
    """Call a model with symbolic inputs like `x`.

    Raises:
        _TableRead: the model reads the table of one of the layers other than by lookups of such ids.
    """
    calls: dict[str, list[Any]] = {layer.path: [] for layer in layers}
    tables = {id(layer) for layer in layers}
    inputs = keras.tree.map_structure(_symbolic, x)
    states = random_states()
    scope = keras.StatelessScope(collect_losses=True)
    with ExitStack() as stack:
        for part in layers_of(model):
            if id(part) in tables:
                recorded = partial(_recorded, calls[part.path], part.symbolic_call)
                stack.enter_context(replaced(part, "symbolic_call", recorded))
                # With ids that do not depend on the inputs, the table is read at once.
                stack.enter_context(replaced(part, "call", partial(_read_at_once, part)))
                stack.enter_context(unreadable(part, partial(_TableRead, part)))
            elif any(id(inner) in tables for inner in layers_of(part, include_self=False)):
                stack.enter_context(replaced(part, "symbolic_call", part.call))
        if (call := _replaced_call(model)) is not None:
            stack.enter_context(replaced(model, "symbolic_call", call))
        # Within `fit` on JAX, variables have no values. Ids do not depend on them, but shapes do.
        empty = [variable for variable in model.variables if stored_value(variable) is None]
        stack.enter_context(
            with_values(empty, [keras.ops.zeros(variable.shape, variable.dtype) for variable in empty])
        )
        stack.enter_context(scope)
        model(inputs, **({"training": True} if takes_training(model) else {}))
    if scope.state_mapping or not same_states(random_states(), states):
        set_random_states(states)
        raise ModelError("the model draws random numbers, or changes variables, outside of its layers")
    return _Trace(keras.tree.flatten(inputs), calls)


def _replaced_call(model: Any) -> Any:
    """Return the `call` of a model that `LookedUpRows` has replaced, or None if it has not."""
    call = vars(model).get("call")
    if isinstance(call, partial) and isinstance(getattr(call.func, "__self__", None), LookedUpRows):
        return call.args[0]
    return None


def _symbolic(leaf: Any) -> Any:
    dtype = leaf.dtype if isinstance(leaf, keras.KerasTensor) else keras.ops.convert_to_tensor(leaf[:1]).dtype
    return keras.KerasTensor((None, *leaf.shape[1:]), keras.backend.standardize_dtype(dtype))


def _recorded(calls: list[Any], symbolic_call: Callable[[Any], Any], ids: Any) -> Any:
    calls.append(ids)
    return symbolic_call(ids)


def _read_at_once(layer: Any, *_: Any, **__: Any) -> NoReturn:
    raise _TableRead(layer, "its ids do not depend on the inputs of the model")


def _arranged(model: Any, x: Any) -> Any:
    """Return inputs in the structure, and with the ranks, of the inputs of a functional model."""
    struct = symbolic_inputs(model)
    if struct is None:
        return x
    if isinstance(x, dict):
        x = _named_inputs(struct, x)
    leaves, inputs = keras.tree.flatten(x), keras.tree.flatten(struct)
    if len(leaves) != len(inputs):
        return x
    pairs = zip(leaves, inputs, strict=True)
    return keras.tree.pack_sequence_as(struct, [_with_rank(leaf, symbolic.shape) for leaf, symbolic in pairs])


def _named_inputs(struct: Any, x: dict[str, Any]) -> Any:
    """Return named inputs in the structure of a functional model, by its keys or by its inputs' names."""
    if isinstance(struct, dict):
        return {name: x[name] for name in struct} if struct.keys() <= x.keys() else x
    symbolic = [struct] if isinstance(struct, keras.KerasTensor) else list(struct)
    if all(
        isinstance(symbolic_input, keras.KerasTensor) and symbolic_input.name in x
        for symbolic_input in symbolic
    ):
        return [x[symbolic_input.name] for symbolic_input in symbolic]
    return x


def _with_rank(leaf: Any, shape: Sequence[int | None]) -> Any:
    if len(leaf.shape) == len(shape) - 1 and shape[-1] == 1:
        return leaf[..., None]
    if len(leaf.shape) == len(shape) + 1 and leaf.shape[-1] == 1:
        return leaf[..., 0]
    return leaf


def _as_called(leaf: Any, symbolic: Any) -> Any:
    """Return a leaf of the inputs in the precision that the model's call gives it."""
    tensor = keras.ops.convert_to_tensor(leaf)
    if all("float" in keras.backend.standardize_dtype(value.dtype) for value in (tensor, symbolic)):
        return keras.ops.cast(tensor, symbolic.dtype)
    return tensor


def unreadable(layer: Any, error: Callable[[], BaseException]) -> AbstractContextManager[None]:
    """Within the block, each use of the value of a layer's table raises an error."""
    return with_values([embedding_table(layer)], [_Unreadable(error)])
