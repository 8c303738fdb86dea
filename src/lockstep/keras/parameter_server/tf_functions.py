"""What scheduled functions need on TensorFlow: access to many variables at once, and gradients of graphs.

A `tf.function` returns only what the program lets it return, so its graph assigns the gradients to variables,
which Python reads afterwards.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from lockstep.keras.backends.tf_graphs import natives

Array = npt.NDArray[Any]


class GraphTransfers:
    """The `Transfers` of TensorFlow, with one graph for each list of variables."""

    def __init__(self) -> None:
        self._readers: dict[tuple[int, ...], tuple[Any, Callable[[], Sequence[Any]]]] = {}
        self._assigners: dict[tuple[int, ...], tuple[Any, Callable[..., None]]] = {}

    def read(self, variables: Sequence[Any]) -> list[Array]:
        """Return copies of the values of variables."""
        if not variables:
            return []
        key = tuple(map(id, variables))
        if key not in self._readers:
            own = natives(variables)

            def read() -> list[Any]:
                return [variable.read_value() for variable in own]

            # The variables are kept, so that no other ones get their ids.
            self._readers[key] = variables, tf.function(read, autograph=False)
        return [np.array(tensor.numpy()) for tensor in self._readers[key][1]()]

    def assign(self, variables: Sequence[Any], arrays: Sequence[Array]) -> None:
        """Assign values to variables."""
        if not variables:
            return
        key = tuple(map(id, variables))
        if key not in self._assigners:
            own = natives(variables)

            def assign(*values: Any) -> None:
                for variable, value in zip(own, values, strict=True):
                    variable.assign(value)

            specs = [tf.TensorSpec(variable.shape, variable.dtype) for variable in own]
            made = tf.function(assign, autograph=False, input_signature=specs)
            self._assigners[key] = variables, made
        self._assigners[key][1](*map(tf.convert_to_tensor, arrays))


class OptimizerGradients:
    """The gradients of one optimizer.

    Args:
        variables: of the optimizer.

    Attributes:
        state: variables of TensorFlow: how often the optimizer was applied, and each variable had a gradient;
            and the gradients.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        self._kept = [tf.Variable(tf.zeros_like(one.value), trainable=False) for one in variables]
        self._counts = tf.Variable(tf.zeros(1 + len(variables), tf.int32), trainable=False)
        self._zeros = tf.zeros_like(self._counts)
        self.state = [self._counts, *self._kept]

    def add(self, gradients: Mapping[int, Any]) -> None:
        """Add operations to the graph that keep gradients, by position."""
        for position, gradient in gradients.items():
            kept = self._kept[position]
            kept.assign(tf.cast(tf.convert_to_tensor(gradient), kept.dtype))
        present = [1, *(int(position in gradients) for position in range(len(self._kept)))]
        self._counts.assign_add(tf.constant(present, tf.int32))

    def reset(self) -> None:
        """Forget everything."""
        self._counts.assign(self._zeros)

    @staticmethod
    def kept_in(state: Sequence[Array]) -> list[dict[int, Array]]:
        """Return the gradients, given the values of `state`, once for each time the optimizer was applied."""
        counts, *gradients = state
        times, *present = counts.tolist()
        return [{i: gradients[i] for i, count in enumerate(present) if count}] * times
