"""Parameter servers on TensorFlow: quick access to variables, and the gradients of graphs.

A `tf.function` returns only the values that the program returns in it. So its graph assigns the gradients to
variables, which Python reads afterwards.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from lockstep.errors import ModelError
from lockstep.keras.assignments import is_assigning
from lockstep.keras.backends.tf_graphs import assign, call_python, natives, read
from lockstep.keras.parameter_server.transfers import Transfers
from lockstep.keras.tf_random_ops import is_own, own_variables
from lockstep.worker.patch_registry import definer, replaced

Array = npt.NDArray[Any]


class VariableTransfers(Transfers):
    """The `Transfers` of TensorFlow."""

    def read(self, variables: Sequence[Any]) -> list[Array]:
        """Return copies of the values of variables."""
        return [np.array(read(native).numpy()) for native in natives(variables)]

    def assign(self, variables: Sequence[Any], arrays: Sequence[Array]) -> None:
        """Assign values to variables."""
        for native, array in zip(natives(variables), arrays, strict=True):
            assign(native, array)


@contextmanager
def refusing_own_variables() -> Iterator[None]:
    """Within the block, an assignment of a `tf.Variable` that is not one of Keras raises ModelError."""
    with ExitStack() as stack:
        for method in ("assign", "assign_add", "assign_sub"):
            owner = definer(type(tf.Variable(0.0)), method)
            stack.enter_context(_refusing(owner, method))
        yield


def _refusing(owner: Any, method: str) -> AbstractContextManager[None]:
    original = vars(owner)[method]

    @functools.wraps(original)
    def assign(variable: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_assigning() and not is_own(variable):
            raise ModelError(
                f"a scheduled function assigns {variable.name!r}, a tf.Variable: use a keras.Variable that "
                'is created in the scope of the strategy, with aggregation="sum" if it counts'
            )
        return original(variable, *args, **kwargs)

    return replaced(owner, method, assign)


def rows_looked_up(look_up: Callable[[Array], Array], ids: Any, variable: Any, shape: tuple[int, int]) -> Any:
    """Return the rows of ids; the gradient of the variable is that of the rows, as with any lookup.

    Args:
        look_up: returns the rows of ids, when the function runs.
        ids: the ids, of any shape.
        variable: the variable of TensorFlow, in place of the table.
        shape: the shape of the table.
    """

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def looked_up(ids: Any) -> Any:
        # This shows the tape that the result depends on the variable.
        tf.convert_to_tensor(variable)
        rows = call_python(lambda ids: look_up(ids.numpy()), [ids], variable.dtype)
        rows.set_shape(ids.shape.concatenate(shape[1]))

        def gradient(upstream: Any, variables: Any) -> Any:
            occurrences = tf.reshape(upstream, (-1, shape[1])), tf.reshape(ids, (-1,))
            return None, [tf.IndexedSlices(*occurrences, tf.constant(shape, tf.int64))]

        return rows, gradient

    return looked_up(ids)


def exchanged_in_graph(
    exchange: Callable[[dict[int, Array]], list[Array]],
    gradients: Mapping[int, Any],
    variables: Sequence[Any],
    shared: Sequence[Any],
) -> None:
    """Add operations to the graph that exchange gradients, by position, for new values of variables.

    Args:
        exchange: makes the exchange.
        gradients: the gradients of the function.
        variables: the variables that get the new values.
        shared: all variables that other functions also change, which may run meanwhile.
    """
    targets = natives(variables)

    def exchanged(*tensors: Any) -> list[Any]:
        arrays = [np.array(tensor.numpy()) for tensor in tensors[: len(gradients)]]
        return list(exchange(dict(zip(gradients, arrays, strict=True))))

    dense = [tf.convert_to_tensor(gradient) for gradient in gradients.values()]
    # Because the call gets the handles, TensorFlow counts it as an assignment of these variables. Operations
    # on them run before or after it, in the program's order, and not while the function waits.
    handles = {id(native): native.handle for native in [*natives(shared), *own_variables()]}
    values = call_python(exchanged, [*dense, *handles.values()], [variable.dtype for variable in targets])
    for variable, value in zip(targets, values, strict=True):
        value.set_shape(variable.shape)
        tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)


class OptimizerGradients:
    """The gradients of one optimizer.

    Args:
        variables: the variables of the optimizer.
        tables: the positions of the variables that represent tables, whose gradients are those of lookups.

    Attributes:
        state: variables of TensorFlow: the number of times that the optimizer was applied and that each
            variable had a gradient, the gradients, and the ids of the lookups.
    """

    def __init__(self, variables: Sequence[Any], tables: Sequence[int]) -> None:
        self._kept = [
            tf.Variable(tf.zeros_like(variable.value), trainable=False, shape=[None, *variable.shape[1:]])
            if position in tables
            else tf.Variable(tf.zeros_like(variable.value), trainable=False)
            for position, variable in enumerate(variables)
        ]
        self._ids = {
            position: tf.Variable(tf.zeros(1, tf.int64), trainable=False, shape=[None]) for position in tables
        }
        self._counts = tf.Variable(tf.zeros(1 + len(variables), tf.int32), trainable=False)
        self._zeros = tf.zeros_like(self._counts)
        self.state = [self._counts, *self._kept, *self._ids.values()]

    def add(self, gradients: Mapping[int, Any]) -> None:
        """Add operations to the graph that keep gradients, by position."""
        for position, gradient in gradients.items():
            kept = self._kept[position]
            if position in self._ids:
                ids_variable = self._ids[position]
                ids, gradient = tf.cast(gradient.indices, ids_variable.dtype), gradient.values
                tf.raw_ops.AssignVariableOp(resource=ids_variable.handle, value=ids)
            value = tf.cast(tf.convert_to_tensor(gradient), kept.dtype)
            tf.raw_ops.AssignVariableOp(resource=kept.handle, value=value)
        present = [1, *(int(position in gradients) for position in range(len(self._kept)))]
        tf.raw_ops.AssignAddVariableOp(resource=self._counts.handle, value=tf.constant(present, tf.int32))

    def times(self) -> int:
        """Return the number of times that the optimizer was applied since `reset`."""
        return int(self._counts.numpy()[0])

    def reset(self) -> None:
        """Forget everything."""
        tf.raw_ops.AssignVariableOp(resource=self._counts.handle, value=self._zeros)

    def kept_in(self, state: Sequence[Array]) -> list[dict[int, Array | tuple[Array, Array]]]:
        """Return the gradients in the values of `state`, once for each time that the optimizer was applied.

        The gradients of tables are pairs of the ids of lookups and their gradients.
        """
        counts, *arrays = state
        times, *present = counts.tolist()
        gradients: dict[int, Array | tuple[Array, Array]] = {i: arrays[i] for i, n in enumerate(present) if n}
        for (position, _), ids in zip(self._ids.items(), arrays[len(present) :], strict=True):
            if present[position]:
                gradients[position] = ids, arrays[position]
        return [gradients] * times


def calls_observed_by(act: Callable[[], object]) -> AbstractContextManager[None]:
    """Within the block, call `act` before a `tf.function` is called outside of all graphs."""
    owner: Any = definer(type(tf.function(lambda: None)), "__call__")
    original = vars(owner)["__call__"]

    @functools.wraps(original)
    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly():
            act()
        return original(function, *args, **kwargs)

    return replaced(owner, "__call__", call)
